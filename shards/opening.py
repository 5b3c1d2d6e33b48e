"""Open untrusted files safely: damaged files, files on a dead mount, and containers that refer to other files.

On a dead network mount, `open` blocks and cannot be interrupted. Each `open` therefore runs in a daemon thread. If
`open` does not return in time, the thread is abandoned: neither the caller nor the interpreter's shutdown waits for it.
While the thread is blocked, further calls with the same path fail immediately. Once `_MAX_BLOCKED` threads are blocked
in a folder, all calls for that folder fail, so the number of abandoned threads is limited.

`scan` reads a file once, in constant memory, and returns its SHA-256 and the CRC-32 of the given ranges.

libav guesses the format of a video from its first bytes, not from its name. Some formats open other resources:
playlists (HLS, DASH, concat scripts) read local files and URLs, and session descriptions (SDP) wait for network
packets. Every call that opens a video must therefore pass the allowed formats (`CONTAINERS`) and protocols.
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

# Allowed formats: value of libav's option `format_whitelist`.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,mpegvideo,ivf,gif,mxf,wtv,rm,dv"
# Allowed protocols: value of libav's option `protocol_whitelist`.
FILE_PROTOCOLS = "file,pipe"
NO_PROTOCOLS = ""  # for a video in memory

OPEN_LIMIT_S = 60.0  # timeout in seconds; it is shorter than a data loader's timeout for a sample
_MAX_BLOCKED = 4  # maximum number of blocked threads per folder
_BLOCK_BYTES = 1 << 20


class Damaged(ClipmillError):
    """A file in a variant is damaged, or was written by another program.

    Args:
        path: Path of the file.
        reason: Short description of the damage.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class DamagedCommit(Damaged):
    """A commit record is damaged or missing, or was written by another program."""

    @property
    def shard_id(self) -> int:
        """Shard ID, from the record's file name."""
        return int(self.path.stem)


class DamagedContents(Damaged):
    """contents.json is damaged, or a file does not match the checksum in contents.json."""


class DamagedIndex(Damaged):
    """An index is damaged, or was written by another program."""


class DamagedTar(Damaged):
    """A tar is shorter than its index states."""


_lock = threading.Lock()
_blocked: set[Path] = set()


@dataclass
class _Opening:
    done: threading.Event = field(default_factory=threading.Event)
    descriptor: int | None = None
    error: Exception | None = None
    is_abandoned: bool = False


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor. The call takes at most `OPEN_LIMIT_S` seconds.

    If the data folder is in a bucket, and the file is not on the local disk yet, the file is fetched first.

    Raises:
        OSError: The file cannot be opened, or is a pipe, a device or a folder.
        TimeoutError: `open` did not return in time, or earlier calls for the path or its folder are still blocked.
    """
    if (mirror := mirror_of(path)) is not None and (descriptor := mirror.open(path)) is not None:
        return descriptor
    with _lock:
        if path in _blocked or sum(blocked_path.parent == path.parent for blocked_path in _blocked) >= _MAX_BLOCKED:
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
    """Hold a lock, so that only one thread at a time opens and checks `path`.

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
    """Open `path` in the current thread; close the file again if the caller has given up."""
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
        # Without O_NONBLOCK, opening a pipe would wait for a writer. The flag affects a regular file only if another
        # process holds a lease on it (fcntl F_SETLEASE).
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
    """Size and checksums of a file."""

    size_bytes: int
    sha256: str  # hex
    crc32s: tuple[int | None, ...]  # CRC-32 of each range; None if the range extends past the end of the file


def scan(path: Path, *, ranges: Iterable[tuple[int, int]] = ()) -> Scan:
    """Read a file once, and compute the checksums of the file and of ranges in it.

    Args:
        ranges: Pairs (offset, size), in ascending order and without overlap.

    Raises:
        OSError: See `open_regular`.
    """
    digest = hashlib.sha256()
    crc32s: list[int | None] = []
    position = 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        for offset, size in ranges:
            position += _read_blocks(file, offset - position, digest=digest)[0]
            num_read, crc32 = _read_blocks(file, size, digest=digest, computes_crc32=True)
            crc32s.append(crc32 if position == offset and num_read == size else None)
            position += num_read
        while num_read := _read_blocks(file, _BLOCK_BYTES, digest=digest)[0]:
            position += num_read
    return Scan(size_bytes=position, sha256=digest.hexdigest(), crc32s=tuple(crc32s))


def _read_blocks(
    file: BinaryIO, size: int, *, digest: "hashlib._Hash", computes_crc32: bool = False
) -> tuple[int, int]:
    """Add `size` bytes to `digest`, or fewer at the end of the file; return their number and CRC-32."""
    remaining, crc32 = size, 0
    while remaining > 0:
        block = file.read(min(remaining, _BLOCK_BYTES))
        if not block:
            break
        digest.update(block)
        if computes_crc32:
            crc32 = zlib.crc32(block, crc32)
        remaining -= len(block)
    return size - remaining, crc32
