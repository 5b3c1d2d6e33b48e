"""Parts of a run (`--part K/N`): commands on several nodes, such as the tasks of a SLURM array, that make one column.

They share nothing but the data folder. If the implementation is inconsistent with the following, it is a bug.

Part K of N makes the shards whose id modulo N is K - 1, so parts never make the same shard. A part

1. takes the lock of the column, shared with other parts, waits for the turn, a lock that one part at a time holds for a
   short while, and then takes the lock of its own number. It is refused if a command without `--part` is running, if
   the same part is, or parts of another count;
2. keeps the turn, if no other part is running, until everything that the parts have in common is published: probes,
   shots, layout and the folder of the variant. Other parts wait and then find all of it;
3. makes its shards;
4. waits for the turn again. If no other part is running, it finishes the run of all of them: lists, contents.json,
   failures, current variant. Otherwise it ends, and the last part finishes.

The kernel releases the locks of a part that is killed. Since every change of "who is running" happens within a turn,
exactly one of several parts that end at the same time is the last. A part that is killed as the last leaves the
finishing to its next attempt, or to a command without `--part`.

Where locks do not reach other nodes (NFS mounted with `nolock`, Lustre with `localflock`), a part would not see the
others. A running part therefore touches the file of its lock, and a part that can take a lock whose file keeps changing
is refused. Network file systems may show a new commit late: a part that ends notes in the file of the turn, which a
lock keeps up to date, how much it has made, and the last one waits until it sees all of it.

In a bucket, locks are leases, which expire when a part is killed (`clipmill.prep.core.part_leases`). What others have
published is seen at once, and fetched at the two turns.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.locks import this_process
from clipmill.manifests.storage.mirrors import mirror_of, refresh
from clipmill.prep.core.data_folder import remove_leftovers
from clipmill.prep.core.part_locks import SIGN_INTERVAL_S, Part, PartFiles, PartLocks
from clipmill.prep.core.shard_result import ShardWork
from clipmill.prep.engines.admission import source_sha256

S = TypeVar("S", bound=ShardWork)

_MADE_LINE = re.compile(r"^(\d+)/(\d+) (\d+)$", re.ASCII | re.MULTILINE)
_MAX_LAG_S, _LAG_INTERVAL_S = 120.0, 1.0  # NFS clients keep listings for up to a minute


@dataclass
class PartRun:
    """The part that this process makes, and its place among the other parts.

    Attributes:
        is_first: whether no other part was running when it began. It publishes what all parts have in common.
        is_last: whether it finishes the run; None until it has ended.
        num_running: number of other parts that were running when it ended.
        not_made: work of other parts that was not done when the last part ended: number of shards by part.
        unit: what `not_made` counts, singular.
    """

    data_dir: Path
    column: str
    part: Part
    is_first: bool = False
    is_last: bool | None = None
    num_running: int = 0
    not_made: Counter[Part] = field(default_factory=Counter)
    unit: str = "shard"
    _made: dict[Part, int] = field(default_factory=dict)
    _locks: PartLocks = field(init=False)

    def __post_init__(self) -> None:
        if (mirror := mirror_of(self.data_dir)) is None:
            self._locks = PartFiles(self.data_dir, self.column, self.part)
        else:
            from clipmill.prep.core.part_leases import PartLeases

            self._locks = PartLeases(mirror, self.column, self.part)

    def lock_column(self) -> None:
        """Exclude commands without `--part`.

        Raises:
            UserError: one is writing the column, or the data folder is not writable.
        """
        self._locks.lock_column()

    def register(self) -> None:
        """Wait for the turn, check the other parts, and take the lock of this part.

        Raises:
            UserError: the part is running, parts of another count are running, or locks do not reach other nodes.
        """
        self._take_turn("planning")
        others = self._locks.running()
        if mixed := [other for other in others if other.part.count != self.part.count]:
            raise UserError(
                f"--part {self.part} divides the run by {self.part.count}, but part {mixed[0].part} is running "
                f"({mixed[0].holder})",
                hint=f"give a part of {mixed[0].part.count}, or wait until all parts have ended",
            )
        holder = self._locks.take_own()
        if holder is not None:
            raise UserError(f"part {self.part} is running already ({holder})", hint="wait until it ends, or stop it")
        refresh(self.data_dir)  # what other parts have published
        self.is_first = not others
        if self.is_first:
            self._made = {}
        else:
            self._leave_turn()

    def agree(self, variant: str, *, where: str | None, package: str = "clipmill.prep") -> None:
        """Record what the part makes, and by which source code.

        Args:
            package: package of the column's code.

        Raises:
            UserError: another part makes another variant, selects other samples, or runs other code.
        """
        if not self.is_first:
            self._take_turn("planning")
        source = _source(package)
        mine = variant if where is None else f"{variant} where {' '.join(where.split())}"
        for other in self._locks.running():
            if other.makes not in ("", mine):
                raise UserError(
                    f"part {self.part} would make {mine}, but part {other.part}, which is running, makes {other.makes}",
                    hint="give all parts the same settings, or wait until the others have ended",
                )
            if other.source not in ("", source):
                raise UserError(
                    f"clipmill of part {self.part} (source {source}) differs from that of part {other.part}, which is "
                    f"running (source {other.source}, {other.holder})",
                    hint="install the same clipmill on all nodes",
                )
        self._locks.note_own(makes=mine, source=source)
        if not self.is_first:
            self._leave_turn()

    def begin(self) -> None:
        """Let the other parts continue: everything that they share is published."""
        self._leave_turn()

    def end(self) -> bool:
        """Wait for the turn; return True if this part is the last one, which finishes the run before it leaves."""
        if self.is_last is None:
            self._take_turn("ending")
            self.num_running = len(self._locks.running())
            self.is_last = self.num_running == 0
            if self.is_last:
                refresh(self.data_dir)  # what other parts have made
        return self.is_last

    def tell(self, num_made: int) -> None:
        """Tell the last part how many shards (or other units of work) of this part there are; call it after `end`."""
        self._made[self.part] = num_made

    def await_others(self, visible: Callable[[], Mapping[int, int]]) -> None:
        """Wait until this node sees what the parts that have ended have told; call it in the last part.

        Args:
            visible: return how much of the work of each part is seen now, by `number` - 1.
        """
        told, self._made = {part.number - 1: made for part, made in self._made.items()}, {}
        deadline_s = time.monotonic() + _MAX_LAG_S
        is_late = False
        while True:
            seen = visible()
            if all(seen.get(owner, 0) >= made for owner, made in told.items()) or time.monotonic() > deadline_s:
                return
            if not is_late:
                is_late = True
                sys.stderr.write(f"part {self.part} waits: commits of other parts are not visible on this node yet\n")
            time.sleep(_LAG_INTERVAL_S)

    def leave(self) -> None:
        """Release all locks.

        Raises:
            LeaseLost: one in a bucket was taken over.
        """
        try:
            self._locks.release()
        finally:
            self._leave_turn()

    def own(self, shards: Sequence[S]) -> list[S]:
        """Return the shards of this part."""
        return [shard for shard in shards if self.part.holds(shard.shard_id)]

    def part_of(self, number: int) -> Part:
        """Return the part that a shard, or other numbered work, is left to."""
        return Part(number % self.part.count + 1, self.part.count)

    def leave_to(self, number: int, *, count: int = 1) -> None:
        """Count work that is not done."""
        self.not_made[self.part_of(number)] += count

    def touch(self) -> None:
        """Give a sign of life."""
        self._locks.touch()

    def line(self) -> str:
        """Return how the part ended, for the summary."""
        if not self.is_last:
            verb = "is" if self.num_running == 1 else "are"
            others = f"{count_noun(self.num_running, 'other part')} {verb} running"
            return f"part     {self.part} has ended; {others}, and the last one finishes the run"
        if not self.not_made:
            return f"part     {self.part} has ended as the last one; nothing is left to make"
        listed = [
            f"{count_noun(number, self.unit)} of part {part}" for part, number in sorted(self.not_made.items())[:5]
        ]
        more = f", and of {count_noun(len(self.not_made) - 5, 'more part')}" if len(self.not_made) > 5 else ""
        return f"part     {self.part} has ended as the last one running; not made: {', '.join(listed)}{more}"

    def values(self) -> dict[str, Any]:
        """Return how the part ended as JSON values."""
        return {
            "part": str(self.part),
            "is_last": bool(self.is_last),
            "num_running": self.num_running,
            "not_made": {str(part): number for part, number in sorted(self.not_made.items())},
        }

    def _take_turn(self, doing: str) -> None:
        told = self._locks.take_turn(
            f"part {self.part} is {doing} ({this_process()})",
            on_wait=lambda holder: sys.stderr.write(f"part {self.part} waits: {holder or 'for another part'}\n"),
        )
        lines = _MADE_LINE.findall(told)
        self._made = {Part(int(number), int(count)): int(made) for number, count, made in lines}

    def _leave_turn(self) -> None:
        self._locks.leave_turn("".join(f"{part} {made}\n" for part, made in sorted(self._made.items())))


@contextmanager
def writing_part(data_dir: Path, part: Part, *, column: str) -> Iterator[PartRun]:
    """Take part in a run of a column, and remove what killed commands left in it if no other part is running.

    Raises:
        UserError: see `PartRun.register`; or a command without `--part` is writing the column.
        OSError: leftover files cannot be removed.
    """
    run, has_ended = PartRun(data_dir, column, part), Event()
    try:
        run.lock_column()
        run.register()
        signs = Thread(target=_give_signs, args=(run, has_ended), daemon=True)
        signs.start()
        try:
            if run.is_first:
                remove_leftovers(data_dir, column=column)
            yield run
        finally:
            has_ended.set()
            signs.join()
    finally:
        run.leave()


@cache
def _source(package: str) -> str:
    return (source_sha256(package) or "unknown")[:8]


def _give_signs(run: PartRun, has_ended: Event) -> None:
    while not has_ended.wait(SIGN_INTERVAL_S):
        run.touch()
