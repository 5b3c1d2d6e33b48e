"""Keep complete copies of objects in a local folder of limited size that the processes of a machine share.

    <folder>/objects/<name>      complete copy, which was verified when it was written
    <folder>/objects/.tmp-...    download in progress, protected by the lock for its name
    <folder>/locks/000 ... 255   locks; a lock is held during a download, so that each object is downloaded only once
    <folder>/locks/room          lock that is held while copies are evicted to make room
    <folder>/locks/room-<bytes>-...  room that is reserved for a download while a process holds the lock of this file

All locks are flocks, so a lock is released when its holder ends. A copy in use has a shared lock. Only unused copies
are evicted, starting with the least recently used copy (by mtime, which each use updates). Therefore, no evicted copy
takes up disk space. On Linux, a memory map of a local file keeps the open file and its lock, even after the descriptor
is closed.
"""

import hashlib
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import hold_lock, lock, try_lock
from clipmill.manifests.publish import TEMPORARY_PREFIX, remove_temporaries, tag_errors, target_of, temporary_path

FREE_FRACTION = 0.8  # default limit, as a fraction of the free disk space plus the current size of the cache
SUBFOLDERS = ("objects", "locks")  # subfolders of the cache's folder
_NUM_LOCKS = 256
_HINT = "use a larger --cache-size, or a --cache on a larger disk"
_BLOCK_BYTES = 1 << 20


class NoRoom(UserError):
    """An object does not fit into the cache, even after the eviction of all unused copies."""


class DamagedCopy(OSError):
    """The downloaded bytes are not the requested object."""


