"""Sequential reader of tar members in bounded memory, regardless of the sizes that headers declare.

Python's tarfile reads extended headers of any size, pads sparse members with zeros, treats a damaged header as the end
of the tar, and decompresses tars to any size. This module reads a member only if the caller needs it and its size is
within a limit. Extended headers have a size limit, sparse members are not read, and a compressed tar is rejected if it
expands much more than tars of videos do.

Names and sizes are interpreted as in tarfile: USTAR, tars before USTAR, GNU long names, PAX.
"""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.index import padded_size
from clipmill.shards.opening import DamagedTar, open_regular

MAX_HEADER_BYTES = 1 << 20  # maximum size of an extended header, which contains long names or PAX records
MAX_NAME_BYTES = 4096
# Maximum ratio of decompressed to compressed size. The ratio is about 1 for videos, slightly larger for captions, and
# about 1000 for decompression bombs.
MAX_EXPANSION = 64
_FREE_BYTES = 64 << 20  # decompressed size up to which any ratio is allowed
_XZ_MEMORY_BYTES = 256 << 20  # memory limit of the decompressor, four times as much as `xz -9` needs
_READ_BYTES = 1 << 20
_PAX = (b"x", b"X")
_WITHOUT_PAYLOAD = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
# Offsets of the flag that announces another header: in the first header of a sparse member, and in additional headers.
_SPARSE_FIRST, _SPARSE_FURTHER = 482, 504


@dataclass(frozen=True)
class Member:
    """File in a tar.

    Attributes:
        name: Name of the file.
        size_bytes: Size according to the header.
        offset: Offset of the first byte in the tar; None in a compressed tar.
        content: Bytes of the file; None if they are not needed or cannot be read.
        problem: Predicate that follows the name in messages and says why the file cannot be read; otherwise None.
    """

    name: str
    size_bytes: int
    offset: int | None = None
    content: bytes | None = None
    problem: str | None = None


