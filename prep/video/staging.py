"""Local copies of remote sources for the encoder, shared by the workers of a node under a limit of bytes.

    $TMPDIR/sources-clipmill-<uid>/      accessible to this user only (0700), locked (shared) by the processes using it
        lock                             held while copies are looked up, reserved or removed
        <32 hex>                         copy of one version of one source, locked (shared) while a worker reads it
        <32 hex>.size                    its (sparse) length reserves that many bytes; locked while the copy is fetched
        <32 hex>.part                    the part of the copy that has been fetched

ffmpeg may not use the network (`clipmill.prep.sources.probe.PROTOCOLS`), so it gets a copy of the whole file. A copy
stays while there is room, since the spans of a long video lie in several shards: the node then fetches it once. Copies
that no worker reads are removed to make room, the least recently used first. If that is not enough, a worker waits for
others to finish; a worker that waits holds no copy itself.

The first process to use the folder starts a sweeper: a small process that waits until no process uses the folder any
more, however they end, and removes it. If the sweeper is killed too, the next process that would use the folder finds
it unlocked and removes what is in it.
"""

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipmill.manifests.locks import lock, locked, try_lock
from clipmill.manifests.private_folders import is_still_at, open_private, private_root
from clipmill.manifests.storage.cache import FREE_SHARE, default_limit, evict, files_in
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import Objects
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.remote import as_source_failure, object_state, objects_of

_OWN_FILE = re.compile(r"lock|[0-9a-f]{32}(\.size|\.part)?")
_SWEEPER = f"""
import fcntl, os, re, sys
folder = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
fcntl.flock(folder, fcntl.LOCK_EX)
for name in os.listdir(folder):
    if re.fullmatch({_OWN_FILE.pattern!r}, name):
        os.unlink(name, dir_fd=folder)
if os.path.samestat(os.stat(sys.argv[1]), os.fstat(folder)):
    os.rmdir(sys.argv[1])
"""
_COPY = re.compile(r"[0-9a-f]{32}")
_RANGE_BYTES = 16 << 20
_NUM_RANGES = 4  # requested in parallel: one connection does not fill a network
_WAIT_S = 0.5
_in_use: tuple[int, Path, int] | None = None  # (process, folder, descriptor of its lock): until the process exits
_sweepers: "list[subprocess.Popen[bytes]]" = []


class StagedSources:
    """Sources as local files, one at a time: the last one stays in use until another one is asked for.

    Args:
        limit_bytes: limit of all copies on this node; None for most of the free space.
        on_wait: called again and again while a source is fetched or waited for, as a heartbeat.
    """

    def __init__(self, *, limit_bytes: int | None = None, on_wait: Callable[[], None] = lambda: None) -> None:
        self._limit_bytes, self._on_wait = limit_bytes, on_wait
        self._place, self._path, self._lock = "", Path(), -1

    def __enter__(self) -> "StagedSources":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def path_of(self, place: str) -> Path:
        """Return the path of a local file, or of a copy of an object, which is valid until the next call.

        Raises:
            SourceFailure: source_missing, source_unreadable, source_changed, source_too_large, disk_full or io_error.
        """
        if not is_remote(place):
            self.release()
            return Path(place)
        if place != self._place:
            self.release()
            self._path, self._lock = _copy_of(place, limit_bytes=self._limit_bytes, on_wait=self._on_wait)
            self._place = place
        return self._path

    def release(self, *, is_damaged: bool = False) -> None:
        """Stop using the source. A damaged copy is removed, so that it is fetched again."""
        if self._lock >= 0:
            if is_damaged:
                self._path.unlink(missing_ok=True)
            os.close(self._lock)
        self._place, self._lock = "", -1


def _opened_root() -> Path:
    """Return the folder of the copies, locked by this process until it exits; what killed processes left is removed.

    Raises:
        OSError: it cannot be created, or is not a folder exclusive to this user.
    """
    global _in_use
    root = private_root("sources")
    if _in_use is not None and _in_use[:2] == (os.getpid(), root):
        return root
    while True:
        folder = open_private(root)
        if is_first := lock(folder, waits=False):
            _empty(root)
        lock(folder, is_shared=True)
        if is_still_at(root, folder):
            break
        os.close(folder)  # the sweeper has removed it meanwhile
    if is_first:
        command = [sys.executable, "-I", "-S", "-c", _SWEEPER, os.fspath(root)]
        null = subprocess.DEVNULL
        _sweepers.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True))
    _in_use = (os.getpid(), root, folder)
    return root


