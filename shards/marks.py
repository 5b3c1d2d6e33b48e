"""Reader marks: files in a data folder that list the variants in use, so that `prep gc` keeps these variants.

    .readers/<16 hex>.lock    mark of a reader: the process or run, the time at which it started, and its variants
    .readers/.lock            lock, held by readers that write a mark (shared) and by `prep gc` (exclusive)

A training process calls `enable_marks` for a data folder. It then leaves a mark for each variant that it opens
(`leave_mark`), renews the mark every `RENEWAL_S` seconds, and removes it when the variant is no longer in use. If the
process dies, its mark expires: immediately for commands on the same machine, and `EXPIRY_S` seconds after the last
renewal for commands on other machines. The age of a mark is the difference between two timestamps from the storage
(file system or bucket), so it does not depend on the clocks of the machines.

An unfinished run has a mark that does not depend on a process (`mark_run`). This mark expires when the run finishes, or
when the folder of the run is removed. On a machine that cannot access this folder, the mark expires `RUN_EXPIRY_S`
seconds after the run was last started.

If a mark cannot be written, the process prints a note and reads without a mark. If a mark cannot be read, its reader
may be using any variant, so all variants are kept until the mark is `RUN_EXPIRY_S` seconds old.
"""

import atexit
import hashlib
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import is_abandoned, lock, process_record
from clipmill.manifests.publish import publish_atomically
from clipmill.manifests.storage.mirrors import is_remote, mirror_of, show_urls

if TYPE_CHECKING:
    from clipmill.manifests.storage.leases import HeldLeases
    from clipmill.manifests.storage.objects import Objects

READERS_FOLDER = ".readers"
TOKEN_FACT = "mark"  # key of a random token in run.json; the mark of the run contains the same token
RENEWAL_S, EXPIRY_S, RUN_EXPIRY_S = 300.0, 1800.0, 30 * 86_400.0
_LOCK = ".lock"
_MARK = re.compile(r"[0-9a-f]{16}\.lock")


class LocalMarks:
    """Marks in a local data folder. Every user with write access to the data folder can write marks."""

    def __init__(self, data_dir: Path) -> None:
        self.location = os.fspath(data_dir)
        self._data_dir, self._folder = data_dir, data_dir / READERS_FOLDER

    def write(self, name: str, content: bytes) -> None:
        """Write a mark.

        Args:
            name: File name of the mark.
        """
        with publish_atomically(self._folder / name) as path:
            path.write_bytes(content)
            path.chmod(0o644)  # regardless of the umask, so that another user's `prep gc` can read it

    def renew(self, name: str, content: bytes) -> None:
        """Set the modification time of a mark to the current time; write the mark again if it was removed."""
        try:
            os.utime(self._folder / name)  # without a time, so that a file server uses its own clock
        except FileNotFoundError:
            self.write(name, content)

    def remove(self, name: str) -> None:
        """Remove a mark if it exists."""
        (self._folder / name).unlink(missing_ok=True)

    def read(self) -> list[tuple[str, bytes, float]]:
        """Read all marks.

        Returns:
            File name, content and modification time of each mark. The content is empty if this user may not read it.
            The time is in seconds since the epoch, from the clock of the storage.
        """
        marks = []
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):  # the mark was removed in the meantime
                if _MARK.fullmatch(path.name):
                    modified_s = path.stat().st_mtime
                    try:
                        marks.append((path.name, path.read_bytes(), modified_s))
                    except (PermissionError, IsADirectoryError):
                        marks.append((path.name, b"", modified_s))
        return marks

    def now_s(self) -> float:
        """Return the current time by the clock of the storage, in seconds since the epoch."""
        os.utime(self._folder / _LOCK)
        return (self._folder / _LOCK).stat().st_mtime

    @contextmanager
    def hold(self, *, is_shared: bool, on_wait: Callable[[], object]) -> Iterator[None]:
        """Lock the marks, so that no reader writes a mark while `prep gc` removes variants.

        Args:
            is_shared: True for readers, False for `prep gc`.
            on_wait: Function that is called if another process holds the lock.
        """
        with suppress(FileExistsError):
            self._folder.mkdir()
            self._folder.chmod(self._data_dir.stat().st_mode & 0o7777)
        # NFS grants an exclusive lock only on a file that is open for writing.
        path, flags = self._folder / _LOCK, os.O_RDONLY if is_shared else os.O_RDWR
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:  # O_CREAT was omitted: it fails for files of other users in folders like /tmp
            descriptor = os.open(path, flags | os.O_CREAT, 0o666)
            with suppress(PermissionError):  # another user created the file in the meantime
                os.fchmod(descriptor, self._folder.stat().st_mode & 0o666)
        try:
            if not lock(descriptor, is_shared=is_shared, waits=False):
                on_wait()
                lock(descriptor, is_shared=is_shared)
            yield
        finally:
            os.close(descriptor)


