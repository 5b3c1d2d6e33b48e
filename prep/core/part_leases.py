"""Locks of a part (`--part K/N`) for a data folder in a bucket: leases, which expire and are visible on all machines.

A part and a command without `--part` exclude each other without a common lock: each first takes its own lease and then
reads the other leases. At least one of the two sees the other, and is refused. Reading an expired lease releases it, so
the former holder can no longer publish, even if it is still running.
"""

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress

from clipmill.manifests.storage.leases import EXPIRY_S, Lease, LeaseHeld, held_leases
from clipmill.manifests.storage.mirrors import Mirror
from clipmill.manifests.storage.working_copy import WorkingCopy
from clipmill.prep.core.data_folder import lock_path, part_lock_names
from clipmill.prep.core.parts import Part, RunningPart, column_locked_error


class PartLeases:
    """`PartLocks` (see `parts.py`) as leases in a bucket."""

    def __init__(self, copy: Mirror, column: str, part: Part) -> None:
        assert isinstance(copy, WorkingCopy)
        self._copy, self._column, self._part = copy, column, part
        self._column_lock_name = lock_path(copy.folder, column).name
        self._part_lock = Lease(
            copy.objects, f".{column}.part-{part.number}-of-{part.count}.lock", resource=f"part {part} of {copy.url}"
        )
        self._part_lock_held, self._turn_held = ExitStack(), ExitStack()
        self._is_held = False  # True while this process holds the lease of the part
        self._turn: Lease | None = None

    def lock_column(self) -> None:
        """Raise a UserError if the column is locked. `lock_part` checks again, during the turn."""
        for record in held_leases(self._copy.objects, re.compile(re.escape(self._column_lock_name))).values():
            holder = f"{record.get('holder')} since {record.get('since')}"
            raise column_locked_error(self._copy.folder, self._column, holder=holder)

    def take_turn(self, activity: str, *, on_wait: Callable[[str], object]) -> str:
        """Wait for this part's turn. Return "": parts leave no text, because new objects are visible immediately."""
        turn = Lease(
            self._copy.objects, f".{self._column}.parts.lock", resource=f"parts of {self._copy.url}", note=activity
        )
        turn.wait(on_wait=on_wait)
        self._turn_held.enter_context(self._copy.leases.hold(turn))
        self._turn = turn
        return ""

    def list_running(self) -> list[RunningPart]:
        self._copy.require_locks()
        names = part_lock_names(self._column)
        others = []
        for key, record in sorted(held_leases(self._copy.objects, names, ignored_key=self._part_lock.key).items()):
            if match := names.fullmatch(key):
                note = f"{record.get('holder')}\n{record.get('note')}"
                others.append(RunningPart.read(note, Part(*map(int, match.groups()))))
        return others

    def lock_part(self) -> str | None:
        try:
            self._part_lock.take_over(
                on_wait=lambda holder: sys.stderr.write(
                    f"part {self._part} waits: {holder} holds its lock, "
                    f"which expires after {EXPIRY_S:g} s without renewal\n"
                )
            )
        except LeaseHeld as held:
            return held.holder
        self._part_lock_held.enter_context(self._copy.leases.hold(self._part_lock))
        self._is_held = True
        self.lock_column()
        return None

    def note_part(self, *, variant: str = "", source: str = "", stage: str = "") -> None:
        self._part_lock.note(f"{variant}\n{source}\n{stage}")

    def leave_turn(self, text: str) -> None:
        self._turn_held.close()
        self._turn = None

    def touch(self) -> None:
        """Do nothing, because leases are renewed in the background."""

    def release(self) -> None:
        is_removable = False
        if self._is_held and self._turn is not None:
            with suppress(OSError):  # a lease was taken over, or the bucket cannot be reached
                self._part_lock.require()
                self._turn.require()  # the lease of a part is taken only during the turn
                is_removable = True
        self._part_lock_held.close()
        self._is_held = False
        if is_removable:
            with suppress(OSError):
                self._copy.objects.delete(self._part_lock.key)
