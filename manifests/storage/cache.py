"""A bounded cache of whole objects in a local folder, shared by the processes of a machine.

    <folder>/tars/<name>         a copy: complete, and verified when it was written
    <folder>/tars/.tmp-...       a download, under the lock of its name
    <folder>/locks/000 ... 255   one of them is held while an object is fetched, so that it is fetched once
    <folder>/locks/room          held while room is made
    <folder>/locks/room-<bytes>-...  room that a download has taken; void if its maker no longer holds its lock

All locks are flocks, which end with their process. A copy in use is under a shared lock, and only copies that are not
in use are evicted, least recently used first (by mtime, which is set at each use): the bytes on disk are those that are
counted. A mapping keeps the open file, and with it the lock, after its descriptor was closed (Linux, local disks).
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX, published, remove_temporaries, target_of

FREE_SHARE = 0.8  # of the free disk, and of what the cache already holds: the limit if none is chosen
_NUM_LOCKS = 256
_HINT = "use a larger --cache-size, or a --cache on a larger disk"
_PIECE_BYTES = 1 << 20


class NoRoom(UserError):
    """An object does not fit under the limit of the cache, whatever is evicted."""


class Damaged(OSError):
    """What was fetched is not the object that was asked for."""


class CachedFile:
    """A copy that stays in the cache until it is closed and all mappings made of `descriptor` are gone.

    Attributes:
        path: of the copy.
        descriptor: of the open file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

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


@dataclass(frozen=True)
class _Entry:
    used_s: float
    size_bytes: int
    path: Path


