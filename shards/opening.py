"""Open untrusted files safely: damaged files, files on a dead mount, and containers that refer to other files.

On a dead network mount, `open` blocks and cannot be interrupted. Each `open` therefore runs in a daemon thread. If it
does not return in time, the thread is abandoned: neither the caller nor the shutdown of the interpreter waits for it.
While it is blocked, later calls for the same path fail at once. Once `_MAX_BLOCKED` threads are blocked in a folder,
all calls for that folder fail. The number of folders thus limits the number of abandoned threads.

`scan` reads a file once, in constant memory, and returns its SHA-256 and the CRC-32 of given ranges.

libav guesses the format of a video from its first bytes, whatever the file name. Many of its formats open other
resources: playlists (HLS, DASH, concat scripts) read local files and URLs, and session descriptions (SDP) wait for
network packets. Every call that opens a video therefore passes the allowed formats (`CONTAINERS`) and protocols.
"""

import errno
import hashlib
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from clipmill.manifests.errors import ClipmillError
from clipmill.manifests.publish import require_regular
from clipmill.manifests.storage.mirrors import mirror_of

# Allowed formats, by libav's names, for its option `format_whitelist`.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,mpegvideo,ivf,gif,mxf,wtv,rm,dv"
# Allowed protocols, by libav's names, for its option `protocol_whitelist`.
FILE_PROTOCOLS = "file,pipe"
NO_PROTOCOLS = ""  # for a video in memory

OPEN_LIMIT_S = 60.0  # timeout, shorter than a data loader's timeout for a sample
_MAX_BLOCKED = 4  # maximum number of blocked threads per folder
_PIECE_BYTES = 1 << 20


class Damaged(ClipmillError):
    """A file of the shard set cannot be trusted.

    Args:
        path: Path of the file.
        why: Short description of the damage.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class DamagedCommit(Damaged):
    """A commit record is damaged, missing, or written by another program."""

    @property
    def shard_id(self) -> int:
        """Shard ID, from the record's file name."""
        return int(self.path.stem)


class DamagedContents(Damaged):
    """contents.json is damaged, or a file does not match its checksum in contents.json."""


class DamagedIndex(Damaged):
    """An index is damaged, or was written by another program."""


class DamagedTar(Damaged):
    """A tar is shorter than its index records."""


_lock = threading.Lock()
_blocked: set[Path] = set()


@dataclass
class _Opening:
    done: threading.Event = field(default_factory=threading.Event)
    descriptor: int | None = None
    error: Exception | None = None
    is_abandoned: bool = False


def open_regular(path: Path) -> int:
    """Open the regular file `path` for reading and return its descriptor, or raise within `OPEN_LIMIT_S` seconds.

    In a data folder in a bucket, the content is fetched first if it is not on local disk.

    Raises:
        OSError: The file cannot be opened, or it is a pipe, a device or a folder.
        TimeoutError: `open` has not returned, for this call or for an earlier call with the same path.
    """
    if (mirror := mirror_of(path)) is not None and (descriptor := mirror.open(path)) is not None:
        return descriptor
    with _lock:
        if path in _blocked or sum(other.parent == path.parent for other in _blocked) >= _MAX_BLOCKED:
            raise _open_timeout(path)
    opening = _Opening()
    threading.Thread(target=_open, args=(path, opening), name=f"open {path.name}", daemon=True).start()
    if not opening.done.wait(OPEN_LIMIT_S):
        with _lock:
            if not opening.done.is_set():
                opening.is_abandoned = True
                _blocked.add(path)
                raise _open_timeout(path)
    if opening.error is not None:
        raise opening.error
    assert opening.descriptor is not None
    return opening.descriptor


@contextmanager
def open_lock(lock: threading.Lock, path: Path) -> Iterator[None]:
    """Hold `lock`, which ensures that only one thread at a time opens and checks `path`.

    Raises:
        TimeoutError: Another thread has held the lock for `OPEN_LIMIT_S` seconds.
    """
    if not lock.acquire(timeout=OPEN_LIMIT_S):
        raise _open_timeout(path)
    try:
        yield
    finally:
        lock.release()


def _open_timeout(path: Path) -> TimeoutError:
    message = f"opening timed out after {OPEN_LIMIT_S:g} s: the disk or mount does not respond"
    return TimeoutError(errno.ETIMEDOUT, message, str(path))


def _open(path: Path, opening: _Opening) -> None:
    """Open `path` in a thread; close it again if the caller has given up."""
    try:
        descriptor = _open_now(path)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        descriptor, opening.error = None, error
    with _lock:
        _blocked.discard(path)
        if opening.is_abandoned and descriptor is not None:
            os.close(descriptor)
        opening.descriptor = descriptor
        opening.done.set()


def _open_now(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer. The flag has no effect on regular files, unless
        # another process holds a lease on the file (fcntl F_SETLEASE).
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        descriptor = os.open(path, flags)
    try:
        require_regular(descriptor, path=path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(frozen=True)
class Scan:
    """Checksums of a file, computed in one pass."""

    size_bytes: int
    sha256: str
    crc32s: tuple[int | None, ...]  # one per range; None if the range extends past the end of the file


def scan(path: Path, *, ranges: Iterable[tuple[int, int]] = ()) -> Scan:
    """Read a file once and checksum each (offset, size) of `ranges`, which must be ascending and must not overlap."""
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
    """Read `size` bytes, or fewer at the end of the file; return their number and CRC-32."""
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
