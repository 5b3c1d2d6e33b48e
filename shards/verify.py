"""Verification of a shard against its commit: a deep check that reads every byte, and a quick one based on `stat`."""

import tarfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.manifests.publish import read_record
from clipmill.manifests.quoting import count_noun
from clipmill.manifests.storage.mirrors import file_state, local_copy, set_modified_time
from clipmill.shards.commits import Commit, ShardFiles, commit_path
from clipmill.shards.damage import DamagedCommit, DamagedIndex
from clipmill.shards.index import energon_index_bytes, extensions_of, member_columns, open_index
from clipmill.shards.opening import scan


class Code(StrEnum):
    """Kinds of problems that a shard can have."""

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
    """One problem; `key` is the affected sample, if it concerns a single one."""

    shard_id: int
    key: str | None
    code: Code
    message: str


@dataclass(frozen=True)
class _File:
    """The expected state of one file according to its commit, and the codes of its possible problems."""

    name: str
    size_bytes: int
    sha256: str
    missing: Code
    other_size: Code
    other_content: Code


def damaged_commit(error: DamagedCommit) -> Problem:
    """Return the problem for a damaged commit record."""
    return Problem(error.shard_id, None, Code.COMMIT_DAMAGED, str(error))


def verify_shard(variant_dir: Path, commit: Commit) -> list[Problem]:
    """Read the whole shard and compare it with its commit. An empty list means that the shard is intact.

    Damage to payloads and headers is reported by key. Damage that has no key (to padding, or to a tar whose index is
    damaged too) is reported for the whole tar.
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
    """Compare existence and sizes with a few system calls, and read a file only if it is newer than the commit.

    If the content of a newer file is correct (common in copied datasets), the commit's modification time is set to the
    file's, so that the file is read only once.
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
                    problem = Problem(commit.shard_id, None, file.other_content, message)
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
        # On a read-only copy, the files are read again each time.
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
    """Check existence and size, and return the modification time in ns."""
    try:
        size_bytes, changed_ns = file_state(variant_dir / file.name)
    except FileNotFoundError:
        return Problem(shard_id, None, file.missing, f"{file.name} is missing"), 0
    if size_bytes != file.size_bytes:
        message = f"{file.name} has {size_bytes} bytes, expected {file.size_bytes}"
        return Problem(shard_id, None, file.other_size, message), changed_ns
    return None, changed_ns


def _check_index(variant_dir: Path, *, shard_id: int, files: ShardFiles) -> tuple[list[Problem], pa.Table | None]:
    """Return the problems of both indexes, and the Arrow index if it is the committed one."""
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
        message = f"{path.name} has {count_noun(table.num_rows, 'row')} and {count_noun(num_keys, 'key')}, expected "
        message += count_noun(files.num_samples, "sample")
        return [Problem(shard_id, None, Code.INDEX_FORMAT, message)], None
    energon_index = variant_dir / files.energon_index
    with local_copy(energon_index):
        is_right = energon_index.exists() and read_record(energon_index) == energon_index_bytes(table)
    if not is_right:
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
    if table is not None and (key := _first_out_of_order(table)) is not None:
        problems.append(Problem(shard_id, key, Code.MEMBER_ORDER, f"{key}: its members are not in order"))
        table = None
    if table is None:
        found = scan(path)
    else:
        offsets, sizes, crc32s = (member_columns(table, kind) for kind in ("offset", "size", "crc32"))
        found = scan(path, ranges=zip(offsets.ravel().tolist(), sizes.ravel().tolist(), strict=True))
        is_wrong = np.array(
            [crc32 != wanted for crc32, wanted in zip(found.crc32s, crc32s.ravel().tolist(), strict=True)]
        ).reshape(crc32s.shape)
        for row in np.flatnonzero(is_wrong.any(axis=1)).tolist():
            key = table.column("key")[row].as_py()
            names = ", ".join(
                extension for extension, wrong in zip(extensions_of(table), is_wrong[row], strict=True) if wrong
            )
            problems.append(Problem(shard_id, key, Code.MEMBER_CHECKSUM, f"{key}: damaged or truncated: {names}"))
        problems += _check_entries(path, shard_id=shard_id, table=table)
    if not problems and found.sha256 != tar.sha256:
        message = f"{tar.name} differs from the commit"
        if table is not None:
            message += " in its padding; all headers and payloads are intact"
        problems.append(Problem(shard_id, None, Code.TAR_CHECKSUM, message))
    return problems


def _first_out_of_order(table: pa.Table) -> str | None:
    offsets = member_columns(table, "offset").ravel()
    ends = offsets + member_columns(table, "size").ravel()
    wrong = np.flatnonzero(offsets[1:] < ends[:-1])
    if not len(wrong):
        return None
    key: str = table.column("key")[(int(wrong[0]) + 1) // len(extensions_of(table))].as_py()
    return key


def _check_entries(path: Path, *, shard_id: int, table: pa.Table) -> list[Problem]:
    """Walk the headers of the tar and report the first one that is not in the index."""
    keys = table.column("key").to_pylist()
    names = (f"{key}.{extension}" for key in keys for extension in extensions_of(table))
    offsets, sizes = (member_columns(table, kind).ravel().tolist() for kind in ("offset", "size"))
    num_right = 0
    reason = "damaged header"
    try:
        with tarfile.open(path, "r:") as tar:
            for info, wanted in zip_longest(tar, zip(names, offsets, sizes, strict=True)):
                if info is None:
                    break
                tar.members.clear()  # type: ignore[attr-defined]
                if wanted is None or (info.name, info.offset_data, info.size) != wanted or not info.isreg():
                    reason = f"found {info.name!r} with {info.size} bytes"
                    break
                num_right += 1
            else:
                return []
    except tarfile.TarError as error:
        reason = str(error)
    key = keys[num_right // len(extensions_of(table))] if num_right < len(offsets) else None
    message = f"{path.name}: entry {num_right} ({key or 'after the last sample'}): {reason}"
    return [Problem(shard_id, key, Code.TAR_ENTRIES_DIFFER, message)]
