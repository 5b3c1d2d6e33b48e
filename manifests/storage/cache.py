"""A bounded cache of complete objects in a local folder, shared by the processes of a machine.

    <folder>/objects/<name>      a complete copy, verified when it was written
    <folder>/objects/.tmp-...    a download in progress, protected by the lock for its name
    <folder>/locks/000 ... 255   locks; a lock is held while an object is fetched, so that it is fetched only once
    <folder>/locks/room          held while copies are evicted to make room
    <folder>/locks/room-<bytes>-...  room reserved for a download; void once its process no longer holds the lock

All locks are flocks, which end with their process. Copies in use have a shared lock, and only unused copies are
evicted, least recently used first (by mtime, which is set at each use). The size of the copies is therefore the space
that they take on disk. A memory map keeps the open file and its lock, even after the descriptor was closed (Linux,
local disks).
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

FREE_SHARE = 0.8  # of the free disk space and the space of the cache: the default limit
PARTS = ("objects", "locks")  # folders in the folder of a cache
_NUM_LOCKS = 256
_HINT = "use a larger --cache-size, or a --cache on a larger disk"
_PIECE_BYTES = 1 << 20


class NoRoom(UserError):
    """An object does not fit into the cache, even if all unused copies are evicted."""


class Damaged(OSError):
    """The fetched bytes are not the requested object."""


@dataclass(eq=False)
class CachedFile:
    """A copy that stays in the cache until it and all memory maps of `descriptor` are closed.

    Attributes:
        path: Path of the copy.
        descriptor: Descriptor of the open file; -1 once it is closed.
    """

    path: Path
    descriptor: int

    def close(self) -> None:
        """Allow the copy to be evicted, unless it is mapped."""
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
    """A size-limited cache in a folder. Safe for several threads, and for several processes that use the same folder.

    Args:
        limit_bytes: Maximum total size of the copies; None for `FREE_SHARE` of the free space.
        is_durable: True if the copies must survive a restart of the machine, even after a power failure.

    Attributes:
        is_derived: True if the limit comes from the free disk space.
        claims: Sizes of the objects that this process will keep, by name.

    Raises:
        OSError: The folder cannot be created.
    """

    def __init__(self, folder: Path, *, limit_bytes: int | None = None, is_durable: bool = True) -> None:
        self.folder, self._is_durable = folder, is_durable
        self._files, self._locks = (folder / part for part in PARTS)
        for part in (self._files, self._locks):
            part.mkdir(parents=True, exist_ok=True)
        self.is_derived = limit_bytes is None
        if limit_bytes is None:
            written = sum(state.st_blocks * 512 for state in files_in(self._files).values())
            limit_bytes = int(FREE_SHARE * (shutil.disk_usage(folder).free + written))
        self.limit_bytes = limit_bytes
        self._claims_lock = threading.Lock()
        self.claims: dict[str, int] = {}
        self._claimed_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Current total size of the copies."""
        return sum(state.st_size for state in self._copies().values())

    def find(self, name: str, *, size_bytes: int | None = None) -> CachedFile | None:
        """Return the copy with this name; None if it is missing. A copy with a different size is removed."""
        path = self._files / name
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            lock(descriptor, is_shared=True)
            status = os.fstat(descriptor)
            if status.st_nlink and size_bytes in (None, status.st_size):
                with suppress(PermissionError):  # a copy that another user has fetched
                    os.utime(descriptor)
                return CachedFile(path, descriptor)
            os.close(descriptor)
            if status.st_nlink:
                self.drop(name)
            # Otherwise, the copy was evicted between `open` and `lock`; a new copy may exist in the meantime.

    def get(
        self,
        name: str,
        *,
        size_bytes: int,
        fetch: Callable[[Path], None],
        sha256: str | None = None,
        waits: bool = True,
    ) -> CachedFile | None:
        """Return the copy with this name. If it is missing, make room and call `fetch` to write the given path.

        Args:
            sha256: Expected SHA-256 (hex) of the content; None if unknown.
            waits: Wait for another process or thread that fetches the same object; otherwise return None.

        Raises:
            NoRoom: The object does not fit, because it is larger than the limit or because of copies in use.
            Damaged: The fetched bytes have a different size or digest.
            OSError: The object cannot be fetched or written.
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
                    _require(temporary, size_bytes=size_bytes, sha256=sha256)
                    descriptor = os.open(temporary, os.O_RDONLY)
                    copy = CachedFile(path, descriptor)
                    lock(descriptor, is_shared=True)  # before another process can find and evict it
                    if self._is_durable:
                        os.fsync(descriptor)
                    temporary.rename(path)
                finally:
                    temporary.unlink(missing_ok=True)
            return copy

    def claim(self, sizes: Mapping[str, int], *, only_if_it_fits: bool = False) -> bool:
        """Reserve room for objects, by name, that this process will keep in the cache; return False if they do not fit.

        Raises:
            NoRoom: The objects do not fit, unless `only_if_it_fits`.
        """
        with self._claims_lock:
            new = {name: size for name, size in sizes.items() if name not in self.claims}
            needed = self._claimed_bytes + sum(new.values())
            if needed > self.limit_bytes:
                if only_if_it_fits:
                    return False
                raise NoRoom(
                    f"{needed:,} bytes must be in the cache {self.folder}, but its limit is {self.limit_bytes:,} bytes",
                    hint=_HINT,
                )
            self.claims.update(new)
            self._claimed_bytes = needed
            return True

    def drop(self, name: str) -> None:
        """Remove a damaged or outdated copy; processes that have it open or mapped keep it."""
        (self._files / name).unlink(missing_ok=True)

    def remove_unused(self) -> None:
        """Remove the copies that no process uses."""
        evict(self._copies(), excess_bytes=sys.maxsize)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the copies."""
        return [path.name for path in self._copies() if path.name.startswith(prefix)]

    def _copies(self) -> dict[Path, os.stat_result]:
        files = files_in(self._files)
        return {path: state for path, state in files.items() if not path.name.startswith(TEMPORARY_PREFIX)}

    @contextmanager
    def _room(self, size_bytes: int, *, name: str) -> Iterator[None]:
        """Reserve room for `size_bytes` until the download has become a copy or has failed."""
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
        # List the downloads first: a download that becomes a copy in the meantime is then in both lists, not in none.
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
            free = f"only {max(0, self.limit_bytes - used_bytes):,} of {self.limit_bytes:,} bytes are free or unused"
            raise NoRoom(f"{name} has {size_bytes:,} bytes, but in the cache {self.folder}, {free}", hint=_HINT)

    def _lock_of(self, name: str) -> Path:
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2).digest()) % _NUM_LOCKS
        return self._locks / f"{number:03d}"


