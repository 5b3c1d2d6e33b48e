"""Verify shards against their commits, and recover samples from damaged or outdated shards.

`verify_shard` reads every byte of a shard. `quick_problems` checks all shards of a variant: it lists their folders, and
opens only files that have changed. `readable_rows` recovers only samples that are proven to be intact.
"""

import os
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import read_record
from clipmill.manifests.storage.mirrors import file_state, local_copy, set_modified_time
from clipmill.shards.commit_table import table_modified_ns
from clipmill.shards.commits import Commit, ShardFiles, commit_path, read_commit
from clipmill.shards.format import COMMIT_TABLE_FILE, COMMITS_FOLDER, commit_name, folder_of, folders_in
from clipmill.shards.index import energon_index_bytes, extensions_of, member_columns, open_index
from clipmill.shards.opening import DamagedCommit, DamagedIndex, scan


class Code(StrEnum):
    """Codes of the problems that a shard can have."""

    TAR_MISSING = "tar_missing"
    TAR_SIZE = "tar_size"
    TAR_CHECKSUM = "tar_checksum"
    TAR_ENTRIES_DIFFER = "tar_entries_differ"
    INDEX_MISSING = "index_missing"
    INDEX_SIZE = "index_size"
    INDEX_CHECKSUM = "index_checksum"
    INDEX_FORMAT = "index_format"
    MEMBER_CHECKSUM = "member_checksum"
    MEMBER_ORDER = "member_order"
    ENERGON_INDEX = "energon_index"
    COMMIT_DAMAGED = "commit_damaged"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Problem:
    """A problem with a shard, or with the sample `key` of the shard."""

    shard_id: int
    key: str | None
    code: Code
    message: str


@dataclass(frozen=True)
class _File:
    """Expected size and checksum of a committed file, and the codes of its possible problems."""

    name: str
    size_bytes: int
    sha256: str
    missing_code: Code
    size_code: Code
    content_code: Code


def commit_problem(error: DamagedCommit) -> Problem:
    """Return the problem that describes a damaged commit record."""
    return Problem(error.shard_id, None, Code.COMMIT_DAMAGED, str(error))


def verify_shard(variant_dir: Path, commit: Commit) -> list[Problem]:
    """Read a complete shard, and compare it with its commit. Return an empty list if the shard is intact.

    Damage to payloads and headers is reported with the key of the sample. Damage to padding, and damage to a tar whose
    index is damaged too, is reported without a key.
    """
    if commit.files is None:
        return []
    try:
        with ExitStack() as copies:
            for name in (commit.files.index, commit.files.energon_index, commit.files.tar):
                copies.enter_context(local_copy(variant_dir / name))
            index_problems, table = _check_index(variant_dir, shard_id=commit.shard_id, files=commit.files)
            tar_problems = _check_tar(variant_dir, shard_id=commit.shard_id, files=commit.files, table=table)
    except OSError as error:
        return [Problem(commit.shard_id, None, Code.UNREADABLE, str(error))]
    return index_problems + tar_problems


def quick_check(variant_dir: Path, commit: Commit) -> list[Problem]:
    """Check the existence and sizes of a shard's files, and read files only if they are newer than the commit.

    In copied datasets, newer files often have the correct content. The commit record then gets the modification time of
    the newest file, so that the files are read only once.
    """
    if commit.files is None:
        return []
    record = commit_path(variant_dir, commit.shard_id)
    problems = []
    try:
        newest_ns = committed_ns = file_state(record)[1]
        for file in _files(commit.files):
            problem, changed_ns = _check_state(variant_dir, shard_id=commit.shard_id, file=file)
            if problem is None and changed_ns > committed_ns:
                newest_ns = max(newest_ns, changed_ns)
                if scan(variant_dir / file.name).sha256 != file.sha256:
                    message = f"{file.name} was modified after its commit"
                    problem = Problem(commit.shard_id, None, file.content_code, message)
            if problem is not None:
                problems.append(problem)
        energon_index = variant_dir / commit.files.energon_index
        size_bytes, changed_ns = file_state(energon_index) if energon_index.exists() else (None, 0)
        if size_bytes != 8 * (commit.files.num_samples + 1):
            message = f"{energon_index.name} is missing or has the wrong size"
            problems.append(Problem(commit.shard_id, None, Code.ENERGON_INDEX, message))
        elif not problems and changed_ns > committed_ns:
            newest_ns = max(newest_ns, changed_ns)
            problems += _check_index(variant_dir, shard_id=commit.shard_id, files=commit.files)[0]
    except OSError as error:
        return [Problem(commit.shard_id, None, Code.UNREADABLE, str(error))]
    if not problems and newest_ns > committed_ns:
        # If the folder is read-only, this fails, and the files are read again each time.
        with suppress(OSError):
            set_modified_time(record, time_ns=newest_ns)
    return problems