@dataclass(eq=False)
class CachedFile:
    """An open copy. It cannot be evicted until the descriptor and all memory maps of the descriptor are closed.

    Attributes:
        path: Path of the copy.
        descriptor: Descriptor of the open file; -1 after it was closed.
    """

    path: Path
    descriptor: int

    def close(self) -> None:
        """Close the file, so that the copy can be evicted unless it is mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class ObjectCache:
    """A cache of limited size in a folder. Thread-safe, and safe for several processes that share the folder.

    Args:
        limit_bytes: Maximum total size of the copies. By default, it is derived from the free space (FREE_FRACTION).
        is_durable: Flush copies to disk, so that they survive a power failure.

    Attributes:
        is_derived: True if the limit is derived from the free disk space.
        claims: Size in bytes of each object that this process has claimed room for, by name.

    Raises:
        OSError: The folder cannot be created.
    """

    def __init__(self, folder: Path, *, limit_bytes: int | None = None, is_durable: bool = True) -> None:
        self.folder, self._is_durable = folder, is_durable
        self._files, self._locks = (folder / name for name in SUBFOLDERS)
        for subfolder in (self._files, self._locks):
            subfolder.mkdir(parents=True, exist_ok=True)
        self.is_derived = limit_bytes is None
        if limit_bytes is None:
            used_bytes = sum(state.st_blocks * 512 for state in files_in(self._files).values())
            limit_bytes = int(FREE_FRACTION * (shutil.disk_usage(folder).free + used_bytes))
        self.limit_bytes = limit_bytes
        self._claims_lock = threading.Lock()
        self.claims: dict[str, int] = {}
        self._claimed_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Total size of the copies in bytes."""
        return sum(state.st_size for state in self._copies().values())

    def find(self, name: str, *, size_bytes: int | None = None) -> CachedFile | None:
        """Open the copy with this name. Return None if it is missing. Remove a copy whose size is not `size_bytes`."""
        path = self._files / name
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            lock(descriptor, is_shared=True)
            status = os.fstat(descriptor)
            if status.st_nlink and size_bytes in (None, status.st_size):
                with suppress(PermissionError):  # the copy belongs to another user
                    os.utime(descriptor)
                return CachedFile(path, descriptor)
            os.close(descriptor)
            if status.st_nlink:
                self.drop(name)
            # Otherwise, the copy was evicted between `open` and `lock`. A new copy may exist by now.

    def get(
        self,
        name: str,
        *,
        size_bytes: int,
        fetch: Callable[[Path], None],
        sha256: str | None = None,
        waits: bool = True,
    ) -> CachedFile | None:
        """Open the copy with this name. If it is missing, make room and download the object.

        Args:
            size_bytes: Size of the object.
            fetch: Function that downloads the object to the given path.
            sha256: Expected SHA-256 of the content, as hexadecimal digits; None if it is unknown.
            waits: Wait while another process or thread downloads the same object. If False, return None instead.

        Raises:
            NoRoom: The object does not fit, because it is larger than the limit, or copies in use take up the room.
            DamagedCopy: The downloaded bytes have a different size or digest.
            OSError: The object cannot be downloaded, or the copy cannot be written.
        """
        if copy := self.find(name, size_bytes=size_bytes):
            return copy
        with hold_lock(self._lock_of(name), waits=waits) as is_held:
            if not is_held:
                return None
            if copy := self.find(name, size_bytes=size_bytes):
                return copy
            remove_temporaries(self._files, matches=lambda target: target == name)
            path = self._files / name
            temporary = temporary_path(path)
            with self._room(size_bytes, name=name), tag_errors(path):
                try:
                    fetch(temporary)
                    _verify_copy(temporary, size_bytes=size_bytes, sha256=sha256)
                    descriptor = os.open(temporary, os.O_RDONLY)
                    copy = CachedFile(path, descriptor)
                    lock(descriptor, is_shared=True)  # before the copy appears, so that no process can evict it
                    if self._is_durable:
                        os.fsync(descriptor)
                    temporary.rename(path)
                finally:
                    temporary.unlink(missing_ok=True)
            return copy

    def claim(self, sizes: Mapping[str, int], *, only_if_it_fits: bool = False) -> bool:
        """Claim room for objects that this process will keep in the cache.

        Args:
            sizes: Sizes of the objects in bytes, by name.
            only_if_it_fits: Return False if the objects do not fit. By default, an error is raised.

        Raises:
            NoRoom: The objects do not fit, and `only_if_it_fits` is False.
        """
        with self._claims_lock:
            new_claims = {name: size for name, size in sizes.items() if name not in self.claims}
            claimed_bytes = self._claimed_bytes + sum(new_claims.values())
            if claimed_bytes > self.limit_bytes:
                if only_if_it_fits:
                    return False
                raise NoRoom(
                    f"{claimed_bytes:,} bytes must fit into the cache {self.folder}, but its limit is "
                    f"{self.limit_bytes:,} bytes",
                    hint=_HINT,
                )
            self.claims.update(new_claims)
            self._claimed_bytes = claimed_bytes
            return True

    def drop(self, name: str) -> None:
        """Remove a damaged or outdated copy. Processes that have opened or mapped it can still use it."""
        (self._files / name).unlink(missing_ok=True)

    def remove_unused(self) -> None:
        """Remove the copies that no process uses."""
        evict(self._copies(), excess_bytes=sys.maxsize)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all copies whose names begin with `prefix`."""
        return [path.name for path in self._copies() if path.name.startswith(prefix)]

    def _copies(self) -> dict[Path, os.stat_result]:
        files = files_in(self._files)
        return {path: state for path, state in files.items() if not path.name.startswith(TEMPORARY_PREFIX)}

    @contextmanager
    def _room(self, size_bytes: int, *, name: str) -> Iterator[None]:
        """Context manager that reserves room for a download."""
        with hold_lock(self._locks / "room"):
            self._make_room(size_bytes, name=name)
            room = self._locks / f"room-{size_bytes}-{secrets.token_hex(6)}-{name}"
            room_lock = ExitStack()
            room_lock.enter_context(hold_lock(room))
        with room_lock:
            try:
                yield
            finally:
                room.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int, *, name: str) -> None:
        # Remove the downloads of killed processes.
        for path in self._files.glob(f"{TEMPORARY_PREFIX}*"):
            if (target := target_of(path.name)) is not None:
                with hold_lock(self._lock_of(target), waits=False) as is_held:
                    if is_held:
                        path.unlink(missing_ok=True)
        # The downloads are listed before the copies. If a download becomes a copy in between, it is in both lists, but
        # is counted only once. In the reverse order, it might be in neither list.
        downloads = []
        for path in self._locks.glob("room-*"):
            if (descriptor := try_lock(path)) is not None:  # the process that reserved the room has ended
                path.unlink(missing_ok=True)
                os.close(descriptor)
            elif path.exists():
                _, size, _, target = path.name.split("-", 3)
                downloads.append((target, int(size)))
        copies = self._copies()
        used_bytes = sum(state.st_size for state in copies.values())
        used_bytes += sum(size for target, size in downloads if self._files / target not in copies)
        used_bytes -= evict(copies, excess_bytes=used_bytes + size_bytes - self.limit_bytes)
        if used_bytes + size_bytes > self.limit_bytes:
            free_bytes = max(0, self.limit_bytes - used_bytes)
            raise NoRoom(
                f"{name} has {size_bytes:,} bytes, but only {free_bytes:,} of {self.limit_bytes:,} bytes are free or "
                f"unused in the cache {self.folder}",
                hint=_HINT,
            )

    def _lock_of(self, name: str) -> Path:
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2).digest()) % _NUM_LOCKS
        return self._locks / f"{number:03d}"


def files_in(folder: Path) -> dict[Path, os.stat_result]:
    """Return the `stat` results of the files in a folder, by path."""
    states = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # the file was removed in the meantime
                states[Path(entry.path)] = entry.stat(follow_symlinks=False)
    return states


def evict(files: Mapping[Path, os.stat_result], *, excess_bytes: int, are_locked: bool = True) -> int:
    """Remove files, the least recently used file first, until at least `excess_bytes` are freed.

    Args:
        files: Files that may be removed, with their `stat` results. The modification time is the time of the last use.
        are_locked: True if processes lock the files that they use. Locked files are kept.

    Returns:
        The number of bytes that were freed.
    """
    freed_bytes = 0
    for path, state in sorted(files.items(), key=lambda item: item[1].st_mtime_ns):
        if freed_bytes >= excess_bytes:
            break
        if not are_locked:
            path.unlink(missing_ok=True)
        elif (descriptor := try_lock(path)) is not None:
            path.unlink(missing_ok=True)  # the lock is still held, so that no process starts to use the file
            os.close(descriptor)
        if not path.exists():
            freed_bytes += state.st_size
    return freed_bytes


def _verify_copy(path: Path, *, size_bytes: int, sha256: str | None) -> None:
    if (num_bytes := path.stat().st_size) != size_bytes:
        # The end of a connection that was closed too early may look like the end of the object.
        raise DamagedCopy(f"received {num_bytes:,} of {size_bytes:,} bytes")
    if sha256 is not None:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        if digest.hexdigest() != sha256:
            raise DamagedCopy("its content differs from the committed content")
