"""Checking the files of all shards of a variant by listing its folders; only files that have changed are opened."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipmill.shards.commit_table import table_written_ns
from clipmill.shards.commits import Commit, commit_path, read_commit
from clipmill.shards.damage import DamagedCommit
from clipmill.shards.format import COMMIT_TABLE_FILE, COMMITS_FOLDER, commit_name, folder_of
from clipmill.shards.verify import Code, Problem, damaged_commit, quick_check

_NUM_THREADS = 8  # on a network disk, each file takes a request
_MIN_LISTED = 50  # for fewer shards of a folder, their files are looked up one by one

States = dict[str, tuple[int, int]]  # file name -> size in bytes, modification time in ns


def quick_problems(variant_dir: Path, commits: Iterable[Commit]) -> dict[int, list[Problem]]:
    """Return what `clipmill.shards.verify.quick_check` finds for the shards of a variant, by the IDs of those with
    problems.

    In addition, a commit record that is newer than the table of commits is read and compared with the commit.
    """
    folders: dict[str, list[Commit]] = {}
    for commit in commits:
        place = folder_of(commit.shard_id) if commit.files is None else commit.files.tar.rpartition("/")[0]
        folders.setdefault(place, []).append(commit)
    written_ns = table_written_ns(variant_dir)
    listed = any(len(of_folder) >= _MIN_LISTED for of_folder in folders.values())
    of_first = _states(variant_dir / COMMITS_FOLDER) if listed else {}

    def check(folder: str) -> dict[int, list[Problem]]:
        of_folder = folders[folder]
        if len(of_folder) < _MIN_LISTED:
            return {commit.shard_id: _check_one(variant_dir, commit, written_ns) for commit in of_folder}
        files = _states(variant_dir / folder)
        records = of_first | _states(variant_dir / COMMITS_FOLDER / folder) if folder else of_first
        return {
            commit.shard_id: _check_one(variant_dir, commit, written_ns)
            for commit in of_folder
            if not _is_unchanged(commit, files=files, records=records, written_ns=written_ns)
        }

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = {number: problems for part in pool.map(check, folders) for number, problems in part.items() if problems}
    return dict(sorted(found.items()))


def check_record(variant_dir: Path, commit: Commit) -> list[Problem]:
    """Compare a commit that was read from the table of commits with its record."""
    path = commit_path(variant_dir, commit.shard_id)
    try:
        is_same = read_commit(path) == commit
    except DamagedCommit as error:
        return [damaged_commit(error)]
    except FileNotFoundError:
        return []  # removed by another command, or reported as missing
    except OSError as error:
        return [Problem(commit.shard_id, None, Code.UNREADABLE, str(error))]
    return [] if is_same else [damaged_commit(DamagedCommit(path, f"it differs from {COMMIT_TABLE_FILE}"))]


def _check_one(variant_dir: Path, commit: Commit, written_ns: int | None) -> list[Problem]:
    path = commit_path(variant_dir, commit.shard_id)
    try:
        is_newer = written_ns is not None and path.stat().st_mtime_ns > written_ns
    except OSError:
        is_newer = False
    return (check_record(variant_dir, commit) if is_newer else []) or quick_check(variant_dir, commit)


def _is_unchanged(commit: Commit, *, files: States, records: States, written_ns: int | None) -> bool:
    """Return True if `quick_check` would find the files of a shard complete, and none newer than its commit."""
    record = records.get(commit_name(commit.shard_id))
    if record is None or (written_ns is not None and record[1] > written_ns):
        return False
    stored = commit.files
    if stored is None:
        return True
    sizes = (
        (stored.tar, stored.tar_bytes),
        (stored.index, stored.index_bytes),
        (stored.energon_index, 8 * (stored.num_samples + 1)),
    )
    for name, size_bytes in sizes:
        state = files.get(name.rpartition("/")[2])
        if state is None or state[0] != size_bytes or state[1] > record[1]:
            return False
    return True


def _states(folder: Path) -> States:
    """Return the states of the files in a folder, except those that cannot be looked up."""
    states: States = {}
    try:
        with os.scandir(folder) as entries:
            # In the order in which disks store the states, which is not that of the listing.
            for entry in sorted(entries, key=os.DirEntry.inode):
                try:
                    state = entry.stat()
                except OSError:
                    continue
                states[entry.name] = state.st_size, state.st_mtime_ns
    except OSError:
        pass  # every file is looked up by itself, which names the problem
    return states