def _files(files: ShardFiles) -> tuple[_File, _File]:
    tar_codes = (Code.TAR_MISSING, Code.TAR_SIZE, Code.TAR_CHECKSUM)
    index_codes = (Code.INDEX_MISSING, Code.INDEX_SIZE, Code.INDEX_CHECKSUM)
    return (
        _File(files.tar, files.tar_bytes, files.tar_sha256, *tar_codes),
        _File(files.index, files.index_bytes, files.index_sha256, *index_codes),
    )


def _check_state(variant_dir: Path, *, shard_id: int, file: _File) -> tuple[Problem | None, int]:
    """Check the existence and size of a file; return the problem or None, and the modification time in ns."""
    try:
        size_bytes, changed_ns = file_state(variant_dir / file.name)
    except FileNotFoundError:
        return Problem(shard_id, None, file.missing_code, f"{file.name} is missing"), 0
    if size_bytes != file.size_bytes:
        message = f"{file.name} has {size_bytes} bytes, expected {file.size_bytes}"
        return Problem(shard_id, None, file.size_code, message), changed_ns
    return None, changed_ns


def _check_index(variant_dir: Path, *, shard_id: int, files: ShardFiles) -> tuple[list[Problem], pa.Table | None]:
    """Return the problems of both indexes, and the table of the Arrow index if its file matches the commit."""
    index = _files(files)[1]
    path = variant_dir / index.name
    problem, _ = _check_state(variant_dir, shard_id=shard_id, file=index)
    if problem is not None:
        return [problem], None
    if scan(path).sha256 != index.sha256:
        return [Problem(shard_id, None, Code.INDEX_CHECKSUM, f"{path.name} differs from the commit")], None
    try:
        table = open_index(path)
    except DamagedIndex as error:
        return [Problem(shard_id, None, Code.INDEX_FORMAT, str(error))], None
    num_keys = len(set(table.column("key").to_pylist()))
    if not num_keys == table.num_rows == files.num_samples:
        message = f"{path.name} has {count_noun(table.num_rows, 'row')} and {count_noun(num_keys, 'key')}, "
        message += f"expected {count_noun(files.num_samples, 'sample')}"
        return [Problem(shard_id, None, Code.INDEX_FORMAT, message)], None
    energon_index = variant_dir / files.energon_index
    with local_copy(energon_index):
        is_correct = energon_index.exists() and read_record(energon_index) == energon_index_bytes(table)
    if not is_correct:
        message = f"{energon_index.name} is missing or does not match the index"
        return [Problem(shard_id, None, Code.ENERGON_INDEX, message)], table
    return [], table


