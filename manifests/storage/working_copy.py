"""Mirror a data folder or a run in a bucket as a local folder, so that all other code works with paths.

The bucket is authoritative. The local folder is a cache that can be deleted without loss. It contains the small files
(records, tables, layouts, commits), and a placeholder for each other file: a sparse file of the same size. All local
folders are in `$TMPDIR/data-clipmill-<uid>/`:

    <16 hex digits, hash of the URL>/
        <host>-<n>/           the mirror of one command; n distinguishes concurrent commands on a host
        <host>-<n>.lock       random ID of the command; this file is locked while the command uses the folder

Reading: a command lists the bucket once, and fetches the objects that have changed. The modification time of a local
file identifies the version of the object: the nanoseconds are a hash of the etag, and the last bit is set for a
placeholder. If a command was killed while it was writing a file, the nanoseconds do not match, and the next command
fetches the file again. If the content of a file is only in the bucket, the file is fetched when it is opened. Local
copies of tars and of parts of checkpoints are not kept after use.

Writing: an object is written before its local file appears. Commits are written last, after tars and indexes, so a
killed command never leaves a commit without its files. Locks are leases (`leases.py`), which are checked before each
attempt to change objects. A record is replaced only if it is still the version that this command has seen. A delayed
second write of any other file is harmless, because the names of tars and indexes depend on their plan, and merged
tables record their commits.

`mounting.py` opens and mounts these folders.
"""

import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import TEMPORARY_PREFIX, temporary_path
from clipmill.manifests.storage.leases import HeldLeases, Lease, LeaseHeld, held_leases, holder_of
from clipmill.manifests.storage.objects import PART_BYTES, ObjectInfo, Objects, open_objects
from clipmill.manifests.storage.stores import raise_inaccessible

_LAZY_SUFFIXES = (".tar", ".tar.idx", ".index.arrow", "/chunks.arrow")  # files that are fetched when they are opened
_EAGER_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".arrow")  # files that are always fetched
_LARGE_SUFFIXES = (".tar", ".bin")  # shards and parts of checkpoints, whose content is not kept on the local disk
_JOURNAL = re.compile(r"(.+)/answers/[^/]+")
_SECOND_NS = 1_000_000_000
_MAX_NAME_BYTES = 255 - len(temporary_path(Path()).name)  # limit of file systems minus the prefix of temporary names


def is_eager(key: str) -> bool:
    """Return True for a file in a data folder that is always fetched because it is small."""
    if key.endswith(_LAZY_SUFFIXES):
        return False
    return key.endswith(_EAGER_SUFFIXES) or key.rpartition("/")[2].startswith(".")


def is_lock(key: str) -> bool:
    """Return True for a lease, which has no local file."""
    return key.endswith(".lock")


def journal_owner(key: str) -> str | None:
    """Return the folder that a journal belongs to, or None for any other file.

    A journal of answers from a model grows line by line. Objects cannot grow, so a journal is stored only on the
    machine that writes it.
    """
    match = _JOURNAL.fullmatch(key)
    return match[1] if match else None


def is_format_name(key: str) -> bool:
    """Return True if a key has a suffix of the data format."""
    return is_eager(key) or key.endswith(_LAZY_SUFFIXES)


def partition_objects(objects: Iterable[ObjectInfo]) -> tuple[dict[str, ObjectInfo], set[str]]:
    """Separate objects that have a local file from objects that cannot have one.

    Folder markers, which consoles and FUSE tools create, are ignored. An empty object is a folder marker if its
    name is also the name of a folder, or lacks a suffix of the data format.

    Returns:
        The metadata of objects that have a local file, by key, and the keys of objects that cannot have one.
    """
    infos = {info.key: info for info in objects}
    folders = {parent for key in infos for parent in parents_of(key)}
    # If an object and a folder have the same name, the object has a local file only if it belongs to the data format.
    files = {key for key in folders & infos.keys() if infos[key].size_bytes and is_format_name(key)}
    mirrored_infos, foreign_keys = {}, set()
    for key, info in infos.items():
        if not info.size_bytes and (key in folders or not is_format_name(key)):
            continue
        is_hidden = (key in folders and key not in files) or (files and not files.isdisjoint(parents_of(key)))
        if is_hidden or max(map(len, key.encode().split(b"/"))) > _MAX_NAME_BYTES:
            foreign_keys.add(key)
        else:
            mirrored_infos[key] = info
    return mirrored_infos, foreign_keys


