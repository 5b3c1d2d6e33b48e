"""The locks by which the parts of a run know each other: a file in the data folder for each part that is running.

`clipmill.prep.core.part_leases` has the same for a data folder in a bucket.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import FileLock, holder_of, this_process
from clipmill.prep.core.data_folder import lock_path, part_lock_names

_PART = re.compile(r"(-?\d{1,6})/(-?\d{1,6})", re.ASCII)
SIGN_INTERVAL_S = 1.0  # a running part touches its file
_NUM_MISSED_SIGNS = 5  # intervals without a sign of life after which a part is gone
_GLANCE_S = 0.005  # `prep status` holds the lock of a silent part for less than this


@dataclass(frozen=True, order=True)
class Part:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Parse the value of `--part`.

        Raises:
            UserError: it is not K/N with 1 <= K <= N.
        """
        match = _PART.fullmatch(text)
        if match is None:
            raise UserError(f'--part "{text}" is not a part', hint="write K/N, such as 3/16: part 3 of 16")
        number, count = map(int, match.groups())
        if not 1 <= number <= count:
            last = max(1, count)
            raise UserError(f"--part {text} is out of range", hint=f"give 1/{last} to {last}/{last}")
        return cls(number, count)

    def holds(self, number: int) -> bool:
        """Return True if the shard with id `number` belongs to the part."""
        return number % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class RunningPart:
    """Note in the lock file of a running part: the process, what it makes, and by which code (empty while it plans)."""

    part: Part
    holder: str
    makes: str
    source: str

    @classmethod
    def read(cls, note: str, part: Part) -> "RunningPart":
        """Read the note of a part."""
        holder, makes, source, *_ = [*note.splitlines(), "", "", ""]
        return cls(part, holder or "unknown process", makes, source)


class PartLocks(Protocol):
    """The locks of one part. All methods but the first and the last two are called within the turn."""

    def lock_column(self) -> None:
        """Exclude commands without `--part`.

        Raises:
            UserError: one is writing the column, or the data folder is not writable.
        """

    def take_turn(self, doing: str, *, on_wait: Callable[[str], object]) -> str:
        """Wait for the turn, and return the text that the previous part has left in it.

        Args:
            doing: what this part does in its turn, for those that wait.
            on_wait: called with what another part does if that takes long.
        """

    def running(self) -> list[RunningPart]:
        """Return the other parts of the column that are running; forget those that were killed.

        Raises:
            UserError: see `take_part_lock`.
        """

    def take_own(self) -> str | None:
        """Take the lock of this part; return who holds it if the part is running already, else None."""

    def note_own(self, *, makes: str, source: str) -> None:
        """Note what this part makes, and by which code."""

    def leave_turn(self, text: str) -> None:
        """Let other parts have the turn, and leave a text in it."""

    def touch(self) -> None:
        """Give a sign of life."""

    def release(self) -> None:
        """Release all locks."""


class PartFiles:
    """`PartLocks`, which documents the methods, as files on a local or shared disk."""

    def __init__(self, data_dir: Path, column: str, part: Part) -> None:
        self._data_dir, self._column, self._part = data_dir, column, part
        self._path = data_dir / f".{column}.part-{part.number}-of-{part.count}.lock"
        self._shared: FileLock | None = None  # the lock of the column, shared with other parts
        self._turn: FileLock | None = None
        self._own: FileLock | None = None

    def lock_column(self) -> None:
        path = lock_path(self._data_dir, self._column)
        self._shared = FileLock.take(path, is_shared=True)
        if self._shared is None:
            raise column_is_written(self._data_dir, self._column, by=holder_of(path))
        self._shared.note("")  # a note of a killed command

    def take_turn(self, doing: str, *, on_wait: Callable[[str], object]) -> str:
        path = self._data_dir / f".{self._column}.parts.lock"
        self._turn = FileLock.wait(path, on_wait=lambda: on_wait(holder_of(path).partition("\n")[0]))
        _, _, text = path.read_text("utf-8", "replace").partition("\n")
        self._turn.note(f"{doing}\n{text}")
        return text

    def running(self) -> list[RunningPart]:
        found = []
        for path in sorted(self._data_dir.glob(f".{self._column}.part-*.lock")):
            match = part_lock_names(self._column).fullmatch(path.name)
            if match is None or path == self._path:
                continue
            lock = take_part_lock(path)
            if lock is None:
                found.append(RunningPart.read(holder_of(path), Part(*map(int, match.groups()))))
            else:
                path.unlink(missing_ok=True)
                lock.release()
        return found

    def take_own(self) -> str | None:
        self._own = take_part_lock(self._path)
        if self._own is None:
            return RunningPart.read(holder_of(self._path), self._part).holder
        self._own.note(f"{this_process()}\n")
        return None

    def note_own(self, *, makes: str, source: str) -> None:
        assert self._own is not None
        self._own.note(f"{this_process()}\n{makes}\n{source}\n")

    def leave_turn(self, text: str) -> None:
        if self._turn is not None:
            self._turn.note(f"nobody\n{text}")
            self._turn.release()
            self._turn = None

    def touch(self) -> None:
        if self._own is not None:
            with suppress(OSError):
                self._own.touch()

    def release(self) -> None:
        if self._own is not None:
            if self._turn is not None:
                self._path.unlink(missing_ok=True)
            else:  # another process may be about to lock the file
                self._own.note("")
            self._own.release()
            self._own = None
        if self._shared is not None:
            self._shared.release()
            self._shared = None


def column_is_written(data_dir: Path, column: str, *, by: str) -> UserError:
    """Return the error for a part that meets a command without `--part`."""
    return UserError(
        f"another command is writing to {data_dir} ({by or 'unknown'})",
        hint=f"it makes column {column} without --part: wait until it finishes, or stop it",
    )


def take_part_lock(path: Path) -> FileLock | None:
    """Return the lock of a part; None if that part is running.

    Raises:
        UserError: the lock is free, although that part is running on another node.
    """
    lock = FileLock.take(path)
    if lock is None:
        time.sleep(_GLANCE_S)
        lock = FileLock.take(path)
    holder = holder_of(path).partition("\n")[0]
    node, here = holder.rpartition(" on ")[2], os.uname().nodename
    if lock is None or node in ("", here):
        return lock
    changed_ns = _changed_ns(path)
    time.sleep(_NUM_MISSED_SIGNS * SIGN_INTERVAL_S)
    if _changed_ns(path) != changed_ns:
        lock.release()
        raise UserError(
            f"locks in {path.parent} do not reach other nodes: {holder} holds that of {path.name}, which was free on "
            f"{here}",
            hint="mount NFS without nolock or local_lock, and Lustre with -o flock",
        )
    return lock


def _changed_ns(path: Path) -> int:
    """Return the time of the last change of a file; opening the file makes NFS ask for it."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
