"""Shard writer that streams samples into a temporary tar, and publishes the complete tar with its indexes.

A killed writer leaves only a temporary file.
"""

import errno
import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from clipmill.manifests.publish import make_folder, publish_atomically, replace, sync, temporary_path
from clipmill.shards.commits import ShardFiles
from clipmill.shards.format import BLOCK_BYTES, MAX_MEMBER_NAME_BYTES, ShardName, folder_of
from clipmill.shards.index import (
    IndexBuilder,
    energon_index_bytes,
    index_bytes,
    index_schema,
    member_columns,
    padded_size,
)
from clipmill.shards.opening import Scan, scan

_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Upper case is not allowed, because WebDataset converts extensions to lower case.
_EXTENSION = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,}")
_WRITE_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One sample: its members in the tar, and its row in the index."""

    key: str
    members: dict[str, bytes]  # extension -> payload, in member order
    fields: dict[str, Any]  # column-specific index fields


def require_extension(extension: str) -> None:
    """Raise a ValueError if `extension` is not valid for a member of a sample."""
    if not _EXTENSION.fullmatch(extension):
        raise ValueError(f"{extension!r} is not a valid member extension: use lower-case letters, digits, _ and dots")


class ShardWriter:
    """Context manager that writes one shard. Unless `publish` succeeds, it leaves no files.

    Only the index and one sample are in memory at a time.

    Args:
        variant_dir: Folder of the variant. It is not created: if it is missing, the data folder is wrong.
        shard_id: ID of the shard.
        extensions: Extensions of every sample's members, in order.
        fields: Column-specific index fields, such as `clipmill.shards.format.VIDEO_FIELDS`.

    Raises:
        ValueError: An extension is missing or invalid, or two columns of the index have the same name.
        FileNotFoundError: The folder of the variant does not exist (on entering the context).
    """

    def __init__(
        self, variant_dir: Path, *, shard_id: int, extensions: Sequence[str], fields: Sequence[pa.Field]
    ) -> None:
        for extension in extensions:
            require_extension(extension)
        if not extensions:
            raise ValueError("a sample needs at least one member")
        self._directory = variant_dir
        self._shard_id = shard_id
        self._extensions = tuple(extensions)
        self._index = IndexBuilder(index_schema(self._extensions, fields=fields))
        self._fields = {field.name for field in fields}
        self._keys: set[str] = set()
        self._end = 0

    def __enter__(self) -> Self:
        if not self._directory.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the variant folder does not exist", os.fspath(self._directory))
        folder = self._directory / folder_of(self._shard_id)
        make_folder(folder)
        self._temporary = temporary_path(folder / f"{self._shard_id:06d}.tar")
        self._file = self._temporary.open("xb", buffering=_WRITE_BUFFER_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Closing flushes the file. If the disk is full, this fails again, but the file is removed anyway.
            with suppress(OSError):
                self._file.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    @property
    def num_samples(self) -> int:
        """Number of samples added so far."""
        return len(self._keys)

    @property
    def payload_offset(self) -> int:
        """Offset of the next sample's first payload in the tar."""
        return self._end + BLOCK_BYTES

    def add(self, sample: Sample) -> None:
        """Append a sample to the tar.

        Raises:
            ValueError: The sample violates the format; nothing was written.
            OSError: The disk is full, or an I/O error occurred.
        """
        self.check(sample)
        row: dict[str, Any] = {"key": sample.key, **sample.fields}
        end = self._end
        for extension, payload in sample.members.items():
            row[f"{extension}_offset"] = end + BLOCK_BYTES
            row[f"{extension}_size"] = len(payload)
            row[f"{extension}_crc32"] = zlib.crc32(payload)
            end += BLOCK_BYTES + padded_size(len(payload))
        self._index.append(row)
        self._keys.add(sample.key)
        self._end = end
        for extension, payload in sample.members.items():
            header = tarfile.TarInfo(f"{sample.key}.{extension}")  # mtime, uid and gid 0, no owner names, mode 0644
            header.size = len(payload)
            self._file.write(header.tobuf(format=tarfile.USTAR_FORMAT, encoding="ascii", errors="strict"))
            self._file.write(payload)
            self._file.write(bytes(-len(payload) % BLOCK_BYTES))

    def publish(self, fingerprint: str) -> ShardFiles:
        """Verify the tar by reading it back, then rename the tar and its indexes to their final names.

        Args:
            fingerprint: Fingerprint of the shard's content (hex); its first 8 digits are part of the names.

        Raises:
            ValueError: The shard is empty, or `fingerprint` is invalid.
            OSError: The disk is full, an I/O error occurred, or the bytes read back differ from the bytes written.
        """
        if not self._keys:
            raise ValueError(f"shard {self._shard_id} has no samples; shards cannot be empty")
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is not a fingerprint: use at least 8 lower-case hex digits")
        name = ShardName(self._shard_id, fingerprint)
        self._file.write(bytes(-(self._end + 2 * BLOCK_BYTES) % tarfile.RECORDSIZE + 2 * BLOCK_BYTES))
        self._file.close()
        table = self._index.table()
        tar = self._read_back(table)
        index = index_bytes(table)
        with (
            publish_atomically(self._directory / name.index) as index_temporary,
            publish_atomically(self._directory / name.energon_index) as energon_temporary,
        ):
            # Complete and sync all three files before the first rename, so that a full disk leaves no files.
            _write_and_read_back(index_temporary, index)
            _write_and_read_back(energon_temporary, energon_index_bytes(table))
            for temporary in (self._temporary, index_temporary, energon_temporary):
                sync(temporary)
            replace(self._temporary, self._directory / name.tar)
            sync(self._temporary.parent)
        return ShardFiles(
            tar=name.tar,
            tar_bytes=tar.size_bytes,
            tar_sha256=tar.sha256,
            index=name.index,
            index_bytes=len(index),
            index_sha256=hashlib.sha256(index).hexdigest(),
            num_samples=len(self._keys),
        )

    def check(self, sample: Sample) -> None:
        """Raise a ValueError if a sample violates the format."""
        if not _KEY.fullmatch(sample.key):
            raise ValueError(f"{sample.key!r} is not a valid key: use letters, digits, _ and -")
        if sample.key in self._keys:
            raise ValueError(f"shard {self._shard_id} already contains a sample with the key {sample.key!r}")
        if tuple(sample.members) != self._extensions:
            raise ValueError(f"{sample.key} has the members {list(sample.members)}, expected {list(self._extensions)}")
        if set(sample.fields) != self._fields:
            raise ValueError(f"{sample.key} has the fields {sorted(sample.fields)}, expected {sorted(self._fields)}")
        for extension, payload in sample.members.items():
            if len(name := f"{sample.key}.{extension}") > MAX_MEMBER_NAME_BYTES:
                raise ValueError(f"member name {name!r} is longer than {MAX_MEMBER_NAME_BYTES} bytes")
            if extension.endswith("npy"):
                from clipmill.shards.npy import data_offset

                if data_offset(payload) % BLOCK_BYTES:
                    raise ValueError(
                        f"{name}: the array does not begin on a {BLOCK_BYTES}-byte boundary; "
                        "use clipmill.shards.npy.npy_bytes"
                    )

    def _read_back(self, table: pa.Table) -> Scan:
        """Read the tar, and compare its payloads with the checksums that `add` computed."""
        offsets, sizes = (member_columns(table, kind).ravel().tolist() for kind in ("offset", "size"))
        tar = scan(self._temporary, ranges=zip(offsets, sizes, strict=True))
        expected_crc32s = member_columns(table, "crc32").ravel().tolist()
        for position, (crc32, expected_crc32) in enumerate(zip(tar.crc32s, expected_crc32s, strict=True)):
            if crc32 != expected_crc32:
                key = table.column("key")[position // len(self._extensions)].as_py()
                raise OSError(
                    errno.EIO, f"{key}: the bytes read back differ from the bytes written", os.fspath(self._temporary)
                )
        return tar


def _write_and_read_back(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    if path.read_bytes() != content:
        raise OSError(errno.EIO, "the bytes read back differ from the bytes written", os.fspath(path))
