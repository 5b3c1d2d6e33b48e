"""Parts of a run (`--part K/N`): commands on several nodes, such as the tasks of a SLURM array, that make one column.

Parts share only the data folder. This description is binding: code that contradicts it is wrong.

Part K of N makes the shards whose ID modulo N is K - 1, so two parts never make the same shard. There are three kinds
of locks: the lock of the column, which all parts share and which excludes commands without `--part`; the lock of each
part; and the turn, a lock that one part at a time holds for a short time. A part

1. shares the lock of the column, waits for the turn, and then takes the lock of its number. It is refused if a
   command without `--part`, the same part, or a part of a run with a different number of parts is running.
2. keeps the turn, if no other part is running, until everything that the parts share is published: probes, shots,
   layout and the folder of the variant. The other parts wait, and then read these files. Before that, the parts of
   `video` probe the sources together: during a turn, a part claims a share of the sources with a note in its lock file;
   then it releases the turn, and probes this share (`claim_share`). The first part that finds no unfinished share keeps
   the turn, and publishes the results.
3. makes its shards.
4. waits for the turn again. If no other part is running, it finishes the run for all parts: it writes the lists,
   contents.json and the failures, and sets the current variant. Otherwise it ends, and the last part finishes the run.

The kernel releases the locks of a killed part. Parts register and end only during a turn, so exactly one of several
parts that end at the same time is the last. If the last part is killed, running this part again or running the
command without `--part` finishes the run.

Where locks do not reach other nodes (NFS mounted with `nolock`, Lustre with `localflock`), a part would not see the
other parts. A running part therefore touches its lock file. If another part can lock this file although it keeps
changing, that part is refused. Network file systems may show a new commit late. A part that ends therefore writes the
number of its committed shards to the lock file of the turn, which locking keeps up to date. The last part waits until
it sees all these shards.

A running part is registered by a file in the data folder (`PartFiles`). In a bucket, locks are leases, which expire
after a part is killed (`clipmill.prep.core.part_leases`). New objects are visible immediately, and are fetched during
both turns.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.locks import FileLock, holder_of, process_label
from clipmill.manifests.plugins import import_object
from clipmill.manifests.storage.mirrors import mirror_of, refresh
from clipmill.prep.core.data_folder import lock_path, part_lock_names, remove_leftovers
from clipmill.prep.engines.admission import source_sha256

_PART = re.compile(r"(-?\d{1,6})/(-?\d{1,6})", re.ASCII)
TOUCH_INTERVAL_S = 1.0  # interval at which a running part touches its file
_NUM_MISSED_TOUCHES = 5  # number of intervals without a touch after which a part is assumed to be dead
_MAX_POLL_S = 15.0  # maximum interval between two checks whether other parts have finished their shares
_STATUS_LOCK_S = 0.005  # maximum time that `prep status` holds the lock of a part whose lock file is stale


@dataclass(frozen=True, order=True)
class Part:
    """One of `count` parts. `number` counts from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Parse the value of `--part`.

        Raises:
            UserError: `text` is not K/N with 1 <= K <= N.
        """
        match = _PART.fullmatch(text)
        if match is None:
            raise UserError(f'--part "{text}" is not of the form K/N', hint="use K/N, such as 3/16 for part 3 of 16")
        number, count = map(int, match.groups())
        if not 1 <= number <= count:
            last = max(1, count)
            raise UserError(f"--part {text} is out of range", hint=f"use 1/{last} to {last}/{last}")
        return cls(number, count)

    def owns(self, shard_id: int) -> bool:
        """Return True if a shard belongs to this part."""
        return shard_id % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


_PLANS = "plans"


@dataclass(frozen=True)
class RunningPart:
    """A running part, as described by the note in its lock file.

    Attributes:
        part: Number and count of the part.
        holder: Process and node that run the part.
        variant: Variant that the part makes; empty during planning.
        source: Hash of the source code that the part runs; empty during planning.
        stage: "share N" if the part has claimed share N of the sources; `_PLANS` if the part plans with the files that
            a different part has published; otherwise empty.
    """

    part: Part
    holder: str
    variant: str
    source: str
    stage: str = ""

    @classmethod
    def read(cls, note: str, part: Part) -> "RunningPart":
        """Parse the note in the lock file of a part."""
        holder, variant, source, stage, *_ = [*note.splitlines(), "", "", "", ""]
        return cls(part, holder or "unknown process", variant, source, stage)

    @property
    def is_past_publishing(self) -> bool:
        """True if the files that the parts share were published before this part wrote its note."""
        return bool(self.variant) or self.stage == _PLANS


class PartLocks(Protocol):
    """Locks of one part. All methods except `lock_column`, `take_turn`, `touch` and `release` require the turn."""

    def lock_column(self) -> None:
        """Share the lock of the column, which excludes commands without `--part`.

        Raises:
            UserError: A command without `--part` is writing the column, or the data folder is not writable.
        """

    def take_turn(self, activity: str, *, on_wait: Callable[[str], object]) -> str:
        """Wait for this part's turn, and return the text that the previous part left.

        Args:
            activity: Description of what this part does during the turn, shown to waiting parts.
            on_wait: Function that is called during a long wait, with the description of the part that holds the turn.
        """

    def list_running(self) -> list[RunningPart]:
        """Return the other running parts of the column, and remove the lock files of killed parts.

        Raises:
            UserError: See `take_part_lock`.
        """

    def lock_part(self) -> str | None:
        """Take the lock of this part. If the part is running already, return its holder; otherwise return None."""

    def note_part(self, *, variant: str = "", source: str = "", stage: str = "") -> None:
        """Write the note of this part, with the fields of `RunningPart`."""

    def leave_turn(self, text: str) -> None:
        """Release the turn, and leave a text for the part that takes it next."""

    def touch(self) -> None:
        """Update the modification time of the lock file, to show that this part is running."""

    def release(self) -> None:
        """Release all locks except the turn."""


class PartFiles:
    """`PartLocks` as lock files on a local or shared disk."""

    def __init__(self, data_dir: Path, column: str, part: Part) -> None:
        self._data_dir, self._column, self._part = data_dir, column, part
        self._path = data_dir / f".{column}.part-{part.number}-of-{part.count}.lock"
        self._column_lock: FileLock | None = None  # shared with other parts
        self._turn: FileLock | None = None
        self._part_lock: FileLock | None = None

    def lock_column(self) -> None:
        path = lock_path(self._data_dir, self._column)
        self._column_lock = FileLock.take(path, is_shared=True)
        if self._column_lock is None:
            raise column_locked_error(self._data_dir, self._column, holder=holder_of(path))
        self._column_lock.note("")  # remove the note of a killed command

    def take_turn(self, activity: str, *, on_wait: Callable[[str], object]) -> str:
        path = self._data_dir / f".{self._column}.parts.lock"
        self._turn = FileLock.wait(path, on_wait=lambda: on_wait(holder_of(path).partition("\n")[0]))
        _, _, text = path.read_text("utf-8", "replace").partition("\n")
        self._turn.note(f"{activity}\n{text}")
        return text

    def list_running(self) -> list[RunningPart]:
        others = []
        for path in sorted(self._data_dir.glob(f".{self._column}.part-*.lock")):
            match = part_lock_names(self._column).fullmatch(path.name)
            if match is None or path == self._path:
                continue
            lock = take_part_lock(path)
            if lock is None:
                others.append(RunningPart.read(holder_of(path), Part(*map(int, match.groups()))))
            else:
                path.unlink(missing_ok=True)
                lock.release()
        return others

    def lock_part(self) -> str | None:
        self._part_lock = take_part_lock(self._path)
        if self._part_lock is None:
            return RunningPart.read(holder_of(self._path), self._part).holder
        self._part_lock.note(f"{process_label()}\n")
        return None

    def note_part(self, *, variant: str = "", source: str = "", stage: str = "") -> None:
        assert self._part_lock is not None
        self._part_lock.note(f"{process_label()}\n{variant}\n{source}\n{stage}\n")

    def leave_turn(self, text: str) -> None:
        if self._turn is not None:
            self._turn.note(f"nobody\n{text}")
            self._turn.release()
            self._turn = None

    def touch(self) -> None:
        if self._part_lock is not None:
            with suppress(OSError):
                self._part_lock.touch()

    def release(self) -> None:
        if self._part_lock is not None:
            if self._turn is not None:
                self._path.unlink(missing_ok=True)
            else:  # without the turn, another process may be about to lock the file
                self._part_lock.note("")
            self._part_lock.release()
            self._part_lock = None
        if self._column_lock is not None:
            self._column_lock.release()
            self._column_lock = None


def column_locked_error(data_dir: Path, column: str, *, holder: str) -> UserError:
    """Return the error of a part if a command without `--part` is writing the column.

    Args:
        holder: Holder of the lock of the column; empty if unknown.
    """
    return UserError(
        f"another command is writing to {data_dir} ({holder or 'unknown process'})",
        hint=f"wait until the command, which makes column {column} without --part, has finished, or stop it",
    )


def take_part_lock(path: Path) -> FileLock | None:
    """Take the lock of a part; return None if the part is running.

    Raises:
        UserError: The part is running on a different node, but its lock does not reach this node.
    """
    lock = FileLock.take(path)
    if lock is None:
        time.sleep(_STATUS_LOCK_S)
        lock = FileLock.take(path)
    holder = holder_of(path).partition("\n")[0]
    node, this_node = holder.rpartition(" on ")[2], os.uname().nodename
    if lock is None or node in ("", this_node):
        return lock
    changed_ns = _changed_ns(path)
    time.sleep(_NUM_MISSED_TOUCHES * TOUCH_INTERVAL_S)
    if _changed_ns(path) != changed_ns:
        lock.release()
        raise UserError(
            f"locks in {path.parent} do not reach other nodes: {holder} holds {path.name}, "
            f"which was free on {this_node}",
            hint="mount NFS without the options nolock and local_lock, and Lustre with the option flock",
        )
    return lock


def _changed_ns(path: Path) -> int:
    """Return the modification time of a file in ns. Opening the file makes an NFS client ask the server for it."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