def parents_of(key: str) -> Iterator[str]:
    """Yield the folders that contain an object, with the innermost folder first."""
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key


def is_below(key: str, prefix: str, *, recursive: bool) -> bool:
    """Return True if an object is in the folder `prefix`, or, if `recursive` is True, in one of its subfolders."""
    if prefix and not key.startswith(f"{prefix}/"):
        return False
    return recursive or "/" not in key[len(prefix) + bool(prefix) :]


def local_files(folder: Path, prefix: str, *, recursive: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the key and the `stat` result of each local file in the folder `prefix`."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / prefix) as entries:
        for entry in entries:
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir(follow_symlinks=False):
                if recursive:
                    yield from local_files(folder, key, recursive=True)
            else:
                yield key, entry.stat(follow_symlinks=False)


def is_current(
    path: Path, state: os.stat_result, info: ObjectInfo, *, is_small: Callable[[str], bool] = is_eager
) -> bool:
    """Return True if a local file represents the current version of an object.

    The local file of a small object must have the content; for other objects, a placeholder suffices. If the seconds of
    the file's modification time differ from the time of the object, they are corrected.
    """
    is_content = not state.st_mtime_ns % 2
    stamp = _stamp(info.key, info.etag, is_content=is_content)
    if state.st_size != info.size_bytes or state.st_mtime_ns % _SECOND_NS != stamp:
        return False
    if not is_content and is_small(info.key):
        return False
    if state.st_mtime_ns // _SECOND_NS != int(info.modified_s):  # an upload sets the seconds from the local clock
        set_stamp(path, info, is_content=is_content)
    return True


def set_stamp(path: Path, info: ObjectInfo, *, is_content: bool) -> None:
    """Set the modification time of a local file, so that it identifies the version of the object."""
    time_ns = int(info.modified_s) * _SECOND_NS + _stamp(info.key, info.etag, is_content=is_content)
    os.utime(path, ns=(time_ns, time_ns))


def _stamp(key: str, etag: str, *, is_content: bool) -> int:
    """Return the nanoseconds of a local file's modification time. They identify the version of the object.

    The last bit is set for a placeholder. Records get larger values than shards, so that a commit is never older
    than shards that were written in the same second.
    """
    digest = int.from_bytes(hashlib.blake2b(etag.encode(), digest_size=8).digest(), "big") % ((_SECOND_NS // 2) // 2)
    return digest * 2 + (not is_content) + ((_SECOND_NS // 2) if is_eager(key) else 0)


def make_placeholder(path: Path, info: ObjectInfo) -> None:
    """Replace `path` with a sparse file that has the size of an object, but not its content."""
    temporary = temporary_path(path)
    with temporary.open("wb") as file:
        file.truncate(info.size_bytes)
    set_stamp(temporary, info, is_content=False)
    temporary.replace(path)


def read_command_id(folder: Path) -> str:
    """Return the random ID of the command that uses a local folder, or "" if there is none."""
    try:
        return (folder.parent / f"{folder.name}.lock").read_text()
    except OSError:
        return ""


_ROOT_LOCK = ".folder.lock"
_NUM_THREADS = 32


class WorkingCopy:
    """Mirror of a folder in a bucket; see `Mirror` for its methods. Thread-safe.

    Args:
        url: URL of the folder in the bucket.
        folder: Existing local folder that only this command and its workers use.
        is_small: Function that takes the key of a file, and returns True if the file is always fetched.
    """

    def __init__(self, url: str, folder: Path, *, is_small: Callable[[str], bool] = is_eager) -> None:
        self.url, self.folder, self._is_small = url, folder, is_small
        self.objects: Objects = open_objects(url)
        self._listing: dict[str, ObjectInfo] | None = None  # last listing, by key; None in a worker
        self._foreign_keys: set[str] = set()  # keys of objects that cannot have a local file
        self.leases = HeldLeases(self.objects)
        self._growing_lock = threading.Lock()
        self._uploaded_states: dict[Path, tuple[int, int]] = {}  # size and time of each growing file at its last upload

    # Reading

    def sync(self) -> None:
        """Update all local files to match the bucket.

        Raises:
            UserError: The bucket does not exist, or the credentials are rejected.
            OSError: The bucket cannot be read.
        """
        self._refresh("")

    def forget(self) -> None:
        """Discard the listing, so that `ensure_listed` lists the bucket again."""
        self._listing = None

    def ensure_listed(self) -> None:
        """List the bucket if this command has not listed it yet."""
        if self._listing is None:
            self.sync()

    @property
    def is_empty(self) -> bool:
        """True if there are no objects, or only hidden objects such as released locks."""
        self.ensure_listed()
        return not any(not key.startswith(".") for key in self._listing or ())

    def foreign_keys(self) -> list[str]:
        """Return the keys of all objects that cannot have a local file."""
        self.ensure_listed()
        return sorted(self._foreign_keys | self.objects.odd_names)

    def refresh(self, folder: Path) -> None:
        self._refresh(self.key_of(folder))

    def _refresh(self, prefix: str, *, recursive: bool = True) -> None:
        for is_last in (False, False, True):
            infos, foreign_keys = partition_objects(self.objects.list(prefix, recursive=recursive))
            self._foreign_keys |= foreign_keys
            try:
                self._mirror(infos, prefix, recursive=recursive)
            except FileNotFoundError:  # an object was removed after the listing
                if is_last:
                    raise
            else:
                break
        if self._listing is None:
            self._listing = infos if not prefix and recursive else None
        else:
            others = {
                key: info for key, info in self._listing.items() if not is_below(key, prefix, recursive=recursive)
            }
            self._listing = others | infos

    def _mirror(self, infos: dict[str, ObjectInfo], prefix: str, *, recursive: bool) -> None:
        """Update the local files in the folder `prefix` to match the listed objects."""
        states = dict(local_files(self.folder, prefix, recursive=recursive))
        fetch_queue: list[ObjectInfo] = []
        folders: set[Path] = set()
        for key, info in infos.items():
            path = self.folder / key
            if is_lock(key) or (key in states and is_current(path, states[key], info, is_small=self._is_small)):
                continue
            if path.parent not in folders:
                path.parent.mkdir(parents=True, exist_ok=True)
                folders.add(path.parent)
            if TEMPORARY_PREFIX in key:  # not fetched, because another command may remove it at any time
                if key not in states:
                    make_placeholder(path, info)
            elif self._is_small(key):
                fetch_queue.append(info)
            else:
                make_placeholder(path, info)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for _ in pool.map(self._fetch, fetch_queue):
                pass
        # Journals come last, because a journal is removed only if the recipe of its folder has been removed.
        for key in sorted(states.keys() - infos.keys(), key=lambda key: journal_owner(key) is not None):
            owner = journal_owner(key)
            is_kept = owner is not None and (self.folder / owner / "recipe.json").is_file()
            if TEMPORARY_PREFIX not in key and not is_kept:
                (self.folder / key).unlink(missing_ok=True)

    def _fetch(self, info: ObjectInfo) -> None:
        path = self.folder / info.key
        self.objects.fetch(info.key, path)
        set_stamp(path, info, is_content=True)

    def open(self, path: Path) -> int | None:
        if not self.is_only_in_bucket(path):
            return None
        if not path.name.endswith(_LARGE_SUFFIXES):
            self._provide(path)
            return None
        # The copy is unlinked, so that it disappears when its descriptor is closed, even if the process is killed.
        temporary = temporary_path(path)
        with raise_inaccessible():
            self.objects.fetch(self._info(path).key, temporary)
        try:
            return os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            temporary.unlink()

    @raise_inaccessible()
    def _provide(self, path: Path) -> None:
        info = self._info(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fetch(info)

    def drop_content(self) -> None:
        self.ensure_listed()
        for key in self._listing or ():
            if not is_lock(key):
                (self.folder / key).unlink(missing_ok=True)
        self.sync()

    @contextmanager
    def local_copy(self, path: Path) -> Iterator[None]:
        if not self.is_only_in_bucket(path):
            yield
            return
        self._provide(path)
        try:
            yield
        finally:
            if path.name.endswith(_LARGE_SUFFIXES):
                make_placeholder(path, self._info(path))

    @raise_inaccessible()
    def state(self, path: Path) -> tuple[int, int]:
        info = self._info(path)
        return info.size_bytes, int(info.modified_s * 1e9)

    @raise_inaccessible()
    def read_range(self, path: Path, offset: int, size: int) -> bytes:
        return self.objects.read_range(self.key_of(path), offset, size)

    def is_only_in_bucket(self, path: Path) -> bool:
        if TEMPORARY_PREFIX in self.key_of(path):
            return False
        try:
            state = path.stat()
        except FileNotFoundError:
            return self._listing is None or self.key_of(path) in self._listing
        return not self._is_small(self.key_of(path)) and state.st_mtime_ns % 2 == 1

    def _info(self, path: Path) -> ObjectInfo:
        key = self.key_of(path)
        if self._listing is None:
            return self.objects.info(key)
        if key not in self._listing:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.objects.url_of(key))
        return self._listing[key]

    # Writing

    def upload(self, temporary: Path, path: Path) -> None:
        key = self.key_of(path)
        if TEMPORARY_PREFIX in key:
            return
        size_bytes = temporary.stat().st_size
        if self._is_small(key) and size_bytes <= PART_BYTES:
            seen: ObjectInfo | None = None
            with suppress(FileNotFoundError):
                seen = self._info(path)
            content = temporary.read_bytes()
            etag = self.objects.replace(key, content, seen=seen, old=path, guard=self.require_locks)
        else:
            etag = self.objects.write(key, temporary, guard=self.require_locks)
        info = ObjectInfo(key, size_bytes, etag, time.time())
        if self._listing is not None:
            self._listing[key] = info
        if key.endswith(_LARGE_SUFFIXES):
            make_placeholder(temporary, info)
        else:
            set_stamp(temporary, info, is_content=True)

    def upload_growing(self, path: Path) -> None:
        with self._growing_lock, suppress(FileNotFoundError):
            state = path.stat()
            if self._uploaded_states.get(path) == (state.st_size, state.st_mtime_ns):
                return
            key, content, seen = self.key_of(path), path.read_bytes(), None
            with suppress(FileNotFoundError):
                seen = self.objects.info(key)
            replaces = None if seen is None else seen.etag
            etag = self.objects.write(key, content, only_new=seen is None, replaces=replaces, guard=self.require_locks)
            if self._listing is not None:
                self._listing[key] = ObjectInfo(key, len(content), etag, time.time())
            self._uploaded_states[path] = state.st_size, state.st_mtime_ns

    def move(self, source: Path, target: Path) -> None:
        paths = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        for path in paths:
            key, new_path = self.key_of(path), target / path.relative_to(source) if path != source else target
            new_key = self.key_of(new_path)
            if TEMPORARY_PREFIX in key or TEMPORARY_PREFIX in new_key:
                self.upload(path, new_path)
                continue
            self.objects.copy(key, new_key, guard=self.require_locks)
            info = self.objects.info(new_key)
            if self._listing is not None:
                self._listing[info.key] = info
            set_stamp(path, info, is_content=not self.is_only_in_bucket(path))
        if TEMPORARY_PREFIX not in self.key_of(source):
            self.remove(source)

    def remove(self, *paths: Path) -> None:
        keys = [self.key_of(path) for path in paths]
        if self._listing is not None:
            folders = tuple(f"{key}/" for key, path in zip(keys, paths, strict=True) if path.is_dir())
            members = [key for key in self._listing if key.startswith(folders)] if folders else []
            keys = [*(key for key in keys if key in self._listing), *members]
        if keys:
            self.objects.delete(*keys, guard=self.require_locks)
            for key in keys:
                (self._listing or {}).pop(key, None)

    def touch(self, path: Path) -> None:
        info = self._info(path)
        with self.local_copy(path):
            etag = self.objects.write(info.key, path.read_bytes(), replaces=info.etag, guard=self.require_locks)
            new_info = ObjectInfo(info.key, info.size_bytes, etag, time.time())
            if self._listing is not None:
                self._listing[info.key] = new_info
            set_stamp(path, new_info, is_content=True)

    def abort_uploads(self, folder: Path) -> None:
        prefix = f"{self.key_of(folder)}/"
        with suppress(UserError, OSError):  # missing permission, or a server without support for listing uploads
            for upload in self.objects.open_uploads():
                if upload.key.startswith(prefix):
                    self.require_locks()
                    self.objects.abort(upload)

    # Locks

    @contextmanager
    def column_lock(
        self,
        name: str,
        *,
        conflicting_locks: re.Pattern[str] | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> Iterator[None]:
        self.ensure_listed()
        listed_lock = (self._listing or {}).get(name)
        lease = Lease(self.objects, name, resource=self.url)
        if on_wait is None:
            lease.acquire()
        else:
            lease.take_over(on_wait=on_wait)
        with self.leases.hold(lease):
            if lease.replaced_object != listed_lock:  # another command held the lock after the listing
                self.sync()
            if conflicting_locks is not None:
                if held := held_leases(self.objects, conflicting_locks):
                    key, record = min(held.items())
                    holder = f"{record.get('holder')} since {record.get('since')}, lock {key}"
                    raise LeaseHeld(
                        f"another command is writing to {self.url} ({holder})", hint="wait until it finishes"
                    )
                locks = {
                    info.key: info
                    for info in self.objects.list(recursive=False)
                    if conflicting_locks.fullmatch(info.key)
                }
                if locks != {
                    key: info for key, info in (self._listing or {}).items() if conflicting_locks.fullmatch(key)
                }:
                    self.sync()
            yield

    def lock_names(self) -> list[str]:
        return [key for key in self._listing or () if is_lock(key) and "/" not in key]

    def holder_of(self, name: str) -> str | None:
        info = (self._listing or {}).get(name)
        return None if info is None else holder_of(self.objects, info)

    @contextmanager
    def folder_lock(self) -> Iterator[None]:
        lease = Lease(self.objects, _ROOT_LOCK, resource=self.url)
        lease.wait()
        with self.leases.hold(lease):
            self._refresh("", recursive=False)
            yield

    @property
    def access(self) -> tuple[str, ...]:
        leases = (text for fence in self.leases.fences for text in fence)
        return (self.url, os.fspath(self.folder), read_command_id(self.folder), *leases)

    def join(self, access: tuple[str, ...]) -> None:
        _, _, _, *leases = access
        for key, token in zip(leases[::2], leases[1::2], strict=True):
            self.leases.fence(key, token)
        self.require_locks()

    def publish_token(self, path: Path) -> None:
        key = self.key_of(path)
        self.objects.write(key, path.read_bytes(), guard=self.require_locks)
        if self._listing is not None:
            self._listing[key] = self.objects.info(key)

    def require_locks(self) -> None:
        self.leases.require()

    def key_of(self, path: Path) -> str:
        """Return the key of the object for a file in the local folder."""
        return os.fspath(path)[len(os.fspath(self.folder)) + 1 :]
