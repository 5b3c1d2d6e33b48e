"""A data folder in a bucket: a local folder that mirrors it, so that everything above works with paths.

The bucket is the truth. The local folder holds the small files (records, tables, layouts, commits) and stands in for
the others with placeholders: sparse files of the right size. It is a cache, below `$TMPDIR/data-clipmill-<uid>/`, and
losing it loses nothing:

    <16 hex of the address>/
        <host>-<n>/           the mirror of one command at a time; n counts the commands that run at once on a host
        <host>-<n>.lock       locked while a command uses the folder; holds the random number of its run

Reading: a command lists the bucket once and fetches what has changed. The modification time of a local file says which
version of the object it holds (`local_files.py`), so that a killed command leaves nothing that has to be trusted. A
file whose content is only in the bucket is fetched when it is opened; a tar is not kept.

Writing: an object is written before the local file appears, in the order in which files are published (tar, indexes,
commit), so that a killed command leaves at most objects that no commit names. Locks are leases (`leases.py`), which are
checked before each attempt of a request that changes something. A record is replaced only if it is the one that this
command has seen. Tars and indexes are named by their plan, and tables that are merged of them name their commits, so
that writing one again late does no harm.
"""

import errno
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from clipmill.manifests.publish import TEMPORARY_PREFIX, temporary_path
from clipmill.manifests.storage.changes import PART_BYTES
from clipmill.manifests.storage.errors import no_damage
from clipmill.manifests.storage.lease_holders import HeldLeases, held_leases, holder_of
from clipmill.manifests.storage.leases import Lease, LeaseHeld
from clipmill.manifests.storage.local_files import (
    holds,
    is_below,
    is_eager,
    is_lock,
    journal_owner,
    local_files,
    make_placeholder,
    run_of,
    set_stamp,
    sort_objects,
)
from clipmill.manifests.storage.objects import ObjectInfo, Objects, open_objects

_ROOT_LOCK = ".folder.lock"
_NUM_THREADS = 32


