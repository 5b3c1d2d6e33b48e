"""New variants beside a complete one, while parts of them cannot be created.

Sources are missing or rejected, a disk is full, or commands are killed. After every attempt, and after `prep gc` and
`prep status`, readers get the earlier complete variant until the new one is complete. Once the cause is removed, a run
or `prep retry` completes the new variant, with the bytes of an undisturbed run.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random

from clipmill.prep.synthetic import FrameNumberVideo
from tests.object_storage.faults import Fault, Faults, faulty
from tests.torture import bases
from tests.torture.buckets import shared_server
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, no_litter, samples
from tests.torture.commands import Ran
from tests.torture.watched import Watched, points_of
from tests.torture.workspace import Workspace, copy

PART = "variants"
_NUM_CASES = 40  # cases per subject
_CHUNK = (*bases.CHUNK, *bases.ENGINE)
_NEW = {
    "gone": (*_CHUNK, "--crf", 35),
    "refused": (*_CHUNK, "--crf", 35),
    "shots": (*bases.SHOTS, *bases.ENGINE, "--min-len", "100ms"),
    "disk": (*_CHUNK, "--crf", 35),
    "latents": (*bases.LATENTS[:4], 48, *bases.LATENTS[5:], *bases.ENGINE),
}
_NUM_VIDEOS = 4


@dataclass(frozen=True)
class Subject:
    """Kind of failures.

    Attributes:
        name: Key of `_NEW`, the command that creates the new variant.
        column: Column of the variant.
        faults: Names of the faults that may happen to an attempt.
    """

    name: str
    column: str
    faults: tuple[str, ...]


SUBJECTS = (
    Subject("gone", "video", ("gone", "gone", "full", "kill")),
    Subject("refused", "video", ("refused",)),
    Subject("shots", "video", ("gone", "kill")),
    Subject("disk", "video", ("full", "full", "kill")),
    Subject("latents", "latents", ("full", "kill")),
)


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases for each kind of failures, which are drawn from `seed`."""
    return {subject.name: partial(_cases, seed, workspace, subject) for subject in SUBJECTS}


def _cases(seed: int, workspace: Workspace, subject: Subject) -> Iterator[Case]:
    for number in range(_NUM_CASES):
        random = Random(f"{seed}/{PART}/{subject.name}/{number}")
        attempts = [random.choice(subject.faults) for _ in range(random.choice((1, 1, 2, 3)))]
        name = f"{PART}/{subject.name}/{number:02d}-{'-'.join(attempts)}"
        yield Case(name, attempts[0], partial(_try, workspace, subject, attempts, name=f"{seed}/{name}"))


class _Trial:
    """Folder of a case: sources, which may be removed, and a complete variant; a context manager."""

    def __init__(self, workspace: Workspace, subject: Subject, folder: Path) -> None:
        self.workspace, self.subject, self.folder = workspace, subject, folder
        self._stack, self._environment = ExitStack(), dict[str, str]()
        self._proxy: Faults | None = None

    def begin(self) -> None:
        """Create the complete variant."""
        if self.subject.name == "latents":
            copy(bases.with_columns(self.workspace), self.folder)
            return
        videos = self.workspace.made("variants-videos", _write_videos)
        if self.subject.name == "refused":
            sources = self._in_a_bucket(videos)
        else:
            copy(videos, self.folder / "videos")
            sources = str(self.folder / "videos")
        self.run("manifest", "folder", sources, status=0)
        self.run(*_CHUNK, status=0)

    def _in_a_bucket(self, videos: Path) -> str:
        server = shared_server()
        self._proxy = self._stack.enter_context(faulty(server.port))
        address = server.make_bucket(f"variants-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}")
        for path in videos.iterdir():
            server.put(address, f"videos/{path.name}", path.read_bytes())
        self._environment = server.environment(endpoint=self._proxy.endpoint)
        return f"{address}/videos"

    def run(self, *arguments: object, status: int | set[int] = 0) -> Ran:
        """Run `prep` without kills, on the sources in their current state."""
        words = [*arguments, "--data", self.folder / "data"]
        run = self.workspace.commands.run
        return ended_well(run("prep", words, scratch=self.folder / "tmp", environment=self._environment), status=status)

    def attempt(self, fault: str, random: Random) -> Ran:
        """Try to create the new variant while something fails."""
        new = _NEW[self.subject.name]
        names = random.sample(range(_NUM_VIDEOS), random.randrange(1, _NUM_VIDEOS))
        if fault == "gone":
            for number in names:
                shutil.move(self.folder / "videos" / f"{number}.mp4", self.folder / f"{number}.away")
            return self.run(*new, status={0, 1})  # 0 if an earlier attempt created all of it
        if fault == "refused":
            assert self._proxy is not None
            numbers = "|".join(map(str, names))
            self._proxy.set(Fault("error", path=rf"videos/({numbers})\.mp4", status=403, code="AccessDenied"))
            return self.run(*new, status={0, 1})
        watched = Watched("prep", (*new, "--data", self.folder / "data"), self.folder)
        kind, operations = ("kill-after", ("rename", "unlink")) if fault == "kill" else ("full", ("open", "write"))
        lines = _trace(self.workspace, self.subject)
        points = [point for point in points_of(lines) if point.operation in operations and "TMPDIR" not in point.name]
        ran, was_there = watched.disturb(self.workspace.commands, random.choice(points), kind)
        return ended_well(ran, status=({-9} if fault == "kill" else {0, 1, 2}) if was_there else {0})

    def mend(self) -> None:
        """Restore the sources."""
        for path in self.folder.glob("*.away"):
            path.rename(self.folder / "videos" / f"{path.stem}.mp4")
        if self._proxy is not None:
            self._proxy.set()

    def samples(self) -> Mapping[str, str]:
        """Return the samples that readers of the column get."""
        return samples(self.folder / "data", column=self.subject.column)

    def __enter__(self) -> "_Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _write_videos(folder: Path) -> None:
    for number in range(_NUM_VIDEOS):
        video = FrameNumberVideo(num_frames=12, fps=Fraction(10), width=64, height=64, first_number=50 * number)
        video.write(folder / f"{number}.mp4")


