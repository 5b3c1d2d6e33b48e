"""Plain lists of the committed tars, for tools that take tar URLs; updating a variant's records after a run."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from manifests.publish import naming, publish_bytes, remove
from shards.commits import Commit, commit_path, read_commits
from shards.contents import Contents, file_sha256, read_contents, write_contents
from shards.damage import DamagedContents
from shards.format import RECIPE_FILE

ALL_SHARDS_FILE = "shards.txt"
_SPLIT = re.compile(r"[A-Za-z0-9_-]+")


def shard_lists(commits: Mapping[int, Commit]) -> dict[str, bytes]:
    """Return file contents by name: shards.txt and shards-<split>.txt for each split with shards, ordered by shard ID.

    Raises:
        ValueError: a split's name is not valid in a file name.
    """
    lists: dict[str, list[str]] = {ALL_SHARDS_FILE: []}
    for _, commit in sorted(commits.items()):
        if commit.files is None:
            continue
        if not _SPLIT.fullmatch(commit.split):
            raise ValueError(f"split {commit.split!r} of shard {commit.shard_id} is not a valid name")
        lists[ALL_SHARDS_FILE].append(commit.files.tar)
        lists.setdefault(f"shards-{commit.split}.txt", []).append(commit.files.tar)
    return {name: "".join(f"{tar}\n" for tar in tars).encode() for name, tars in lists.items()}


def write_shard_lists(variant_dir: Path, commits: Mapping[int, Commit]) -> None:
    """Write the lists that `shard_lists` returns for `commits`.

    Lists that are already up to date are left unchanged; the list of a split without shards is removed.

    Raises:
        ValueError: a split's name is not valid in a file name.
    """
    lists = shard_lists(commits)
    for file_name, content in lists.items():
        path = variant_dir / file_name
        with naming(path):
            is_right = path.is_file() and path.read_bytes() == content
        if not is_right:
            publish_bytes(path, content)
    for path in variant_dir.glob("shards-*.txt"):
        if path.name not in lists:
            remove(path)


def finish_run(variant_dir: Path, *, dropped: Collection[int], wanted: Collection[int]) -> dict[int, Commit]:
    """Finish a run: remove commits that are no longer wanted, and write the shard lists and contents.json.

    Being killed between any two steps leaves nothing that looks like damage: a shard is removed from contents.json
    before its commit is, and a shard list is valid if it is the recorded one or the one derived from the commits.

    Args:
        dropped: shards whose commits to remove; damaged records of shards that are not in the plan are removed as well.
        wanted: shards of the plan. A shard of the plan that is listed without an intact commit stays listed, so that it
            is reported until it has been made.

    Returns:
        the remaining commits, by shard ID.
    """
    before = _recorded(variant_dir)
    found = read_commits(variant_dir)
    unsound = {damaged.shard_id for damaged in found.damaged}
    dropped = {*dropped, *unsound.difference(wanted)}
    commits = {shard_id: commit for shard_id, commit in found.commits.items() if shard_id not in dropped}
    shard_ids = frozenset(commits.keys() | unsound.intersection(wanted))
    if before is not None and before.shard_ids - shard_ids:
        write_contents(variant_dir, Contents(before.shard_ids & shard_ids, before.files))
    for shard_id in dropped:
        remove(commit_path(variant_dir, shard_id))
    write_shard_lists(variant_dir, commits)
    with naming(variant_dir / RECIPE_FILE):
        recipe = (variant_dir / RECIPE_FILE).read_bytes()
    contents = {RECIPE_FILE: recipe, **shard_lists(commits)}
    checksums = {name: file_sha256(content) for name, content in contents.items()}
    write_contents(variant_dir, Contents(shard_ids, checksums))
    return commits


def damaged_lists(variant_dir: Path, commits: Mapping[int, Commit]) -> list[DamagedContents]:
    """Return the shard lists that match neither contents.json nor the lists derived from `commits`."""
    recorded = _recorded(variant_dir)
    if recorded is None:
        return []
    current = shard_lists(commits)
    found = []
    for name in sorted({name for name in recorded.files if name != RECIPE_FILE} | current.keys()):
        try:
            content = (variant_dir / name).read_bytes()
        except FileNotFoundError:
            # A split may have lost its last shard; an interrupted run may not have written a new split's list yet.
            if name in current and name in recorded.files:
                found.append(DamagedContents(variant_dir / name, "the shard list is missing"))
            continue
        if recorded.files.get(name) != file_sha256(content) and current.get(name) != content:
            found.append(DamagedContents(variant_dir / name, "the shard list differs from what was written"))
    return found


def _recorded(variant_dir: Path) -> Contents | None:
    try:
        return read_contents(variant_dir)
    except DamagedContents:
        return None