class BucketMarks:
    """Marks of a data folder in a bucket, with the interface of `LocalMarks`.

    Args:
        objects: Objects in the data folder.
        leases: Leases that the command holds. The command aborts if it loses one of them.
    """

    def __init__(self, objects: "Objects", leases: "HeldLeases | None" = None) -> None:
        self.location = objects.url
        self._objects, self._leases = objects, leases

    def write(self, name: str, content: bytes) -> None:
        self._objects.write(f"{READERS_FOLDER}/{name}", content)

    renew = write

    def remove(self, name: str) -> None:
        self._objects.delete(f"{READERS_FOLDER}/{name}")

    def read(self) -> list[tuple[str, bytes, float]]:
        marks = []
        for info in self._objects.list(READERS_FOLDER):
            name = info.key.rpartition("/")[2]
            with suppress(FileNotFoundError):  # the mark was removed in the meantime
                if _MARK.fullmatch(name):
                    marks.append((name, self._objects.read(info.key), info.modified_s))
        return marks

    def now_s(self) -> float:
        from clipmill.manifests.storage.leases import server_time_s

        return server_time_s(self._objects)

    @contextmanager
    def hold(self, *, is_shared: bool, on_wait: Callable[[], object]) -> Iterator[None]:
        from clipmill.manifests.storage.leases import HeldLeases, Lease

        if not self._objects.is_writable:
            raise PermissionError("data on a web server are read-only")
        lease = Lease(self._objects, f"{READERS_FOLDER}/{_LOCK}", resource=self.location)
        lease.wait(on_wait=lambda _: on_wait())
        with (self._leases or HeldLeases(self._objects)).hold(lease):
            yield


Marks = LocalMarks | BucketMarks


def _marks_of(data_dir: Path) -> Marks:
    """Return the marks of a data folder, for a `prep` command that has opened the folder."""
    if (mirror := mirror_of(data_dir)) is None:
        return LocalMarks(data_dir)
    from clipmill.manifests.storage.working_copy import WorkingCopy

    assert isinstance(mirror, WorkingCopy)
    return BucketMarks(mirror.objects, mirror.leases)


class _User:
    """A user of a mark. The mark is needed as long as this object exists."""


class _Mark:
    """A mark that this process has left, and its users."""

    def __init__(self, marks: Marks, record: Mapping[str, Any], *, name: str = "") -> None:
        self.marks, self.name = marks, f"{name or secrets.token_hex(8)}.lock"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self.content = json.dumps({**process_record(), "since": since, **record}, indent=1).encode()
        self.users: WeakSet[_User] = WeakSet()

    def remove(self) -> None:
        with suppress(OSError, UserError):  # if the mark cannot be removed, it expires
            self.marks.remove(self.name)


_folders: dict[Path, Marks | None] = {}  # marks by data folder, if enabled; None if they cannot be written
_marks: dict[Path, _Mark] = {}  # marks of this process, by folder of the variant
_block_marks: list[list[_Mark]] = []  # marks that each active `keep_marks` block keeps, outermost block first
_lock = threading.Lock()
_renewal: threading.Thread | None = None