def _empty(root: Path) -> None:
    for entry in root.iterdir():
        if _OWN_FILE.fullmatch(entry.name):
            entry.unlink()


def _copy_of(url: str, *, limit_bytes: int | None, on_wait: Callable[[], None]) -> tuple[Path, int]:
    """Return a copy of an object and the descriptor that holds its lock."""
    with as_source_failure():
        root = _opened_root()
        objects, key = objects_of(url)
        state = object_state(objects.info(key))
    size_bytes = state[0]
    copy = root / hashlib.sha256(f"{url}\0{state}".encode()).hexdigest()[:32]
    reserved = copy.with_suffix(".size")
    while True:
        with locked(root / "lock"):
            found = try_lock(copy, is_shared=True)
            if found is not None:
                os.utime(copy)
                return copy, found
            is_fetched = _is_locked(reserved)  # by another worker
            reservation = None if is_fetched else _reserve(reserved, size_bytes, limit_bytes=limit_bytes)
        if reservation is None:
            on_wait()
            time.sleep(_WAIT_S)
            continue
        try:
            return copy, _fetch(objects, key, copy, state=state, on_wait=on_wait)
        finally:
            with locked(root / "lock"):  # so that others find either the copy or the reservation
                reserved.unlink()
                os.close(reservation)


def _reserve(reserved: Path, size_bytes: int, *, limit_bytes: int | None) -> int | None:
    """Reserve the bytes of a copy, and remove unused copies to make room; return the descriptor that holds the lock.

    None is returned if workers have to release their copies first. The lock of the folder must be held.

    Raises:
        SourceFailure: source_too_large: there would not be enough room without any other copy.
    """
    root = reserved.parent
    for abandoned in root.glob("*.size"):
        if not _is_locked(abandoned):  # its worker was killed while it fetched
            abandoned.unlink()
            abandoned.with_suffix(".part").unlink(missing_ok=True)
    files = files_in(root)
    limit = limit_bytes
    if limit is None:
        limit = default_limit(root, held_bytes=sum(state.st_blocks * 512 for state in files.values()))
    if size_bytes > limit:
        free = f"{FREE_SHARE:.0%} of the free space in {root.parent}; set TMPDIR to a larger disk"
        what = "--scratch-size" if limit_bytes is not None else free
        message = f"the source has {size_bytes:,} bytes, and a copy may have {limit:,} ({what})"
        raise SourceFailure(FailureCode.SOURCE_TOO_LARGE, message, is_lasting=False)
    copies = {path: state for path, state in files.items() if _COPY.fullmatch(path.name)}
    taken = sum(state.st_size for path, state in files.items() if path in copies or path.suffix == ".size")
    excess_bytes = taken + size_bytes - limit
    if evict(copies, excess_bytes=excess_bytes) < excess_bytes:
        return None
    descriptor = os.open(reserved, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    lock(descriptor)
    os.truncate(descriptor, size_bytes)
    return descriptor


def _fetch(objects: Objects, key: str, copy: Path, *, state: tuple[int, int], on_wait: Callable[[], None]) -> int:
    """Fetch an object by ranges in parallel, and check that it has not changed meanwhile.

    Returns the descriptor that holds the lock of the copy, taken before others can see it.

    Raises:
        SourceFailure: source_missing, source_unreadable, source_changed, disk_full or io_error.
    """
    part, size_bytes = copy.with_suffix(".part"), state[0]
    begins = range(0, size_bytes, _RANGE_BYTES)
    try:
        with as_source_failure(), part.open("wb") as file, ThreadPoolExecutor(_NUM_RANGES) as pool:

            def fetch(begin: int) -> None:
                wanted = min(_RANGE_BYTES, size_bytes - begin)
                content = objects.read_range(key, begin, wanted)
                while content:
                    done = os.pwrite(file.fileno(), content, begin)
                    begin, content = begin + done, content[done:]

            tasks = [pool.submit(fetch, begin) for begin in begins]
            try:
                for task in tasks:
                    task.result()
                    on_wait()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            if len(begins) > 1 and object_state(objects.info(key)) != state:
                raise SourceFailure(
                    FailureCode.SOURCE_CHANGED, "the object changed while it was fetched", is_lasting=False
                )
            held = os.open(part, os.O_RDONLY)
            lock(held, is_shared=True)
            part.rename(copy)
            return held
    finally:
        part.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    descriptor = try_lock(path)
    if descriptor is not None:
        os.close(descriptor)
        return False
    return path.exists()