_MADE_LINE = re.compile(r"^(\d+)/(\d+) (\d+)$", re.ASCII | re.MULTILINE)
_MAX_LAG_S, _LAG_INTERVAL_S = 120.0, 1.0  # maximum wait for commits, and poll interval; NFS caches listings for 60 s


@dataclass
class PartRun:
    """The part that this process runs, and its coordination with other parts.

    Attributes:
        data_dir: Data folder.
        column: Name of the column.
        part: Number and count of the part.
        is_first: True if this part publishes the files that all parts share: before `claim_share`, if no other part was
            running at the start; after `claim_share`, if no other part has published the files.
        is_last: True if this part finishes the run; None until it has ended.
        num_running: Number of other parts that were running when this part ended.
        not_made: Number of units that were not made when the last part ended, keyed by part.
        unit: Noun for the units that `not_made` counts, singular.
    """

    data_dir: Path
    column: str
    part: Part
    is_first: bool = False
    is_last: bool | None = None
    num_running: int = 0
    not_made: Counter[Part] = field(default_factory=Counter)
    unit: str = "shard"
    _num_made: dict[Part, int] = field(default_factory=dict)
    _has_turn: bool = False
    _locks: PartLocks = field(init=False)

    def __post_init__(self) -> None:
        if (mirror := mirror_of(self.data_dir)) is None:
            self._locks = PartFiles(self.data_dir, self.column, self.part)
        else:
            # Import late: part_leases.py imports this module, and loads the code for buckets.
            leases: Callable[..., PartLocks] = import_object("clipmill.prep.core.part_leases:PartLeases")
            self._locks = leases(mirror, self.column, self.part)

    def register(self) -> None:
        """Register this part: share the lock of the column, wait for the turn, and take the lock of the part.

        Raises:
            UserError: A command without `--part` is writing the column, the data folder is not writable, this part is
                running already, a part of a run with a different number of parts is running, or locks do not reach
                other nodes.
        """
        self._locks.lock_column()
        self._take_turn("planning")
        others = self._locks.list_running()
        if other := next((other for other in others if other.part.count != self.part.count), None):
            raise UserError(
                f"--part {self.part} divides the run into {self.part.count} parts, but part {other.part} is running "
                f"({other.holder})",
                hint=f"use --part K/{other.part.count}, or wait until all parts have ended",
            )
        holder = self._locks.lock_part()
        if holder is not None:
            raise UserError(f"part {self.part} is running already ({holder})", hint="wait until it ends, or stop it")
        refresh(self.data_dir)  # fetch the files that other parts have published
        self.is_first = not others
        if self.is_first:
            self._num_made = {}
        else:
            self._leave_turn()

    def claim_share(self, find_unfinished: Callable[[], Sequence[int]]) -> int | None:
        """Claim a share of the work that parts divide before they plan. Return None once it is time to plan.

        If other running parts have claimed all unfinished shares, wait for these parts. The share of a killed part can
        be claimed again. When the method returns None, this part either holds the turn (`is_first`), or can read the
        files that a different part has published.

        Args:
            find_unfinished: Function that returns the numbers of the shares that have no result. It is called during a
                turn.
        """
        interval_s = TOUCH_INTERVAL_S
        while True:
            if not self._has_turn:
                self._take_turn("planning")
            others = self._locks.list_running()
            self.is_first = not any(other.is_past_publishing for other in others)
            unfinished_shares = find_unfinished() if self.is_first else []
            claims = {other.stage for other in others}
            share = next((share for share in unfinished_shares if f"share {share}" not in claims), None)
            if self.is_first and not unfinished_shares:
                return None
            self._locks.note_part(stage=_PLANS if not self.is_first else "" if share is None else f"share {share}")
            self._leave_turn()
            if not self.is_first:
                refresh(self.data_dir)
            if share is not None or not self.is_first:
                return share
            if interval_s == TOUCH_INTERVAL_S:
                sys.stderr.write(f"part {self.part} waits: other parts are probing the last sources\n")
            time.sleep(interval_s)
            interval_s = min(2 * interval_s, _MAX_POLL_S)

    def agree(self, variant: str, *, where: str | None, package: str = "clipmill.prep") -> None:
        """Check that all running parts make the same variant with the same code, and record both in this part's note.

        Args:
            variant: Name of the variant.
            where: Condition that selects samples; None for all samples.
            package: Package of the column's code.

        Raises:
            UserError: Another part makes a different variant, selects different samples, or runs different code.
        """
        if not self.is_first:
            self._take_turn("planning")
        source = (source_sha256(package) or "unknown")[:8]
        name = variant if where is None else f"{variant} where {' '.join(where.split())}"
        for other in self._locks.list_running():
            if other.variant not in ("", name):
                raise UserError(
                    f"part {self.part} would make {name}, but part {other.part}, which is running, "
                    f"makes {other.variant}",
                    hint="use the same settings for all parts, or wait until the other parts have ended",
                )
            if other.source not in ("", source):
                raise UserError(
                    f"part {self.part} runs clipmill with source {source}, but part {other.part}, which is running, "
                    f"has source {other.source} ({other.holder})",
                    hint="install the same version of clipmill on all nodes",
                )
        self._locks.note_part(variant=name, source=source)
        if not self.is_first:
            self._leave_turn()

    def begin(self) -> None:
        """Release the turn, so that other parts can continue. All shared files must have been published."""
        self._leave_turn()

    def end(self) -> bool:
        """Wait for this part's turn. Return True if this is the last part, which must then finish the run."""
        if self.is_last is None:
            self._take_turn("ending")
            self.num_running = len(self._locks.list_running())
            self.is_last = self.num_running == 0
            if self.is_last:
                refresh(self.data_dir)  # fetch the commits of other parts
        return self.is_last

    def report_made(self, num_made: int) -> None:
        """Report the number of units, such as shards, that this part has made. Call this method after `end`."""
        self._num_made[self.part] = num_made

    def await_others(self, count_visible: Callable[[], Mapping[int, int]]) -> None:
        """Wait until this node sees all units that the other parts have reported. Only the last part needs to wait.

        Args:
            count_visible: Function that returns the number of visible units of each part, keyed by `number` - 1.
        """
        reported_counts = {part.number - 1: num_made for part, num_made in self._num_made.items()}
        self._num_made = {}
        deadline_s = time.monotonic() + _MAX_LAG_S
        is_late = False
        while True:
            counts = count_visible()
            if all(counts.get(owner, 0) >= num_made for owner, num_made in reported_counts.items()) or (
                time.monotonic() > deadline_s
            ):
                return
            if not is_late:
                is_late = True
                sys.stderr.write(f"part {self.part} waits: commits of other parts are not visible on this node yet\n")
            time.sleep(_LAG_INTERVAL_S)

    def leave(self) -> None:
        """Release all locks.

        Raises:
            LeaseLost: A lease in a bucket was taken over.
        """
        try:
            self._locks.release()
        finally:
            self._leave_turn()

    def part_of(self, number: int) -> Part:
        """Return the part that makes a unit with this number, such as a shard with this ID."""
        return Part(number % self.part.count + 1, self.part.count)

    def count_not_made(self, number: int, *, count: int = 1) -> None:
        """Count units that were not made, for the part that makes unit `number`."""
        self.not_made[self.part_of(number)] += count

    def touch(self) -> None:
        """Update the modification time of the lock file, to show that this part is running."""
        self._locks.touch()

    def line(self) -> str:
        """Return a line of the summary about how the part ended."""
        if not self.is_last:
            verb = "is" if self.num_running == 1 else "are"
            others = f"{count_noun(self.num_running, 'other part')} {verb} running"
            return f"part     {self.part} has ended; {others}, and the last one finishes the run"
        if not self.not_made:
            return f"part     {self.part} has ended as the last one; everything has been made"
        counts = [
            f"{count_noun(number, self.unit)} of part {part}" for part, number in sorted(self.not_made.items())[:5]
        ]
        suffix = f", and more of {count_noun(len(self.not_made) - 5, 'other part')}" if len(self.not_made) > 5 else ""
        return f"part     {self.part} has ended as the last one running; not made: {', '.join(counts)}{suffix}"

    def values(self) -> dict[str, Any]:
        """Return the content of `line` as JSON values."""
        return {
            "part": str(self.part),
            "is_last": bool(self.is_last),
            "num_running": self.num_running,
            "not_made": {str(part): number for part, number in sorted(self.not_made.items())},
        }

    def _take_turn(self, activity: str) -> None:
        text = self._locks.take_turn(
            f"part {self.part} is {activity} ({process_label()})",
            on_wait=lambda holder: sys.stderr.write(f"part {self.part} waits: {holder or 'for another part'}\n"),
        )
        self._has_turn = True
        lines = _MADE_LINE.findall(text)
        self._num_made = {Part(int(number), int(count)): int(num_made) for number, count, num_made in lines}

    def _leave_turn(self) -> None:
        self._has_turn = False
        self._locks.leave_turn("".join(f"{part} {num_made}\n" for part, num_made in sorted(self._num_made.items())))


@contextmanager
def register_part(data_dir: Path, part: Part, *, column: str) -> Iterator[PartRun]:
    """Register a part for the duration of the block. The first part removes files that killed commands left behind.

    Raises:
        UserError: See `PartRun.register`.
        OSError: Leftover files cannot be removed.
    """
    run, has_ended = PartRun(data_dir, column, part), Event()
    try:
        run.register()
        toucher = Thread(target=_touch_repeatedly, args=(run, has_ended), daemon=True)
        toucher.start()
        try:
            if run.is_first:
                remove_leftovers(data_dir, column=column)
            yield run
        finally:
            has_ended.set()
            toucher.join()
    finally:
        run.leave()


def _touch_repeatedly(run: PartRun, has_ended: Event) -> None:
    while not has_ended.wait(TOUCH_INTERVAL_S):
        run.touch()
