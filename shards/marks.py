"""Marks in a data folder that list the variants in use, so that `prep gc` keeps them.

    .readers/<16 hex>.lock    a mark: its reader, the start of reading, and the variants by column
    .readers/.lock            shared by readers that write a mark; `prep gc` holds it while it removes variants

A training process opens a data folder with `read_from`. From then on, the process leaves a mark for each variant that
it opens (`leave_mark`), touches the mark every `RENEWAL_S` seconds, and removes it when the variant is no longer in
use. If the process dies, its mark expires: immediately on the same machine, and `EXPIRY_S` seconds after the last touch
elsewhere. The age of a mark is the difference between two times of the storage (file system or bucket), so it does not
depend on the clocks of machines.

An unfinished run has a mark that does not depend on a process (`mark_run`). It expires when the run ends or its folder
is removed; on a machine that cannot see the folder, `RUN_EXPIRY_S` seconds after the last start.

If a mark cannot be written, the process prints a note and reads without a mark. A mark that cannot be read keeps all
variants until it is `RUN_EXPIRY_S` seconds old, because its reader may still need any of them.
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
from clipmill.manifests.storage.mirrors import is_remote, mirror_of, show_addresses

if TYPE_CHECKING:
    from clipmill.manifests.storage.leases import HeldLeases
    from clipmill.manifests.storage.objects import Objects

READERS_FOLDER = ".readers"
TOKEN_FACT = "mark"  # key in run.json of the token that ties a run's mark to its folder
RENEWAL_S, EXPIRY_S, RUN_EXPIRY_S = 300.0, 1800.0, 30 * 86_400.0
_LOCK = ".lock"
_MARK = re.compile(r"[0-9a-f]{16}\.lock")


class LocalMarks:
    """The marks of a local data folder. Any user who may write to the data folder may write marks."""

    def __init__(self, data_dir: Path) -> None:
        self.address = os.fspath(data_dir)
        self._data_dir, self._folder = data_dir, data_dir / READERS_FOLDER

    def write(self, name: str, content: bytes) -> None:
        """Write a mark."""
        with publish_atomically(self._folder / name) as path:
            path.write_bytes(content)
            path.chmod(0o644)  # regardless of the umask, so that another user's `prep gc` can read it

    def renew(self, name: str, content: bytes) -> None:
        """Set the time of a mark to now; write it again if it was removed."""
        try:
            os.utime(self._folder / name)  # without a time, so that a file server uses its own clock
        except FileNotFoundError:
            self.write(name, content)

    def remove(self, name: str) -> None:
        """Remove a mark, if it exists."""
        (self._folder / name).unlink(missing_ok=True)

    def read(self) -> list[tuple[str, bytes, float]]:
        """Return the name, content and last touch (seconds, by the storage's clock) of each mark.

        The content is empty if this user cannot read it.
        """
        marks = []
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            with suppress(FileNotFoundError):  # removed in the meantime
                if _MARK.fullmatch(path.name):
                    touched_s = path.stat().st_mtime
                    try:
                        marks.append((path.name, path.read_bytes(), touched_s))
                    except (PermissionError, IsADirectoryError):
                        marks.append((path.name, b"", touched_s))
        return marks

    def now_s(self) -> float:
        """Return the current time by the storage's clock, in seconds since the epoch."""
        os.utime(self._folder / _LOCK)
        return (self._folder / _LOCK).stat().st_mtime

    @contextmanager
    def hold(self, *, is_shared: bool, on_wait: Callable[[], object]) -> Iterator[None]:
        """Lock the folder, so that no reader writes a mark while a command removes variants."""
        with suppress(FileExistsError):
            self._folder.mkdir()
            self._folder.chmod(self._data_dir.stat().st_mode & 0o7777)
        # NFS grants an exclusive lock only on a file that is open for writing.
        path, flags = self._folder / _LOCK, os.O_RDONLY if is_shared else os.O_RDWR
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:  # O_CREAT was not set, because it fails for another user's file in a folder like /tmp
            descriptor = os.open(path, flags | os.O_CREAT, 0o666)
            with suppress(PermissionError):  # another user has created the file in the meantime
                os.fchmod(descriptor, self._folder.stat().st_mode & 0o666)
        try:
            if not lock(descriptor, is_shared=is_shared, waits=False):
                on_wait()
                lock(descriptor, is_shared=is_shared)
            yield
        finally:
            os.close(descriptor)


class BucketMarks:
    """The marks of a data folder in a bucket, with the methods of `LocalMarks`.

    Args:
        leases: Leases of the command, which aborts if it loses one of them.
    """

    def __init__(self, objects: "Objects", leases: "HeldLeases | None" = None) -> None:
        self.address = objects.address
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
            with suppress(FileNotFoundError):  # removed in the meantime
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
        lease = Lease(self._objects, f"{READERS_FOLDER}/{_LOCK}", what=self.address)
        lease.wait(on_wait=lambda _: on_wait())
        with (self._leases or HeldLeases(self._objects)).hold(lease):
            yield


Marks = LocalMarks | BucketMarks


def _marks_of(data_dir: Path) -> Marks:
    """Return the marks of the data folder that a `prep` command uses."""
    if (mirror := mirror_of(data_dir)) is None:
        return LocalMarks(data_dir)
    from clipmill.manifests.storage.working_copy import WorkingCopy

    assert isinstance(mirror, WorkingCopy)
    return BucketMarks(mirror.objects, mirror.leases)


class _User:
    """User of a mark."""


class _Mark:
    """A mark that this process has left, and its users."""

    def __init__(self, marks: Marks, record: Mapping[str, Any], *, name: str = "") -> None:
        self.marks, self.name = marks, f"{name or secrets.token_hex(8)}.lock"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self.content = json.dumps({**process_record(), "since": since, **record}, indent=1).encode()
        self.users: WeakSet[_User] = WeakSet()

    def remove(self) -> None:
        with suppress(OSError, UserError):  # a mark that remains expires
            self.marks.remove(self.name)


_folders: dict[Path, Marks | None] = {}  # data folders that this process trains on; None if marks cannot be written
_marks: dict[Path, _Mark] = {}  # marks by the folder of the variant
_block_marks: list[list[_Mark]] = []  # marks that each block of `keep_marks` needs, the outermost block first
_lock = threading.Lock()
_renewal: threading.Thread | None = None


def read_from(data_dir: Path, objects: "Objects | None" = None) -> None:
    """Enable marks in a data folder for the variants that this process opens, until the outermost `keep_marks` ends.

    Args:
        objects: Objects of a remote data folder, if `data_dir` is a local copy of its small files.
    """
    is_first_of_node = (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") == "0"
    if is_first_of_node and (folder := data_dir.resolve()) not in _folders:
        _folders[folder] = LocalMarks(data_dir) if objects is None else BucketMarks(objects)


def leave_mark(directory: Path) -> object | None:
    """Leave a mark for a variant, if `read_from` was called for its data folder.

    Returns:
        user: Object that keeps the mark for as long as it exists; None if there is no mark.
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
            _renewal = threading.Thread(target=_renew_forever, name="marks of readers", daemon=True)
            _renewal.start()
        return user


def _write_mark(mark: _Mark) -> bool:
    """Write a mark and return True; if this fails, print a line and return False."""
    marks = mark.marks
    waiting = f"waiting for prep gc, which removes variants in {marks.address}\n"
    try:
        with marks.hold(is_shared=True, on_wait=lambda: sys.stderr.write(waiting)):
            marks.write(mark.name, mark.content)
    except (OSError, UserError) as error:
        _folders.update({folder: None for folder, known in _folders.items() if known is marks})
        reason = getattr(error, "strerror", None) or error
        if (os.environ.get("RANK") or "0") == "0":
            sys.stderr.write(
                f"note: reader marks cannot be written to {marks.address} ({reason}), so prep gc does not see this "
                "reader; use prep gc --keep VARIANT to keep its variant\n"
            )
        return False
    return True


@contextmanager
def keep_marks() -> Iterator[None]:
    """Keep the marks of all variants that are opened inside the block until it ends."""
    _block_marks.append([])
    try:
        yield
    finally:
        _block_marks.pop()
        if not _block_marks:
            _folders.clear()
        remove_unused_marks()


def remove_unused_marks(*, renews: bool = False) -> None:
    """Remove the marks of variants that are no longer in use; with `renews`, touch the others."""
    with _lock:
        needed = {mark for block in _block_marks for mark in block}
        unused = [directory for directory, mark in _marks.items() if not (mark.users or mark in needed)]
        removed, renewed = [_marks.pop(directory) for directory in unused], [*_marks.values()] if renews else []
    # The lock is not held here: a bucket may not respond for minutes, and training must continue.
    for mark in renewed:
        with suppress(OSError, UserError):  # the next renewal retries
            mark.marks.renew(mark.name, mark.content)
        with _lock:
            removed += [mark] if mark not in _marks.values() else []  # its last user ended in the meantime
    for mark in removed:
        mark.remove()


def _renew_forever() -> None:
    while True:
        time.sleep(RENEWAL_S)
        remove_unused_marks(renews=True)


@atexit.register
def _remove_marks() -> None:
    for mark in _marks.values():
        mark.remove()


def _forget_marks() -> None:
    """Forget the parent's marks in a forked process."""
    global _lock, _renewal
    _marks.clear()
    _block_marks.clear()
    _lock, _renewal = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_marks)


@contextmanager
def mark_run(facts: Path, token: str, variants: Mapping[Path, Mapping[str, str]]) -> Iterator[None]:
    """Mark the variants of a run until the block ends without an error, that is, until the run is finished.

    Args:
        facts: Path of run.json, which contains the token under the key `TOKEN_FACT`.
        variants: Names of the variants by column, for each data folder.
    """
    run = show_addresses(os.fspath(facts.resolve()))  # the URL for a run in a bucket
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
    """A process that reads variants, or a run that is not finished.

    Attributes:
        name: Path of the mark, relative to the data folder.
        text: Name of the reader, and when it started to read.
        variants: Names of the variants by column; None if the mark cannot be read, which may be of any variant.
        is_run: True for a run.
    """

    name: str
    text: str
    variants: Mapping[str, str] | None
    is_run: bool = False


@dataclass(frozen=True)
class Readers:
    """The marks in a data folder.

    Attributes:
        alive: Readers that may still read, including readers of unknown age, because the folder is not writable.
        ended: Readers that have ended without removing their marks.
        now_s: Time by the clock of the storage, in seconds since the epoch; 0 if it is unknown.
    """

    alive: tuple[Reader, ...]
    ended: tuple[Reader, ...]
    now_s: float

    def of_variant(self, column: str, variant: str) -> list[Reader]:
        """Return the readers of a variant."""
        return [reader for reader in self.alive if reader.variants is None or reader.variants.get(column) == variant]


def read_readers(data_dir: Path) -> Readers:
    """Return the readers of a data folder.

    Raises:
        OSError, UserError: The marks cannot be read.
    """
    marks, now_s = _marks_of(data_dir), 0.0
    alive: list[Reader] = []
    ended: list[Reader] = []
    listed = marks.read()
    if listed:
        with suppress(OSError, UserError):
            now_s = marks.now_s()
    for name, content, touched_s in listed:
        path, age_s = f"{READERS_FOLDER}/{name}", now_s - touched_s
        record = _read_record(content)
        if record is None:
            text = f"an unknown reader, because {path} cannot be read; remove it if nothing reads the data folder"
            (ended if age_s > RUN_EXPIRY_S else alive).append(Reader(path, text, None))
            continue
        holder, since, run = record.get("holder"), record.get("since"), record.get("run")
        text = f"{holder} since {since}"
        if run is not None:
            text = f"unfinished run {run.rpartition('/')[0]} (last start {since}, {holder})"
        reader = Reader(path, text, record["variants"], is_run=run is not None)
        (ended if _has_ended(record, age_s=age_s) else alive).append(reader)
    return Readers(tuple(sorted(alive, key=lambda reader: reader.is_run)), tuple(ended), now_s)


def _read_record(content: bytes) -> dict[str, Any] | None:
    """Return the record of a mark; None if it is damaged."""
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
    # The folder may exist on another machine only.
    is_seen = is_remote(run) or str(record.get("holder")).endswith(f" on {os.uname().nodename}")
    return is_seen or age_s > RUN_EXPIRY_S


def _read_facts(run: str) -> bytes:
    if not is_remote(run):
        return Path(run).read_bytes()
    from clipmill.manifests.storage.objects import open_objects

    folder, _, name = run.rpartition("/")
    return open_objects(folder).read(name)


@contextmanager
def exclude_new_readers(data_dir: Path) -> Iterator[Readers]:
    """Yield the readers of a data folder, and block new readers until the block ends."""
    marks, waiting = _marks_of(data_dir), f"waiting for a reader that is opening {data_dir}\n"
    with marks.hold(is_shared=False, on_wait=lambda: sys.stderr.write(waiting)):
        yield replace(read_readers(data_dir), now_s=marks.now_s())
