"""Recovery of samples from damaged or outdated shards: only samples proven to be unchanged."""

import os
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.storage.mirrors import local_copy
from clipmill.shards.commits import Commit, ShardFiles
from clipmill.shards.damage import DamagedIndex
from clipmill.shards.format import folders_in
from clipmill.shards.index import extensions_of, member_columns, open_index
from clipmill.shards.opening import scan

_INDEX_ENDING = ".index.arrow"
Wanted = tuple[str, Collection[str]]  # a text column of the index, and the values of the wanted rows


@dataclass(frozen=True)
class SalvagedSample:
    """A sample whose bytes match the committed ones."""

    key: str
    members: dict[str, bytes]  # extension -> payload, in member order
    fields: dict[str, Any] | None  # column-specific index fields; None if the index is lost


def readable_rows(variant_dir: Path, commit: Commit, *, wanted: Wanted | None = None) -> Iterator[SalvagedSample]:
    """Yield the intact samples of a shard in order, one in memory at a time.

    If the committed index is available, a sample is intact when the CRC-32 of each of its members matches. Without it,
    samples are yielded only if the SHA-256 of the tar is the committed one. Damage, missing files and read errors
    reduce the number of samples and raise no exception.

    Args:
        wanted: rows to read; all of them if the index is lost.
    """
    if commit.files is None:
        return
    tar = variant_dir / commit.files.tar
    table = _committed_index(variant_dir, files=commit.files)
    with suppress(FileNotFoundError), local_copy(tar):
        if table is not None:
            yield from _rows_of_index(tar, table=table, wanted=wanted)
        elif _has_sha256(tar, sha256=commit.files.tar_sha256):
            yield from _rows_of_tar(tar)


def uncommitted_tars(variant_dir: Path, commits: Iterable[Commit]) -> list[Path]:
    """List the tars of a variant, with an index beside them, that none of its commits names, sorted.

    They are those of earlier commits, or of commits that are lost. `prep gc` removes them.
    """
    named = {commit.files.tar for commit in commits if commit.files is not None}
    found = []
    for folder in (variant_dir, *folders_in(variant_dir)):
        names = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
        tars = (folder / name.replace(_INDEX_ENDING, ".tar") for name in names if name.endswith(_INDEX_ENDING))
        found += [tar for tar in tars if tar.name in names and tar.relative_to(variant_dir).as_posix() not in named]
    return sorted(found)


def index_of(tar: Path) -> Path:
    """Return the path of the index beside a tar."""
    return tar.with_suffix(_INDEX_ENDING)


def uncommitted_samples(tar: Path, *, wanted: Wanted) -> Iterator[SalvagedSample]:
    """Yield samples of a tar of `uncommitted_tars`, of which each member has the CRC-32 that the index beside it names.

    No checksum covers the index itself: only `members` are proven to be unchanged, not the key.
    """
    with suppress(DamagedIndex, OSError):
        yield from _rows_of_index(tar, table=open_index(index_of(tar)), wanted=wanted)


def _has_sha256(path: Path, *, sha256: str) -> bool:
    try:
        return scan(path).sha256 == sha256
    except OSError:
        return False


def _committed_index(variant_dir: Path, *, files: ShardFiles) -> pa.Table | None:
    path = variant_dir / files.index
    if not _has_sha256(path, sha256=files.index_sha256):
        return None
    try:
        return open_index(path)
    except (DamagedIndex, OSError):
        return None


def _rows_of_index(tar: Path, *, table: pa.Table, wanted: Wanted | None) -> Iterator[SalvagedSample]:
    if wanted is not None:
        column, values = wanted
        table = table.filter(pc.is_in(table[column], value_set=pa.array(sorted(values), pa.string())))
    extensions = extensions_of(table)
    kinds = (member_columns(table, kind).tolist() for kind in ("offset", "size", "crc32"))
    own_fields = table.column_names[1 + 3 * len(extensions) :]
    try:
        file = tar.open("rb", buffering=0)
    except OSError:
        return
    with file:
        for row, ranges in enumerate(zip(*kinds, strict=True)):
            members: dict[str, bytes] = {}
            for extension, offset, size, crc32 in zip(extensions, *ranges, strict=True):
                payload = _read(file.fileno(), offset=offset, size=size)
                if len(payload) != size or zlib.crc32(payload) != crc32:
                    break
                members[extension] = payload
            else:
                fields = {name: table.column(name)[row].as_py() for name in own_fields}
                yield SalvagedSample(table.column("key")[row].as_py(), members, fields)


def _rows_of_tar(path: Path) -> Iterator[SalvagedSample]:
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


def _read(descriptor: int, *, offset: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError:
        return b""