def files_in(folder: Path) -> dict[Path, os.stat_result]:
    """Return the `stat` result of each file in a folder."""
    states = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # the file was removed in the meantime
                states[Path(entry.path)] = entry.stat(follow_symlinks=False)
    return states


def evict(files: Mapping[Path, os.stat_result], *, excess_bytes: int, are_locked: bool = True) -> int:
    """Remove files, least recently used first, until `excess_bytes` are freed; return the number of bytes freed.

    Args:
        files: Files that may be removed, with their `stat` results; the modification time is the time of the last use.
        are_locked: True if processes lock the files that they use (`try_lock`); locked files are kept.
    """
    freed_bytes = 0
    for path, state in sorted(files.items(), key=lambda item: item[1].st_mtime_ns):
        if freed_bytes >= excess_bytes:
            break
        if not are_locked:
            path.unlink(missing_ok=True)
        elif (descriptor := try_lock(path)) is not None:
            path.unlink(missing_ok=True)  # while the lock is held, so that no process begins to use the file
            os.close(descriptor)
        if not path.exists():
            freed_bytes += state.st_size
    return freed_bytes


def _require(path: Path, *, size_bytes: int, sha256: str | None) -> None:
    if (num_bytes := path.stat().st_size) != size_bytes:
        # If a connection is closed early, this may look like the end of the object.
        raise Damaged(f"received {num_bytes:,} of {size_bytes:,} bytes")
    if sha256 is not None:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        if digest.hexdigest() != sha256:
            raise Damaged("its content differs from the committed content")
