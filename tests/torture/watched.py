"""Command under the interposer: lists its points, and injects a fault at one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.commands import Commands, Ran
from tests.torture.interposer import watch

SCRATCH = "TMPDIR/"
# Other files in $TMPDIR belong to libraries: tempfile, for example, tests whether the folder is writable.
_OWN_SCRATCH = f"{SCRATCH}scratch-clipmill-"
_KILLS = ("kill", "kill-after")
# Possible faults of an operation. A short write may terminate the process, or be reported to the caller.
_FAULTS = {
    "write": ("kill", "eio", "enospc", "cut", "short"),
    "fsync": ("kill", "eio", "enospc"),
    "read": ("kill",),
    "start": ("kill-started",),
}
_OTHER_FAULTS = (*_KILLS, "eio", "enospc")


@dataclass(frozen=True)
class Point:
    """One file operation of a command: `operation:path#n`.

    Attributes:
        is_driver: True if the command's first process reaches it, not only its workers.
    """

    name: str
    is_driver: bool

    @property
    def operation(self) -> str:
        return self.name.partition(":")[0]

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults that can be injected here, by their names in `interposer.watch`."""
        faults = _FAULTS.get(self.operation, _OTHER_FAULTS)
        if self.is_driver or self.operation == "start":
            return faults
        if self.operation == "read":  # a probe makes one attempt, and a worker a further one
            return (*faults, "kill-worker", "kill-2" if "@probe#" in self.name else "kill-3", "kill-each")
        return (*faults, "kill-worker")


def points_of(lines: Sequence[str]) -> list[Point]:
    """Return the distinct points of a trace, in order of their first occurrence."""
    words = [line.partition(" < ")[0].partition(" ") for line in lines if _is_own(line)]
    of_driver = {name for role, _, name in words if role == "driver"}
    return [Point(name, name in of_driver) for name in dict.fromkeys(name for _, _, name in words)]


def _is_own(line: str) -> bool:
    """Return True if a line of a trace concerns a file of clipmill."""
    path = line.partition(" ")[2].partition(":")[2]
    return not path.startswith(SCRATCH) or path.startswith(_OWN_SCRATCH)


def not_yet_on_the_disk(lines: Sequence[str]) -> list[str]:
    """Return the files in a trace that received their final names before their bytes were synced to disk.

    After a power failure, such a file may be empty or truncated.
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
            late = {path for path in unsynced if path == source or path.startswith(f"{source}/")}
            if late and not name.startswith(SCRATCH):  # losing these files in a power failure is harmless
                early.append(f"{name} (written as {', '.join(sorted(late))})")
            unsynced -= late
    return early


@dataclass(frozen=True)
class Watched:
    """Command in a case's folder, with `data`, `run` and the scratch folder watched.

    Attributes:
        sources: Folder of the source videos, whose readers are watched.
        term: Point at which the command receives SIGTERM, in addition to any fault.
        is_fresh: True to run the command in new interpreters; see `Commands.run`.
    """

    program: str
    arguments: Sequence[object]
    folder: Path
    sources: Path | None = None
    term: str | None = None
    is_fresh: bool = False

    @property
    def scratch(self) -> Path:
        return self.folder / "tmp"

    def trace(self, commands: Commands) -> tuple[Ran, list[str]]:
        """Run the command without faults; return its outcome and its operations, as lines of `interposer.watch`.

        `versions.txt` in the folder then lists the SHA-256 of every file that was renamed to a watched name.
        """
        log = self.folder / "points.log"
        ran = self._run(commands, {watch.LOG: str(log), watch.VERSIONS: str(self.folder / "versions.txt")})
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return ran, lines

    def disturb(self, commands: Commands, point: Point, fault: str) -> tuple[Ran, bool]:
        """Run the command with a fault; return its outcome, and whether it reached the point."""
        for flag in (self.folder / "flags").glob("fault*"):
            flag.unlink()
        ran = self._run(commands, {watch.POINT: point.name, watch.FAULT: fault})
        return ran, (self.folder / "flags" / "fault").exists()

    def run_undisturbed(self, commands: Commands) -> Ran:
        """Run the command without the interposer, as users do, and return its outcome."""
        return commands.run(self.program, self.arguments, scratch=self.scratch, is_fresh=self.is_fresh)

    def _run(self, commands: Commands, environment: dict[str, str]) -> Ran:
        flags = self.folder / "flags"
        flags.mkdir(exist_ok=True)
        folders = [("", self.folder / "data"), ("run/", self.folder / "run"), (SCRATCH, self.folder / "tmp")]
        folders += [] if self.sources is None else [(watch.SOURCES, self.sources)]
        environment |= {
            watch.WATCH: "\n".join(f"{label}={folder}" for label, folder in folders),
            watch.FLAGS: str(flags),
        }
        if self.term is not None:
            environment[watch.TERM] = self.term
        return commands.run(
            self.program, self.arguments, scratch=self.scratch, environment=environment, is_fresh=self.is_fresh
        )