class WorkingCopy:
    """A data folder in a bucket, as a `Mirror`, which documents its methods. Thread-safe.

    Args:
        folder: an existing local folder that this command, or the command of this worker, uses alone.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.objects: Objects = open_objects(address)
        self._found: dict[str, ObjectInfo] | None = None  # by key, as of the last listing; None in a worker
        self._foreign: set[str] = set()  # keys that cannot be those of local files
        self.leases = HeldLeases(self.objects)

    # Reading

    def sync(self) -> None:
        """Bring all local files to the state of the bucket.

        Raises:
            UserError: the bucket does not exist, or the credentials are refused.
            OSError: the bucket cannot be read.
        """
        self._refresh("")

    def forget(self) -> None:
        """Make the next `require_listed` list the bucket again."""
        self._found = None

    def require_listed(self) -> None:
        """List the bucket unless this command has done so."""
        if self._found is None:
            self.sync()

    @property
    def is_empty(self) -> bool:
        """True if there are no objects, or only released locks."""
        self.require_listed()
        return not any(not key.startswith(".") for key in self._found or ())

    def foreign_keys(self) -> list[str]:
        """Return the keys of the objects that cannot be local files, which only listings return."""
        self.require_listed()
        return sorted(self._foreign | self.objects.odd_names)

    def refresh(self, folder: Path) -> None:
        self._refresh(self.key_of(folder))

    def _refresh(self, prefix: str, *, recursive: bool = True) -> None:
        for is_last in (False, False, True):
            found, foreign = sort_objects(self.objects.list(prefix, recursive=recursive))
            self._foreign |= foreign
            try:
                self._mirror(found, prefix, recursive=recursive)
            except FileNotFoundError:  # an object was removed meanwhile
                if is_last:
                    raise
            else:
                break
        if self._found is None:
            self._found = found if not prefix and recursive else None
        else:
            kept = {key: info for key, info in self._found.items() if not is_below(key, prefix, recursive=recursive)}
            self._found = kept | found

    def _mirror(self, found: dict[str, ObjectInfo], prefix: str, *, recursive: bool) -> None:
        local = dict(local_files(self.folder, prefix, recursive=recursive))
        wanted: list[ObjectInfo] = []
        made: set[Path] = set()
        for key, info in found.items():
            path = self.folder / key
            if is_lock(key) or (key in local and holds(path, local[key], info)):
                continue
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            if TEMPORARY_PREFIX in key:  # of other commands, which remove it at any time
                if key not in local:
                    make_placeholder(path, info)
            elif is_eager(key):
                wanted.append(info)
            else:
                make_placeholder(path, info)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for _ in pool.map(self._fetch, wanted):
                pass
        for key in sorted(local.keys() - found.keys(), key=lambda key: journal_owner(key) is not None):
            owner = journal_owner(key)
            is_kept = owner is not None and (self.folder / owner / "recipe.json").is_file()
            if TEMPORARY_PREFIX not in key and not is_kept:
                (self.folder / key).unlink(missing_ok=True)

    def _fetch(self, info: ObjectInfo) -> None:
        path = self.folder / info.key
        self.objects.fetch(info.key, path)
        set_stamp(path, info, is_content=True)

    def open(self, path: Path) -> int | None:
        if not self.is_away(path):
            return None
        if not path.name.endswith(".tar"):
            self._provide(path)
            return None
        # Without a name, the copy vanishes with its last user, even if that is killed.
        nameless = temporary_path(path)
        with no_damage():
            self.objects.fetch(self._info(path).key, nameless)
        try:
            return os.open(nameless, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            nameless.unlink()

    @no_damage()
    def _provide(self, path: Path) -> None:
        info = self._info(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fetch(info)

    def drop_content(self) -> None:
        self.require_listed()
        for key in self._found or ():
            if not is_lock(key):
                (self.folder / key).unlink(missing_ok=True)
        self.sync()

    @contextmanager
    def local_copy(self, path: Path) -> Iterator[None]:
        if not self.is_away(path):
            yield
            return
        self._provide(path)
        try:
            yield
        finally:
            if path.name.endswith(".tar"):
                make_placeholder(path, self._info(path))

    @no_damage()
    def state(self, path: Path) -> tuple[int, int]:
        info = self._info(path)
        return info.size_bytes, int(info.modified_s * 1e9)

    @no_damage()
    def read_range(self, path: Path, offset: int, size: int) -> bytes:
        return self.objects.read_range(self.key_of(path), offset, size)

    def is_away(self, path: Path) -> bool:
        if TEMPORARY_PREFIX in self.key_of(path):
            return False
        try:
            state = path.stat()
        except FileNotFoundError:
            return self._found is None or self.key_of(path) in self._found
        return not is_eager(self.key_of(path)) and state.st_mtime_ns % 2 == 1

    def _info(self, path: Path) -> ObjectInfo:
        key = self.key_of(path)
        if self._found is None:
            return self.objects.info(key)
        if key not in self._found:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.objects.address_of(key))
        return self._found[key]

    # Writing

    def upload(self, temporary: Path, path: Path) -> None:
        key = self.key_of(path)
        if TEMPORARY_PREFIX in key:
            return
        size_bytes = temporary.stat().st_size
        if is_eager(key) and size_bytes <= PART_BYTES:
            seen: ObjectInfo | None = None
            with suppress(FileNotFoundError):
                seen = self._info(path)
            content = temporary.read_bytes()
            etag = self.objects.replace(key, content, seen=seen, old=path, guard=self.require_locks)
        else:
            etag = self.objects.write(key, temporary, guard=self.require_locks)
        info = ObjectInfo(key, size_bytes, etag, time.time())
        if self._found is not None:
            self._found[key] = info
        if key.endswith(".tar"):
            make_placeholder(temporary, info)
        else:
            set_stamp(temporary, info, is_content=True)

    def move(self, source: Path, target: Path) -> None:
        paths = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        for path in paths:
            key, to = self.key_of(path), target / path.relative_to(source) if path != source else target
            if TEMPORARY_PREFIX in key or TEMPORARY_PREFIX in self.key_of(to):
                self.upload(path, to)
                continue
            self.objects.copy(key, self.key_of(to), guard=self.require_locks)
            info = self.objects.info(self.key_of(to))
            if self._found is not None:
                self._found[info.key] = info
            set_stamp(path, info, is_content=not self.is_away(path))
        if TEMPORARY_PREFIX not in self.key_of(source):
            self.remove(source)

    def remove(self, *paths: Path) -> None:
        keys = [self.key_of(path) for path in paths]
        if self._found is not None:
            folders = tuple(f"{key}/" for key, path in zip(keys, paths, strict=True) if path.is_dir())
            inside = [known for known in self._found if known.startswith(folders)] if folders else []
            keys = [*(key for key in keys if key in self._found), *inside]
        if keys:
            self.objects.delete(*keys, guard=self.require_locks)
            for known in keys:
                (self._found or {}).pop(known, None)

    def touch(self, path: Path) -> None:
        info = self._info(path)
        with self.local_copy(path):
            etag = self.objects.write(info.key, path.read_bytes(), replaces=info.etag, guard=self.require_locks)
            newer = ObjectInfo(info.key, info.size_bytes, etag, time.time())
            if self._found is not None:
                self._found[info.key] = newer
            set_stamp(path, newer, is_content=True)

    # Locks

    @contextmanager
    def column_lock(self, name: str, *, unless: re.Pattern[str] | None = None) -> Iterator[None]:
        self.require_listed()
        before = (self._found or {}).get(name)
        lease = Lease(self.objects, name, what=self.address)
        lease.acquire()
        with self.leases.held(lease):
            if lease.replaced != before:  # another command has written since the listing
                self.sync()
            if unless is not None:
                self._exclude(unless)
            yield

    def _exclude(self, locks: re.Pattern[str]) -> None:
        """Raise LeaseHeld if other commands hold some locks; synchronise if they have since the listing."""
        if held := held_leases(self.objects, locks):
            key, record = min(held.items())
            holder = f"{record.get('holder')} since {record.get('since')}, with {key}"
            raise LeaseHeld(f"another command is writing to {self.address} ({holder})", hint="wait until it finishes")
        now = {info.key: info for info in self.objects.list(recursive=False) if locks.fullmatch(info.key)}
        if now != {key: info for key, info in (self._found or {}).items() if locks.fullmatch(key)}:
            self.sync()

    def lock_names(self) -> list[str]:
        return [key for key in self._found or () if is_lock(key) and "/" not in key]

    def holder_of(self, name: str) -> str | None:
        info = (self._found or {}).get(name)
        return None if info is None else holder_of(self.objects, info)

    @contextmanager
    def folder_lock(self) -> Iterator[None]:
        lease = Lease(self.objects, _ROOT_LOCK, what=self.address)
        lease.wait()
        with self.leases.held(lease):
            self._refresh("", recursive=False)
            yield

    @property
    def access(self) -> tuple[str, ...]:
        leases = (text for fence in self.leases.fences for text in fence)
        return (self.address, os.fspath(self.folder), run_of(self.folder), *leases)

    def publish_token(self, path: Path) -> None:
        key = self.key_of(path)
        self.objects.write(key, path.read_bytes(), guard=self.require_locks)
        if self._found is not None:
            self._found[key] = self.objects.info(key)

    def require_locks(self) -> None:
        self.leases.require()

    def key_of(self, path: Path) -> str:
        """Return the key of the object of a file in the folder."""
        return os.fspath(path)[len(os.fspath(self.folder)) + 1 :]