def _check_tar(variant_dir: Path, *, shard_id: int, files: ShardFiles, table: pa.Table | None) -> list[Problem]:
    tar = _files(files)[0]
    path = variant_dir / tar.name
    problem, _ = _check_state(variant_dir, shard_id=shard_id, file=tar)
    problems = [] if problem is None else [problem]
    if problem is not None and problem.code == Code.TAR_MISSING:
        return problems
    if table is not None:
        offsets = member_columns(table, "offset").ravel()
        ends = offsets + member_columns(table, "size").ravel()
        overlaps = np.flatnonzero(offsets[1:] < ends[:-1])
        if len(overlaps):
            key = table.column("key")[(int(overlaps[0]) + 1) // len(extensions_of(table))].as_py()
            problems.append(Problem(shard_id, key, Code.MEMBER_ORDER, f"{key}: its members are not in order"))
            table = None
    if table is None:
        tar_scan = scan(path)
    else:
        offsets, sizes, crc32s = (member_columns(table, kind) for kind in ("offset", "size", "crc32"))
        tar_scan = scan(path, ranges=zip(offsets.ravel().tolist(), sizes.ravel().tolist(), strict=True))
        is_damaged = np.array(
            [crc32 != expected for crc32, expected in zip(tar_scan.crc32s, crc32s.ravel().tolist(), strict=True)]
        ).reshape(crc32s.shape)
        for row in np.flatnonzero(is_damaged.any(axis=1)).tolist():
            key = table.column("key")[row].as_py()
            names = ", ".join(
                extension
                for extension, has_damage in zip(extensions_of(table), is_damaged[row], strict=True)
                if has_damage
            )
            problems.append(Problem(shard_id, key, Code.MEMBER_CHECKSUM, f"{key}: damaged or truncated: {names}"))
        problems += _check_entries(path, shard_id=shard_id, table=table)
    if not problems and tar_scan.sha256 != tar.sha256:
        message = f"{tar.name} differs from the commit"
        if table is not None:
            message += " in its padding; all headers and payloads are intact"
        problems.append(Problem(shard_id, None, Code.TAR_CHECKSUM, message))
    return problems


def _check_entries(path: Path, *, shard_id: int, table: pa.Table) -> list[Problem]:
    """Compare the headers of a tar with the index, and report the first header that differs."""
    keys = table.column("key").to_pylist()
    names = (f"{key}.{extension}" for key in keys for extension in extensions_of(table))
    offsets, sizes = (member_columns(table, kind).ravel().tolist() for kind in ("offset", "size"))
    num_correct = 0
    reason = "damaged header"
    try:
        with tarfile.open(path, "r:") as tar:
            for info, expected in zip_longest(tar, zip(names, offsets, sizes, strict=True)):
                if info is None:
                    break
                tar.members.clear()  # type: ignore[attr-defined] # tarfile keeps an object for each entry
                if expected is None or (info.name, info.offset_data, info.size) != expected or not info.isreg():
                    reason = f"found {info.name!r} with {info.size} bytes, which the index does not list here"
                    break
                num_correct += 1
            else:
                return []
    except tarfile.TarError as error:
        reason = str(error)
    key = keys[num_correct // len(extensions_of(table))] if num_correct < len(offsets) else None
    message = f"{path.name}: entry {num_correct} ({key or 'after the last sample'}): {reason}"
    return [Problem(shard_id, key, Code.TAR_ENTRIES_DIFFER, message)]


_NUM_THREADS = 8  # on a network disk, each lookup of a file is a request
_MIN_LISTED = 50  # minimum number of shards in a folder for listing the folder instead of looking up each file

States = dict[str, tuple[int, int]]  # file name -> (size in bytes, modification time in ns)


def quick_problems(variant_dir: Path, commits: Iterable[Commit]) -> dict[int, list[Problem]]:
    """Return the problems that `quick_check` finds in the shards of a variant, by shard ID. Intact shards are omitted.

    In addition, commit records that are newer than the table of commits are read, and compared with the commits.
    """
    folders: dict[str, list[Commit]] = {}
    for commit in commits:
        folder = folder_of(commit.shard_id) if commit.files is None else commit.files.tar.rpartition("/")[0]
        folders.setdefault(folder, []).append(commit)
    written_ns = table_modified_ns(variant_dir)
    is_large = any(len(members) >= _MIN_LISTED for members in folders.values())
    first_records = _states(variant_dir / COMMITS_FOLDER) if is_large else {}

    def check(folder: str) -> dict[int, list[Problem]]:
        members = folders[folder]
        if len(members) < _MIN_LISTED:
            return {commit.shard_id: _check_commit(variant_dir, commit, written_ns) for commit in members}
        files = _states(variant_dir / folder)
        records = first_records | _states(variant_dir / COMMITS_FOLDER / folder) if folder else first_records
        return {
            commit.shard_id: _check_commit(variant_dir, commit, written_ns)
            for commit in members
            if not _is_unchanged(commit, files=files, records=records, written_ns=written_ns)
        }

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = list(pool.map(check, folders))
    problems_of = {shard_id: problems for part in parts for shard_id, problems in part.items() if problems}
    return dict(sorted(problems_of.items()))


def check_record(variant_dir: Path, commit: Commit) -> list[Problem]:
    """Compare a commit from the table of commits with its record."""
    path = commit_path(variant_dir, commit.shard_id)
    try:
        is_same = read_commit(path) == commit
    except DamagedCommit as error:
        return [commit_problem(error)]
    except FileNotFoundError:
        return []  # another command has removed the record, or the missing record is reported elsewhere
    except OSError as error:
        return [Problem(commit.shard_id, None, Code.UNREADABLE, str(error))]
    return [] if is_same else [commit_problem(DamagedCommit(path, f"it differs from {COMMIT_TABLE_FILE}"))]


def _check_commit(variant_dir: Path, commit: Commit, written_ns: int | None) -> list[Problem]:
    path = commit_path(variant_dir, commit.shard_id)
    try:
        is_newer = written_ns is not None and path.stat().st_mtime_ns > written_ns
    except OSError:
        is_newer = False
    return (check_record(variant_dir, commit) if is_newer else []) or quick_check(variant_dir, commit)


def _is_unchanged(commit: Commit, *, files: States, records: States, written_ns: int | None) -> bool:
    """Return True if the files of a shard have the correct sizes, and none is newer than the commit record.

    The commit record must not be newer than the table of commits.
    """
    record = records.get(commit_name(commit.shard_id))
    if record is None or (written_ns is not None and record[1] > written_ns):
        return False
    shard_files = commit.files
    if shard_files is None:
        return True
    sizes = (
        (shard_files.tar, shard_files.tar_bytes),
        (shard_files.index, shard_files.index_bytes),
        (shard_files.energon_index, 8 * (shard_files.num_samples + 1)),
    )
    for name, size_bytes in sizes:
        state = files.get(name.rpartition("/")[2])
        if state is None or state[0] != size_bytes or state[1] > record[1]:
            return False
    return True


def _states(folder: Path) -> States:
    """Return the size and modification time of each file in a folder. Files that cannot be looked up are omitted."""
    states: States = {}
    try:
        with os.scandir(folder) as entries:
            # File systems store these values in inode order, but list the files in a different order.
            for entry in sorted(entries, key=os.DirEntry.inode):
                try:
                    state = entry.stat()
                except OSError:
                    continue
                states[entry.name] = state.st_size, state.st_mtime_ns
    except OSError:
        pass  # each file is then looked up separately, and the problem is reported
    return states


_INDEX_ENDING = ".index.arrow"
RowFilter = tuple[str, Collection[str]]  # (string column of the index, values of this column in the rows to read)


@dataclass(frozen=True)
class SalvagedSample:
    """A sample whose bytes match the committed bytes."""

    key: str
    members: dict[str, bytes]  # extension -> payload, in member order
    fields: dict[str, Any] | None  # column-specific index fields; None if the index is lost


def readable_rows(variant_dir: Path, commit: Commit, *, rows: RowFilter | None = None) -> Iterator[SalvagedSample]:
    """Yield the intact samples of a shard in order. Only one sample is in memory at a time.

    If the index is intact, a sample is yielded if the CRC-32 of each of its members matches the index. If the index is
    lost, samples are yielded only if the tar has the committed SHA-256. Damage, missing files and read errors reduce
    the number of samples, but raise no exception.

    Args:
        rows: Filter for the rows; None for all rows. The filter is ignored if the index is lost.
    """
    if commit.files is None:
        return
    tar, index = variant_dir / commit.files.tar, variant_dir / commit.files.index
    table = None
    if _has_sha256(index, sha256=commit.files.index_sha256):
        with suppress(DamagedIndex, OSError):
            table = open_index(index)
    with suppress(FileNotFoundError), local_copy(tar):
        if table is not None:
            yield from _read_indexed_samples(tar, table=table, rows=rows)
        elif _has_sha256(tar, sha256=commit.files.tar_sha256):
            yield from _read_all_samples(tar)


def uncommitted_tars(variant_dir: Path, commits: Iterable[Commit]) -> list[Path]:
    """Return the sorted tars of a variant that have an index, but do not belong to a commit.

    Such tars belong to earlier or lost commits. `prep gc` removes them.
    """
    committed_names = {commit.files.tar for commit in commits if commit.files is not None}
    uncommitted_paths = []
    for folder in (variant_dir, *folders_in(variant_dir)):
        names = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
        tars = [folder / name.replace(_INDEX_ENDING, ".tar") for name in names if name.endswith(_INDEX_ENDING)]
        tars = [tar for tar in tars if tar.name in names]
        uncommitted_paths += [tar for tar in tars if tar.relative_to(variant_dir).as_posix() not in committed_names]
    return sorted(uncommitted_paths)


def index_path(tar: Path) -> Path:
    """Return the path of the Arrow index of a tar."""
    return tar.with_suffix(_INDEX_ENDING)


def uncommitted_samples(tar: Path, *, rows: RowFilter) -> Iterator[SalvagedSample]:
    """Yield the samples of a tar without a commit, if their members match the CRC-32s in the index of the tar.

    A match proves that the members are intact, but not that the key is correct, because the index has no checksum.

    Args:
        tar: Path from `uncommitted_tars`.
        rows: Filter for the rows.
    """
    with suppress(DamagedIndex, OSError):
        yield from _read_indexed_samples(tar, table=open_index(index_path(tar)), rows=rows)


def _has_sha256(path: Path, *, sha256: str) -> bool:
    try:
        return scan(path).sha256 == sha256
    except OSError:
        return False


def _read_indexed_samples(tar: Path, *, table: pa.Table, rows: RowFilter | None) -> Iterator[SalvagedSample]:
    """Yield the samples whose members match the CRC-32s in the index."""
    if rows is not None:
        column, values = rows
        table = table.filter(pc.is_in(table[column], value_set=pa.array(sorted(values), pa.string())))
    extensions = extensions_of(table)
    member_lists = (member_columns(table, kind).tolist() for kind in ("offset", "size", "crc32"))
    column_fields = table.column_names[1 + 3 * len(extensions) :]
    try:
        file = tar.open("rb", buffering=0)
    except OSError:
        return
    with file:
        for row, row_lists in enumerate(zip(*member_lists, strict=True)):
            members: dict[str, bytes] = {}
            for extension, offset, size, crc32 in zip(extensions, *row_lists, strict=True):
                try:
                    payload = os.pread(file.fileno(), size, offset)
                except OSError:
                    break
                if len(payload) != size or zlib.crc32(payload) != crc32:
                    break
                members[extension] = payload
            else:
                fields = {name: table.column(name)[row].as_py() for name in column_fields}
                yield SalvagedSample(table.column("key")[row].as_py(), members, fields)


def _read_all_samples(path: Path) -> Iterator[SalvagedSample]:
    """Yield all samples of an intact tar, without an index."""
    try:
        with tarfile.open(path, "r:") as tar:
            for key, group in groupby(tar, key=lambda info: info.name.partition(".")[0]):
                members = {}
                for info in group:
                    file = tar.extractfile(info)
                    if file is not None:
                        members[info.name.partition(".")[2]] = file.read()
                tar.members.clear()  # type: ignore[attr-defined]
                yield SalvagedSample(key, members, None)
    except (tarfile.TarError, OSError):
        return
