"""Update the derived files of a variant at the end of a run: shard lists, commits.arrow and contents.json.

Shard lists are text files with the names of the committed tars, for tools that take tar URLs. contents.json contains
the checksums of the other files.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clipmill.manifests.publish import publish_bytes, read_record, remove, tag_errors
from clipmill.shards.commit_table import (
    CommitRecords,
    Contents,
    confirm_folders,
    file_sha256,
    open_commit_table,
    read_commits,
    read_contents,
    table_bytes,
    write_contents,
)
from clipmill.shards.commits import Commit, commit_path
from clipmill.shards.format import COMMIT_TABLE_FILE, COMMITS_FOLDER, RECIPE_FILE
from clipmill.shards.index import index_seconds
from clipmill.shards.opening import Damaged, DamagedContents

ALL_SHARDS_FILE = "shards.txt"
_SPLIT = re.compile(r"[A-Za-z0-9_-]+")


def shard_lists(commits: Mapping[int, Commit]) -> dict[str, bytes]:
    """Return the content of each shard list by file name: shards.txt, and shards-<split>.txt for each split.

    Tars are listed in ascending order of shard ID.

    Raises:
        ValueError: The name of a split is not valid in a file name.
    """
    lists: dict[str, list[str]] = {ALL_SHARDS_FILE: []}
    for _, commit in sorted(commits.items()):
        if commit.files is None:
            continue
        if not _SPLIT.fullmatch(commit.split):
            raise ValueError(f"the split of shard {commit.shard_id}, {commit.split!r}, is not a valid name")
        lists[ALL_SHARDS_FILE].append(commit.files.tar)
        lists.setdefault(f"shards-{commit.split}.txt", []).append(commit.files.tar)
    return {name: "".join(f"{tar}\n" for tar in tars).encode() for name, tars in lists.items()}


def write_shard_lists(variant_dir: Path, commits: Mapping[int, Commit]) -> None:
    """Write the shard lists of `commits`, and remove the lists of splits without shards.

    A list that is up to date is not written again.

    Raises:
        ValueError: The name of a split is not valid in a file name.
    """
    lists = shard_lists(commits)
    for file_name, content in lists.items():
        path = variant_dir / file_name
        with tag_errors(path):
            is_current = path.is_file() and path.read_bytes() == content
        if not is_current:
            publish_bytes(path, content)
    for path in variant_dir.glob("shards-*.txt"):
        if path.name not in lists:
            remove(path)


def finish_run(variant_dir: Path, *, dropped_ids: Collection[int], planned_ids: Collection[int]) -> dict[int, Commit]:
    """Finish a run: remove unplanned commits, and write the shard lists, commits.arrow and contents.json.

    If the process is killed between two steps, nothing looks damaged: a shard is removed from contents.json before its
    commit is deleted, and a shard list is valid if it matches either its recorded checksum or the commits.

    Args:
        dropped_ids: IDs of the shards whose commits are removed. Damaged records of unplanned shards are removed too.
        planned_ids: IDs of the planned shards. If the record of a planned shard is damaged or missing, the shard stays
            in contents.json, so that it is reported until it has been rebuilt.

    Returns:
        The remaining commits, by shard ID.
    """
    old_contents = _recorded_contents(variant_dir)
    records = read_commits(variant_dir)
    damaged_ids = {damaged.shard_id for damaged in records.damaged}
    dropped_ids = {*dropped_ids, *damaged_ids.difference(planned_ids)}
    commits = {shard_id: commit for shard_id, commit in records.commits.items() if shard_id not in dropped_ids}
    shard_ids = frozenset(commits.keys() | damaged_ids.intersection(planned_ids))
    if old_contents is not None and old_contents.shard_ids - shard_ids:
        write_contents(variant_dir, Contents(old_contents.shard_ids & shard_ids, old_contents.files))
    folders = dict(records.folders)
    for shard_id in dropped_ids:
        path = commit_path(variant_dir, shard_id)
        remove(path)
        if (name := _folder_name(path)) in folders:
            folders[name] = path.parent.stat().st_mtime_ns
    write_shard_lists(variant_dir, commits)
    table_sha256 = _write_table(variant_dir, records, commits)
    with tag_errors(variant_dir / RECIPE_FILE):
        recipe = (variant_dir / RECIPE_FILE).read_bytes()
    contents = {RECIPE_FILE: recipe, **shard_lists(commits)}
    checksums = {name: file_sha256(content) for name, content in contents.items()}
    write_contents(variant_dir, Contents(shard_ids, {**checksums, COMMIT_TABLE_FILE: table_sha256}))
    damaged_folders = {_folder_name(record.path) for record in records.damaged}
    confirm_folders(variant_dir, sha256=table_sha256, folders=folders, omitted_folders=damaged_folders)
    return commits


def _folder_name(path: Path) -> str:
    """Return the name of the folder of commits that contains the record `path`; empty for `commits/` itself."""
    return "" if path.parent.name == COMMITS_FOLDER else path.parent.name


def _write_table(variant_dir: Path, records: CommitRecords, commits: dict[int, Commit]) -> str:
    """Publish the table of `commits` unless it is up to date; return the SHA-256 of the table (hex).

    Args:
        records: Records before `finish_run` removed commits.
    """
    if records.table is not None and records.is_table_current and len(commits) == len(records.commits):
        return records.table.sha256
    old_contents = _recorded_contents(variant_dir)
    if old_contents is not None and COMMIT_TABLE_FILE in old_contents.files:
        # Remove the recorded checksum first, because the new table will not match it.
        other_files = {name: sha256 for name, sha256 in old_contents.files.items() if name != COMMIT_TABLE_FILE}
        write_contents(variant_dir, Contents(old_contents.shard_ids, other_files))
    seconds = records.shard_seconds()
    for shard_id, commit in commits.items():
        if commit.files is not None and shard_id not in seconds:
            with suppress(Damaged, OSError):  # the duration is unknown until the shard has been rebuilt
                seconds[shard_id] = index_seconds(variant_dir / commit.files.index)
    content = table_bytes(replace(records, commits=commits).to_table(shard_seconds=seconds))
    publish_bytes(variant_dir / COMMIT_TABLE_FILE, content)
    return file_sha256(content)


def damaged_lists(variant_dir: Path, commits: Mapping[int, Commit]) -> list[DamagedContents]:
    """Return errors for the damaged shard lists, and for commits.arrow if it does not match contents.json.

    A shard list is damaged if it matches neither contents.json nor `commits`.
    """
    old_contents = _recorded_contents(variant_dir)
    if old_contents is None:
        return []
    lists = shard_lists(commits)
    errors = []
    for name in sorted((old_contents.files.keys() - {RECIPE_FILE, COMMIT_TABLE_FILE}) | lists.keys()):
        try:
            content = read_record(variant_dir / name)
        except IsADirectoryError as error:
            errors.append(DamagedContents(variant_dir / name, error.strerror or str(error)))
            continue
        except FileNotFoundError:
            # The list may be missing because its split lost its last shard, or because an interrupted run did not write
            # the list of a new split.
            if name in lists and name in old_contents.files:
                errors.append(DamagedContents(variant_dir / name, "the shard list is missing"))
            continue
        if old_contents.files.get(name) != file_sha256(content) and lists.get(name) != content:
            errors.append(DamagedContents(variant_dir / name, "the shard list differs from the list that was written"))
    table_sha256 = old_contents.files.get(COMMIT_TABLE_FILE)
    if table_sha256 is not None and open_commit_table(variant_dir, sha256=table_sha256) is None:
        message = "the table of commits is missing, or differs from the table that was written"
        errors.append(DamagedContents(variant_dir / COMMIT_TABLE_FILE, message))
    return errors


def _recorded_contents(variant_dir: Path) -> Contents | None:
    try:
        return read_contents(variant_dir)
    except DamagedContents:
        return None
