"""Runs a command under the interposer: which points it has, and what it does when one of them goes wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.commands import Commands, Ran
from tests.torture.interposer import watch

SCRATCH = "TMPDIR/"
# What else comes and goes in $TMPDIR is of libraries: tempfile tries whether it can write there, for one.
_OWN_SCRATCH = f"{SCRATCH}scratch-clipmill-"
_KILLS = ("kill", "kill-after")
# What can go wrong at an operation. A write of half the bytes may end the process, or be told to the caller.
_FAULTS = {
    "write": ("kill", "eio", "enospc", "cut", "short"),
    "fsync": ("kill", "eio", "enospc"),
}
_OTHER_FAULTS = (*_KILLS, "eio", "enospc")


@dataclass(frozen=True)
class Point:
    """One operation of a command on one of its files: `operation:path#n`.

    Attributes:
        is_driver: the command's first process comes to it, and not only its workers.
    """

    name: str
    is_driver: bool

    @property
    def operation(self) -> str:
        return self.name.partition(":")[0]

    @property
    def faults(self) -> tuple[str, ...]:
        """What is tried here, by the names of `interposer.watch`."""
        faults = _FAULTS.get(self.operation, _OTHER_FAULTS)
        return faults if self.is_driver else (*faults, "kill-worker")


def points_of(lines: Sequence[str]) -> list[Point]:
    """The points of a trace in the order in which they came, each once."""
    words = [line.partition(" < ")[0].partition(" ") for line in lines if _is_own(line)]
    of_driver = {name for role, _, name in words if role == "driver"}
    return [Point(name, name in of_driver) for name in dict.fromkeys(name for _, _, name in words)]


def _is_own(line: str) -> bool:
    """Whether a line of a trace is of a file of clipmill's."""
    path = line.partition(" ")[2].partition(":")[2]
    return not path.startswith(SCRATCH) or path.startswith(_OWN_SCRATCH)


def not_yet_on_the_disk(lines: Sequence[str]) -> list[str]:
    """The files of a trace that got their last names before the disk had their bytes.

    After a power failure such a name may stand for an empty file, or for half of one.
    """
    unsynced: set[str] = set()
    early = []
    for line in lines:
        point, _, source = line.partition(" ")[2].partition(" < ")
        operation, _, name = point.rpartition("#")[0].partition(":")
        if operation in ("write", "truncate"):
            unsynced.add(name)
        elif operation in ("fsync", "unlink"):
            unsynced.discard(name)
        elif operation in ("rename", "link"):
            late = {one for one in unsynced if one == source or one.startswith(f"{source}/")}
            if late and not name.startswith(SCRATCH):  # what is lost with the power is as well as removed
                early.append(f"{name} (written as {', '.join(sorted(late))})")
            unsynced -= late
    return early


@dataclass(frozen=True)
class Watched:
    """A command in a case's folder, of which `data`, `run` and the scratch space are watched.

    Attributes:
        term: point at which the command is sent SIGTERM, whatever else happens.
        is_fresh: see `Commands.run`.
    """

    program: str
    arguments: Sequence[object]
    folder: Path
    term: str | None = None
    is_fresh: bool = False

    @property
    def scratch(self) -> Path:
        return self.folder / "tmp"

    def traced(self, commands: Commands) -> tuple[Ran, list[str]]:
        """Runs it undisturbed; what it did, in lines of `interposer.watch`."""
        log = self.folder / "points.log"
        ran = self._run(commands, {watch.LOG: str(log)})
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return ran, lines

    def disturbed(self, commands: Commands, point: Point, fault: str) -> tuple[Ran, bool]:
        """Runs it with a fault; how it ended, and whether it came to that point."""
        (self.folder / "flags" / "fault").unlink(missing_ok=True)
        ran = self._run(commands, {watch.POINT: point.name, watch.FAULT: fault})
        return ran, (self.folder / "flags" / "fault").exists()

    def undisturbed(self, commands: Commands) -> Ran:
        """Runs it as users do; how it ended."""
        return commands.run(self.program, self.arguments, scratch=self.scratch, is_fresh=self.is_fresh)

    def _run(self, commands: Commands, environment: dict[str, str]) -> Ran:
        flags = self.folder / "flags"
        flags.mkdir(exist_ok=True)
        folders = (("", "data"), ("run/", "run"), (SCRATCH, "tmp"))
        environment |= {
            watch.WATCH: "\n".join(f"{label}={self.folder / name}" for label, name in folders),
            watch.FLAGS: str(flags),
        }
        if self.term is not None:
            environment[watch.TERM] = self.term
        return commands.run(
            self.program, self.arguments, scratch=self.scratch, environment=environment, is_fresh=self.is_fresh
        )
