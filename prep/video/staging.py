"""Local copies of remote sources for the encoder, shared by the workers of a node, with a limit on their total size.

    $TMPDIR/sources-clipmill-<uid>/      accessible to this user only (0700), locked (shared) by the processes using it
        objects/, locks/                 a cache of limited size (`clipmill.manifests.storage.cache`)
            <32 hex>                     in objects/: copy of one version of one source

ffmpeg is not allowed to use the network (`clipmill.shards.opening`), so it reads a copy of the complete file. Several
shards may contain spans of the same long video. Therefore a copy is kept as long as there is space, so that each node
downloads a video only once. To free space, copies that no worker reads are removed, the least recently used first. If
that frees too little space, a worker waits for other workers to finish. A waiting worker holds no copy.

The first process that uses the folder starts a sweeper. This small process waits until all processes that use the
folder have ended, even if they were killed, and then removes the folder. If the sweeper is killed too, the next process
finds the folder unlocked, and removes its content.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from clipmill.manifests.locks import is_same_folder, lock, open_private, private_root
from clipmill.manifests.storage.cache import FREE_FRACTION, SUBFOLDERS, CachedFile, NoRoom, ObjectCache
from clipmill.manifests.storage.objects import Objects
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.remote import as_source_failure, object_state, objects_of, source_state

_SWEEPER = f"""
import fcntl, os, shutil, sys
folder = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
fcntl.flock(folder, fcntl.LOCK_EX)
os.fchdir(folder)
for part in {SUBFOLDERS!r}:
    shutil.rmtree(part, ignore_errors=True)
if os.path.samestat(os.stat(sys.argv[1]), os.fstat(folder)):
    os.rmdir(sys.argv[1])
"""
_RANGE_BYTES = 16 << 20
_NUM_RANGES = 4  # ranges requested in parallel, because one connection does not use the full bandwidth
_WAIT_S = 0.5
_locked_root: tuple[int, Path, int] | None = None  # (process ID, folder, descriptor that holds the lock until exit)
_sweepers: "list[subprocess.Popen[bytes]]" = []


def _lock_root() -> Path:
    """Lock the folder of the copies until this process exits, and return it; remove files left by killed processes.

    Raises:
        OSError: The folder cannot be created, or is not private to this user.
    """
    global _locked_root
    root = private_root("sources")
    if _locked_root is not None and _locked_root[:2] == (os.getpid(), root):
        return root
    while True:
        folder = open_private(root)
        if is_first := lock(folder, waits=False):
            for part in SUBFOLDERS:
                shutil.rmtree(root / part, ignore_errors=True)
        lock(folder, is_shared=True)
        if is_same_folder(root, folder):
            break
        os.close(folder)  # the sweeper has removed the folder in the meantime
    if is_first:
        command = [sys.executable, "-I", "-S", "-c", _SWEEPER, os.fspath(root)]
        null = subprocess.DEVNULL
        _sweepers.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True))
    _locked_root = (os.getpid(), root, folder)
    return root


def copy_of(url: str, *, limit_bytes: int | None, on_wait: Callable[[], None]) -> CachedFile:
    """Return a copy of an object, after downloading it if necessary. The copy is not removed until it is closed.

    Args:
        limit_bytes: Maximum total size of the copies on this node; None to use most of the free space.
        on_wait: Heartbeat function to call repeatedly while the object is downloaded, or while this worker waits.

    Raises:
        SourceFailure: source_missing, source_unreadable, source_changed, source_too_large, disk_full or io_error.
    """
    with as_source_failure():
        root = _lock_root()
        objects, key = objects_of(url)
        state = source_state(objects, key)
    name = hashlib.sha256(f"{url}\0{state}".encode()).hexdigest()[:32]
    fetch = partial(_fetch, objects, key, state=state, on_wait=on_wait)
    while True:
        with as_source_failure():
            cache = ObjectCache(root, limit_bytes=limit_bytes, is_durable=False)
        if state[0] > cache.limit_bytes:
            free_text = f"{FREE_FRACTION:.0%} of the free space in {root.parent}; set TMPDIR to a larger disk"
            limit = "--scratch-size" if limit_bytes is not None else free_text
            message = f"the source has {state[0]:,} bytes, but copies may take at most {cache.limit_bytes:,} ({limit})"
            raise SourceFailure(FailureCode.SOURCE_TOO_LARGE, message, is_lasting=False)
        with as_source_failure(), suppress(NoRoom):  # retry until other workers have released their copies
            copy = cache.get(name, size_bytes=state[0], fetch=fetch, waits=False)
            if copy is not None:
                return copy
        on_wait()
        time.sleep(_WAIT_S)


def _fetch(objects: Objects, key: str, path: Path, *, state: tuple[int, int], on_wait: Callable[[], None]) -> None:
    """Download the ranges of an object in parallel, and check that the object has not changed during the download.

    Raises:
        SourceFailure: source_changed.
        UserError: See `Objects`.
        OSError: See `Objects`, or the file cannot be written.
    """
    size_bytes = state[0]
    begins = range(0, size_bytes, _RANGE_BYTES)
    with path.open("wb") as file, ThreadPoolExecutor(_NUM_RANGES) as pool:

        def fetch(begin: int) -> None:
            content = objects.read_range(key, begin, min(_RANGE_BYTES, size_bytes - begin))
            while content:
                num_written = os.pwrite(file.fileno(), content, begin)
                begin, content = begin + num_written, content[num_written:]

        tasks = [pool.submit(fetch, begin) for begin in begins]
        try:
            for task in tasks:
                task.result()
                on_wait()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(begins) > 1 and object_state(objects.info(key)) != state:
        raise SourceFailure(FailureCode.SOURCE_CHANGED, "the object changed while it was downloaded", is_lasting=False)