class ObjectCache:
    """The cache in a folder, under a limit. Thread-safe, and safe with other processes that use the same folder.

    Args:
        limit_bytes: of the copies together; None for `FREE_SHARE` of what is free now.

    Attributes:
        is_derived: whether the limit comes from the free disk.
        claims: sizes of the objects that this process means to keep, by name.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        self.folder = folder
        self._files, self._locks = folder / "tars", folder / "locks"
        for one in (self._files, self._locks):
            one.mkdir(parents=True, exist_ok=True)
        self.is_derived = limit_bytes is None
        if limit_bytes is None:
            free = shutil.disk_usage(folder).free
            limit_bytes = int(FREE_SHARE * (free + self.held_bytes))
        self.limit_bytes = limit_bytes
        self._claims_lock = threading.Lock()
        self.claims: dict[str, int] = {}
        self._claimed_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Size of the copies now."""
        return sum(entry.size_bytes for entry in self._entries())

    def find(self, name: str, *, size_bytes: int | None = None) -> CachedFile | None:
        """The copy with this name, None if there is none; one of another size is removed."""
        path = self._files / name
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            found = os.fstat(descriptor)
            if found.st_nlink and size_bytes in (None, found.st_size):
                with suppress(PermissionError):  # a copy that another user has fetched
                    os.utime(descriptor)
                return CachedFile(path, descriptor)
            os.close(descriptor)
            if found.st_nlink:
                self.drop(name)
            # Otherwise it was evicted between `open` and `flock`; by now another copy may be there.

    def get(
        self,
        name: str,
        *,
        size_bytes: int,
        fetch: Callable[[Path], None],
        sha256: str | None = None,
        waits: bool = True,
    ) -> CachedFile | None:
        """The copy with this name; if it is missing, room is made and `fetch` writes it to the given path.

        Args:
            sha256: hex digest that the content must have; None if it is unknown.
            waits: wait for another process or thread that fetches the same object; otherwise return None.

        Raises:
            NoRoom: it does not fit, because it is larger than the limit or because of copies in use.
            Damaged: what was fetched has another size or digest.
            OSError: it cannot be fetched or written.
        """
        if found := self.find(name, size_bytes=size_bytes):
            return found
        with self._lock(_lock_of(name), waits=waits) as is_mine:
            if not is_mine:
                return None
            if found := self.find(name, size_bytes=size_bytes):
                return found
            remove_temporaries(self._files, of=lambda target: target == name)
            with self._room(size_bytes, name=name), published(self._files / name) as temporary:
                fetch(temporary)
                _require(temporary, size_bytes=size_bytes, sha256=sha256)
                descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # before anybody can find and evict it
                held = CachedFile(self._files / name, descriptor)
            return held

    def claim(self, sizes: Mapping[str, int], *, only_if_it_fits: bool = False) -> bool:
        """Note objects, by name, that this process means to keep in the cache; False if they do not fit beside others.

        Raises:
            NoRoom: they do not fit, unless `only_if_it_fits`.
        """
        with self._claims_lock:
            new = {name: size for name, size in sizes.items() if name not in self.claims}
            needed = self._claimed_bytes + sum(new.values())
            if needed > self.limit_bytes:
                if only_if_it_fits:
                    return False
                raise NoRoom(
                    f"{needed:,} bytes have to be in the cache {self.folder}, whose limit is {self.limit_bytes:,}",
                    hint=_HINT,
                )
            self.claims.update(new)
            self._claimed_bytes = needed
            return True

    def drop(self, name: str) -> None:
        """Remove a copy that is damaged or outdated; processes that have it open or mapped keep it."""
        (self._files / name).unlink(missing_ok=True)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the copies."""
        return [entry.path.name for entry in self._entries() if entry.path.name.startswith(prefix)]

    def _entries(self) -> Iterator[_Entry]:
        with os.scandir(self._files) as found:
            for one in found:
                if not one.name.startswith(TEMPORARY_PREFIX):
                    with suppress(FileNotFoundError):
                        stat = one.stat(follow_symlinks=False)
                        yield _Entry(stat.st_mtime, stat.st_size, Path(one.path))

    @contextmanager
    def _lock(self, name: str, *, waits: bool = True) -> Iterator[bool]:
        descriptor = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield _flock(descriptor, waits=waits)
        finally:
            os.close(descriptor)

    @contextmanager
    def _room(self, size_bytes: int, *, name: str) -> Iterator[None]:
        """Room for `size_bytes` under the limit, until the download has become a copy or failed."""
        with self._lock("room"):
            self._make_room(size_bytes, name=name)
            taken = self._locks / f"room-{size_bytes}-{secrets.token_hex(6)}-{name}"
            descriptor = os.open(taken, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _flock(descriptor, waits=True)
        try:
            yield
        finally:
            taken.unlink(missing_ok=True)
            os.close(descriptor)

    def _make_room(self, size_bytes: int, *, name: str) -> None:
        self._remove_dead_downloads()
        # Downloads first: one that becomes a copy meanwhile is then seen as both, and counted once.
        downloads = self._downloads()
        entries = sorted(self._entries(), key=lambda entry: entry.used_s)
        done = {entry.path.name for entry in entries}
        taken = sum(entry.size_bytes for entry in entries)
        taken += sum(size for target, size in downloads if target not in done)
        for entry in entries:
            if taken + size_bytes <= self.limit_bytes:
                return
            if _evict(entry.path):
                taken -= entry.size_bytes
        if taken + size_bytes > self.limit_bytes:
            what = f"{name} has {size_bytes:,} bytes, and the cache {self.folder} has room for"
            raise NoRoom(
                f"{what} {max(0, self.limit_bytes - taken):,} of {self.limit_bytes:,}; the rest is in use",
                hint=_HINT,
            )

    def _downloads(self) -> list[tuple[str, int]]:
        """Names and sizes of the copies that are being downloaded."""
        found = []
        for path in self._locks.glob("room-*"):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if _flock(descriptor, waits=False):  # its maker is gone
                    path.unlink(missing_ok=True)
                else:
                    _, size, _, target = path.name.split("-", 3)
                    found.append((target, int(size)))
                os.close(descriptor)
        return found

    def _remove_dead_downloads(self) -> None:
        for path in self._files.glob(f"{TEMPORARY_PREFIX}*"):
            if (name := target_of(path.name)) is not None:
                with self._lock(_lock_of(name), waits=False) as is_mine:
                    if is_mine:
                        path.unlink(missing_ok=True)


def _lock_of(name: str) -> str:
    return f"{int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2).digest()) % _NUM_LOCKS:03d}"


def _flock(descriptor: int, *, waits: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _evict(path: Path) -> bool:
    """Remove a copy; False if it is in use."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _flock(descriptor, waits=False):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _require(path: Path, *, size_bytes: int, sha256: str | None) -> None:
    if (found := path.stat().st_size) != size_bytes:
        # A connection that is closed early may look like the end of the object.
        raise Damaged(f"received {found:,} of {size_bytes:,} bytes")
    if sha256 is not None:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        if digest.hexdigest() != sha256:
            raise Damaged("its content is not what was committed")
