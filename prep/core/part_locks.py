"""The locks by which the parts of a run know each other: a file in the data folder for each part that is running.

Call these functions within a turn (`prep.core.parts`).
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import UserError
from prep.core.data_folder import FileLock, holder_of

_PART = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)
_LOCK_FILE = re.compile(r"\.part-(\d+)-of-(\d+)\.lock$", re.ASCII)
SIGN_INTERVAL_S = 1.0  # a running part touches its file
_NUM_MISSED_SIGNS = 5  # intervals without a sign of life after which a part is gone


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
            raise UserError(f"--part {text} is out of range", hint=f"give 1/{count or 1} to {count or 1}/{count or 1}")
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
    def read(cls, path: Path, part: Part) -> "RunningPart":
        """Read the note of a part."""
        holder, makes, source, *_ = [*holder_of(path).splitlines(), "", "", ""]
        return cls(part, holder or "unknown process", makes, source)


def part_path(data_dir: Path, column: str, part: Part) -> Path:
    """Return the path of the lock of a part."""
    return data_dir / f".{column}.part-{part.number}-of-{part.count}.lock"


def running_parts(data_dir: Path, column: str, *, own: Part) -> list[RunningPart]:
    """Return the parts of a column that are running, except `own`; remove the files of parts that were killed.

    Raises:
        UserError: see `take_part_lock`.
    """
    found = []
    for path in sorted(data_dir.glob(f".{column}.part-*.lock")):
        match = _LOCK_FILE.search(path.name)
        if match is None or (part := Part(*map(int, match.groups()))) == own:
            continue
        lock = take_part_lock(path)
        if lock is None:
            found.append(RunningPart.read(path, part))
        else:
            path.unlink(missing_ok=True)
            lock.release()
    return found


def take_part_lock(path: Path) -> FileLock | None:
    """Return the lock of a part; None if that part is running.

    Raises:
        UserError: the lock is free, although that part is running on another node.
    """
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