def enable_marks(data_dir: Path, objects: "Objects | None" = None) -> None:
    """Enable marks for the variants that this process opens in a data folder.

    Marks stay enabled until the outermost `keep_marks` block ends. Only the first process on each node leaves marks.

    Args:
        data_dir: Data folder, or a local copy of the small files in a remote data folder.
        objects: Objects of the remote data folder; None for a local data folder.
    """
    is_first_of_node = (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"
    if is_first_of_node and (folder := data_dir.resolve()) not in _folders:
        _folders[folder] = LocalMarks(data_dir) if objects is None else BucketMarks(objects)


def leave_mark(directory: Path) -> object | None:
    """Leave a mark for a variant if `enable_marks` was called for its data folder.

    Args:
        directory: Folder of the variant.

    Returns:
        Object that the caller must keep while the variant is in use; None if no mark was left.
    """
    global _renewal
    if not _folders or (marks := _folders.get(directory.parent.parent.resolve())) is None:
        return None
    with _lock:
        mark = _marks.get(directory)
        if mark is None:
            mark = _Mark(marks, {"variants": {directory.parent.name: directory.name}})
            if not _write_mark(mark):
                return None
            _marks[directory] = mark
        user = _User()
        mark.users.add(user)
        if _block_marks:
            _block_marks[-1].append(mark)
        if _renewal is None:
            _renewal = threading.Thread(target=_renew_forever, name="reader marks", daemon=True)
            _renewal.start()
        return user


def _write_mark(mark: _Mark) -> bool:
    """Write a mark, and return True. If the mark cannot be written, print a note and return False."""
    marks = mark.marks
    message = f"waiting for prep gc, which is removing variants in {marks.location}\n"
    try:
        with marks.hold(is_shared=True, on_wait=lambda: sys.stderr.write(message)):
            marks.write(mark.name, mark.content)
    except (OSError, UserError) as error:
        _folders.update({folder: None for folder, folder_marks in _folders.items() if folder_marks is marks})
        reason = getattr(error, "strerror", None) or error
        if (os.environ.get("RANK") or "0") == "0":
            sys.stderr.write(
                f"note: reader marks cannot be written to {marks.location} ({reason}), so prep gc does not see this "
                "reader; use prep gc --keep VARIANT to keep its variant\n"
            )
        return False
    return True


@contextmanager
def keep_marks() -> Iterator[None]:
    """Keep the marks of all variants that are opened in the block until the block ends."""
    _block_marks.append([])
    try:
        yield
    finally:
        _block_marks.pop()
        if not _block_marks:
            _folders.clear()
        remove_unused_marks()


def remove_unused_marks(*, renews: bool = False) -> None:
    """Remove the marks of variants that are no longer in use.

    Args:
        renews: True to renew the other marks.
    """
    with _lock:
        needed_marks = {mark for block in _block_marks for mark in block}
        unused_directories = [
            directory for directory, mark in _marks.items() if not (mark.users or mark in needed_marks)
        ]
        marks_to_remove, marks_to_renew = (
            [_marks.pop(directory) for directory in unused_directories],
            [*_marks.values()] if renews else [],
        )
    # Release the lock first: a bucket may not respond for minutes, but training must continue.
    for mark in marks_to_renew:
        with suppress(OSError, UserError):  # the next renewal tries again
            mark.marks.renew(mark.name, mark.content)
        with _lock:
            marks_to_remove += [mark] if mark not in _marks.values() else []  # the mark became unused in the meantime
    for mark in marks_to_remove:
        mark.remove()


def _renew_forever() -> None:
    while True:
        time.sleep(RENEWAL_S)
        remove_unused_marks(renews=True)


@atexit.register
def _remove_marks() -> None:
    for mark in list(_marks.values()):  # a copy, because the renewal thread may remove marks meanwhile
        mark.remove()


def _forget_marks() -> None:
    """Forget the marks of the parent process after a fork, so that the child process does not remove them."""
    global _lock, _renewal
    _marks.clear()
    _block_marks.clear()
    _lock, _renewal = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_marks)


@contextmanager
def mark_run(facts: Path, token: str, variants: Mapping[Path, Mapping[str, str]]) -> Iterator[None]:
    """Mark the variants of a run. The marks are removed only if the block ends without an error.

    Args:
        facts: Path of run.json in the folder of the run.
        token: Value of the key `TOKEN_FACT` in run.json.
        variants: Names of the variants by data folder and column.
    """
    run = show_urls(os.fspath(facts.resolve()))  # the URL, if the run is in a bucket
    name = hashlib.sha256(f"{token} {run}".encode()).hexdigest()[:16]
    record = {"run": run, "token": token}
    marks = [
        _Mark(folder_marks, {**record, "variants": dict(names)}, name=name)
        for data_dir, names in variants.items()
        if (folder_marks := _folders.get(data_dir.resolve())) is not None
    ]
    written_marks = [mark for mark in marks if _write_mark(mark)]
    yield
    for mark in written_marks:
        mark.remove()