def read_members(path: Path, *, limit_of: Callable[[str], int]) -> Iterator[Member]:
    """Yield the files in a tar, in order. Links, folders and devices are skipped.

    Args:
        limit_of: Function that takes the name of a member and returns its maximum size in bytes, or 0 if the member is
            not needed.

    Raises:
        DamagedTar: The tar ends early, contains bytes that are not a member, or expands too much. All members that have
            been yielded are intact.
        OSError: The tar cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        source = _Source(path, file)
        try:
            yield from _members(source, limit_of)
        except (EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise source.damage(str(error)) from error


@dataclass
class _ExtendedHeader:
    """Properties of a member, from the extended headers that precede the header of the member."""

    name: bytes | None = None
    size_bytes: int | None = None
    is_sparse: bool = False


class _Source:
    """Stream of the bytes of a tar, decompressed if necessary."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._stream, self._is_compressed = _unpack(file)
        self.position = 0

    @property
    def offset(self) -> int | None:
        """Offset of the next byte in the file; None if the tar is compressed."""
        return None if self._is_compressed else self.position

    def block(self) -> bytes:
        """Read the next block. At the end of the file, the block is shorter or empty."""
        block = self._stream.read(BLOCK_BYTES)
        self._advance(len(block))
        return block

    def read(self, size_bytes: int) -> bytes:
        """Read the payload of a member or header, and skip its padding. The caller must limit the size."""
        self._require_available(size_bytes)
        if not self._is_compressed:
            content = self._stream.read(size_bytes)
            self._advance(len(content))
        else:
            payload = io.BytesIO()  # grows with the data, regardless of the size that a header declares
            while (rest := size_bytes - payload.tell()) and (part := self._stream.read(min(rest, _READ_BYTES))):
                self._advance(len(part))
                payload.write(part)
            content = payload.getvalue()
        if len(content) < size_bytes:
            raise self.damage("it was cut short")
        self.skip(padded_size(size_bytes) - size_bytes)
        return content

    def skip(self, size_bytes: int) -> None:
        """Skip bytes."""
        self._require_available(size_bytes)
        if not self._is_compressed:
            self._stream.seek(size_bytes, os.SEEK_CUR)
            self._advance(size_bytes)
            return
        while size_bytes:
            part = self._stream.read(min(size_bytes, _READ_BYTES))
            if not part:
                raise self.damage("it was cut short")
            self._advance(len(part))
            size_bytes -= len(part)

    def damage(self, reason: str) -> DamagedTar:
        """Return the error for a tar that cannot be read any further."""
        return DamagedTar(self._path, f"the tar cannot be read after byte {self.position:,}: {reason}")

    def _require_available(self, size_bytes: int) -> None:
        if not self._is_compressed and self.position + size_bytes > self._file_bytes:
            raise self.damage("it was cut short")

    def _advance(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self._is_compressed and self.position > self._file_bytes * MAX_EXPANSION + _FREE_BYTES:
            raise self.damage(f"it expands to more than {MAX_EXPANSION} times its size")


def _members(source: _Source, limit_of: Callable[[str], int]) -> Iterator[Member]:
    extended = _ExtendedHeader()
    while (block := source.block()) != bytes(BLOCK_BYTES):
        if len(block) < BLOCK_BYTES:
            raise source.damage("it was cut short" if source.position else "it is empty")
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise source.damage("the next bytes are not a tar member") from error
        if info.size < 0:
            raise source.damage("a member has a negative size")
        if info.type in (tarfile.GNUTYPE_LONGNAME, *_PAX):
            if info.size > MAX_HEADER_BYTES:
                raise source.damage(f"a header declares {info.size:,} bytes, more than {MAX_HEADER_BYTES:,}")
            _extend(extended, source.read(info.size), is_pax=info.type in _PAX)
            continue
        if info.type in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            source.skip(padded_size(info.size))
            continue
        if info.type not in _WITHOUT_PAYLOAD:
            yield from _member(source, info, extended, block=block, limit_of=limit_of)
        extended = _ExtendedHeader()


def _member(
    source: _Source, info: tarfile.TarInfo, extended: _ExtendedHeader, *, block: bytes, limit_of: Callable[[str], int]
) -> Iterator[Member]:
    size_bytes = info.size if extended.size_bytes is None else extended.size_bytes
    name = info.name if extended.name is None else extended.name.decode("utf-8", "surrogateescape")
    if not name.isprintable():
        name = name.encode("unicode_escape").decode()
    limit_bytes, problem = 0, None
    if info.type == tarfile.GNUTYPE_SPARSE:
        # Additional headers of the sparse member precede its payload.
        has_more_headers = block[_SPARSE_FIRST]
        while has_more_headers:
            has_more_headers = source.read(BLOCK_BYTES)[_SPARSE_FURTHER]
    if extended.is_sparse or info.type == tarfile.GNUTYPE_SPARSE:
        problem = "is a sparse file, which is not read"
    elif len(name) > MAX_NAME_BYTES:
        name, problem = f"{name[:100]}...", f"has a name of {len(name):,} characters"
    elif info.type in _REGULAR:
        limit_bytes = limit_of(name)
        if limit_bytes and size_bytes > limit_bytes:
            problem = f"has {size_bytes:,} bytes, more than the limit of {limit_bytes:,}"
    offset = source.offset
    if limit_bytes and problem is None:
        yield Member(name, size_bytes, offset, content=source.read(size_bytes))
        return
    source.skip(padded_size(size_bytes))
    if info.type in _REGULAR or problem is not None:
        yield Member(name, size_bytes, offset, problem=problem)


def _extend(extended: _ExtendedHeader, payload: bytes, *, is_pax: bool) -> None:
    """Set name, size and sparseness from the payload of an extended header; raise ValueError if it is damaged."""
    if not is_pax:
        extended.name = payload.partition(b"\0")[0]
        return
    begin = 0
    while begin < len(payload) and payload[begin]:
        space = payload.find(b" ", begin, begin + 20)
        length = int(payload[begin:space]) if space > 0 else 0
        if space < 0 or length <= space - begin or begin + length > len(payload):
            raise ValueError("a PAX header is damaged")
        keyword, _, value = payload[space + 1 : begin + length - 1].partition(b"=")
        if keyword == b"path":
            extended.name = value
        elif keyword == b"size":
            extended.size_bytes = int(value[:20])
            if extended.size_bytes < 0:
                raise ValueError("a member has a negative size")
        elif keyword.startswith(b"GNU.sparse."):
            extended.is_sparse = True
        begin += length


def _unpack(file: BinaryIO) -> tuple[BinaryIO, bool]:
    """Return the file, or a stream of its decompressed content; and True if the file is compressed."""
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file), True  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file), True  # type: ignore[return-value]
    if magic == b"\xfd7zXZ\0":
        return io.BufferedReader(_Xz(file)), True
    return file, False


class _Xz(io.RawIOBase):
    """Stream of the content of an xz file. Unlike `lzma.LZMAFile`, it limits the memory of the decompressor."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        while True:
            packed = self._file.read(_READ_BYTES) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not packed:
                raise EOFError("the compressed data ends early")
            part = self._decompressor.decompress(packed, len(buffer))
            if part:
                buffer[: len(part)] = part
                return len(part)
            if self._decompressor.eof:
                return 0
