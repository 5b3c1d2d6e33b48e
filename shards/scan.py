"""SHA-256 of a tar and CRC-32 of each of its members, in one pass and constant memory."""

import hashlib
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from clipmill.shards.opening import open_regular

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Scan:
    """The checksums found by one pass."""

    size_bytes: int
    sha256: str
    crc32s: tuple[int | None, ...]  # one per range; None if the range extends past the end of the file


def scan(path: Path, *, ranges: Iterable[tuple[int, int]] = ()) -> Scan:
    """Read the file once and checksum each (offset, size) of `ranges`, which must be ascending and not overlap."""
    digest = hashlib.sha256()
    crc32s: list[int | None] = []
    position = 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        for offset, size in ranges:
            position += _take(file, offset - position, digest=digest)[0]
            num_read, crc32 = _take(file, size, digest=digest, with_crc32=True)
            crc32s.append(crc32 if position == offset and num_read == size else None)
            position += num_read
        while num_read := _take(file, _PIECE_BYTES, digest=digest)[0]:
            position += num_read
    return Scan(size_bytes=position, sha256=digest.hexdigest(), crc32s=tuple(crc32s))


def _take(file: BinaryIO, size: int, *, digest: "hashlib._Hash", with_crc32: bool = False) -> tuple[int, int]:
    remaining, crc32 = size, 0
    while remaining > 0:
        piece = file.read(min(remaining, _PIECE_BYTES))
        if not piece:
            break
        digest.update(piece)
        if with_crc32:
            crc32 = zlib.crc32(piece, crc32)
        remaining -= len(piece)
    return size - remaining, crc32