@dataclass(frozen=True)
class Reader:
    """A process that is reading variants, or an unfinished run.

    Attributes:
        name: Path of the mark relative to the data folder.
        text: Description of the reader, with the time at which it started.
        variants: Names of the variants by column; None if the mark cannot be read, so any variant may be in use.
        is_run: True for a run, False for a process.
    """

    name: str
    text: str
    variants: Mapping[str, str] | None
    is_run: bool = False


@dataclass(frozen=True)
class Readers:
    """The readers of a data folder, according to its marks.

    Attributes:
        active: Readers that may still be reading. If the folder is not writable, the ages of marks are unknown, so no
            mark expires by its age.
        ended: Readers that ended without removing their marks.
        now_s: Current time by the clock of the storage, in seconds since the epoch; 0 if it is unknown.
    """

    active: tuple[Reader, ...]
    ended: tuple[Reader, ...]
    now_s: float

    def find(self, column: str, variant: str) -> list[Reader]:
        """Return the readers that may still be reading a variant."""
        return [reader for reader in self.active if reader.variants is None or reader.variants.get(column) == variant]


def list_readers(data_dir: Path) -> Readers:
    """Return the readers of a data folder.

    Raises:
        OSError, UserError: The marks cannot be read.
    """
    marks, now_s = _marks_of(data_dir), 0.0
    active: list[Reader] = []
    ended: list[Reader] = []
    stored_marks = marks.read()
    if stored_marks:
        with suppress(OSError, UserError):
            now_s = marks.now_s()
    for name, content, modified_s in stored_marks:
        path, age_s = f"{READERS_FOLDER}/{name}", now_s - modified_s
        record = _parse_record(content)
        if record is None:
            text = f"an unknown reader, because {path} cannot be read; remove the file if nothing reads the data folder"
            (ended if age_s > RUN_EXPIRY_S else active).append(Reader(path, text, None))
            continue
        holder, since, run = record.get("holder"), record.get("since"), record.get("run")
        text = f"{holder} since {since}"
        if run is not None:
            text = f"unfinished run {run.rpartition('/')[0]} (last start {since}, {holder})"
        reader = Reader(path, text, record["variants"], is_run=run is not None)
        (ended if _has_ended(record, age_s=age_s) else active).append(reader)
    return Readers(tuple(sorted(active, key=lambda reader: reader.is_run)), tuple(ended), now_s)


def _parse_record(content: bytes) -> dict[str, Any] | None:
    """Return the record in a mark; None if the mark is damaged."""
    try:
        record = json.loads(content)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("variants"), dict)
    return record if is_record and isinstance(record.get("run", ""), str) else None


def _has_ended(record: Mapping[str, Any], *, age_s: float) -> bool:
    if "run" not in record:
        return is_abandoned(record) or age_s > EXPIRY_S
    run = str(record["run"])
    try:
        facts = json.loads(_read_facts(run))
    except (FileNotFoundError, NotADirectoryError):
        facts = {}
    except (OSError, ValueError, UserError):
        return False  # run.json is damaged, or this user may not read it
    if not isinstance(facts, dict) or facts.get(TOKEN_FACT) == record.get("token"):
        return False
    # The folder of the run may exist only on a different machine.
    is_accessible = is_remote(run) or str(record.get("holder")).endswith(f" on {os.uname().nodename}")
    return is_accessible or age_s > RUN_EXPIRY_S


def _read_facts(run: str) -> bytes:
    if not is_remote(run):
        return Path(run).read_bytes()
    from clipmill.manifests.storage.objects import open_objects

    folder, _, name = run.rpartition("/")
    return open_objects(folder).read(name)


@contextmanager
def exclude_new_readers(data_dir: Path) -> Iterator[Readers]:
    """Yield the readers of a data folder, and block new readers until the block ends.

    Raises:
        OSError, UserError: The marks cannot be locked or read.
    """
    marks, message = _marks_of(data_dir), f"waiting for a reader that is opening {data_dir}\n"
    with marks.hold(is_shared=False, on_wait=lambda: sys.stderr.write(message)):
        yield replace(list_readers(data_dir), now_s=marks.now_s())