def _make_undisturbed(workspace: Workspace, subject: Subject) -> Path:
    """Return a folder after a run without faults: the samples of the new variant, and `trace.txt`."""

    def make(folder: Path) -> None:
        with _Trial(workspace, subject, folder) as trial:
            trial.begin()
            watched = Watched("prep", (*_NEW[subject.name], "--data", folder / "data"), folder)
            if subject.name == "refused":
                trial.run(*_NEW[subject.name])
                return
            ran, lines = watched.trace(workspace.commands)
            ended_well(ran, status=0)
            (folder / "trace.txt").write_text("\n".join(lines))

    return workspace.made(f"variants-{subject.name}", make)


def _trace(workspace: Workspace, subject: Subject) -> list[str]:
    return (_make_undisturbed(workspace, subject) / "trace.txt").read_text().splitlines()


def _try(workspace: Workspace, subject: Subject, attempts: list[str], folder: Path, *, name: str) -> None:
    random = Random(name)
    complete = samples(_make_undisturbed(workspace, subject) / "data", column=subject.column)
    with _Trial(workspace, subject, folder) as trial:
        trial.begin()
        first = trial.samples()
        for fault in attempts:
            ran = trial.attempt(fault, random)
            _require_complete(trial, (first, complete), ran)
            for command in random.sample(("gc", "status", "gc"), 2):
                later = trial.run(command, status={0, 1} if command == "gc" else 0)
                _require_complete(trial, (first, complete), later, before=ran)
            trial.mend()
        ran = trial.run(*(("retry", *bases.ENGINE) if _is_retried(attempts, random, subject) else _NEW[subject.name]))
        if trial.samples() != complete:
            ran = trial.run(*_NEW[subject.name])
        _require_complete(trial, (complete,), ran)
        ran = trial.run("gc")
        _require_complete(trial, (complete,), ran)
        no_litter(folder / "data")


def _is_retried(attempts: list[str], random: Random, subject: Subject) -> bool:
    """Return True if `prep retry` is to complete the variant.

    This requires the default column of `prep retry`, and failures that it can try again.
    """
    return subject.column == "video" and set(attempts) <= {"gone", "refused"} and random.random() < 0.5


def _require_complete(
    trial: _Trial, states: tuple[Mapping[str, str], ...], ran: Ran, *, before: Ran | None = None
) -> None:
    members = trial.samples()
    if members not in states:
        numbers = " or ".join(str(len(state)) for state in states)
        earlier = "" if before is None else f"\nbefore: {before.describe()}"
        raise Broken(
            f"readers get {len(members)} members, not {numbers} of a complete variant: {ran.describe()}{earlier}"
        )
