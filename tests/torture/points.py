"""Every point: each write, fsync, rename, link, unlink, rmdir and mkdir of each command goes wrong in turn.

The command is killed before and after it, or it fails with EIO or ENOSPC, or a write is cut short. Then the command
runs again, undisturbed: what it leaves must be, byte for byte, what a run leaves that nothing disturbed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

from tests.torture.cases import Broken, Case, drawn
from tests.torture.checks import ended_well, no_litter, nothing_in, same_contents
from tests.torture.commands import Ran
from tests.torture.subjects import SUBJECTS, Subject
from tests.torture.watched import Point, not_yet_on_the_disk, points_of
from tests.torture.workspace import Workspace

PART = "points"
_NUM_WALKS, _WALK_STEPS = 20, 3
# How often a sign of life is written depends on the time that the work takes.
_UNSTEADY = re.compile(r"/\.tmp-running/.*#(?!1$)")


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """The cases of each command, in an order that `seed` decides."""
    return {subject.name: partial(_cases_of, subject, seed, workspace) for subject in SUBJECTS}


def _cases_of(subject: Subject, seed: int, workspace: Workspace) -> Iterator[Case]:
    undisturbed, trace = _traced(subject, workspace)
    order = Case(f"{PART}/{subject.name}/order", "order", partial(_check_order, trace))
    points = [point for point in points_of(trace) if not _UNSTEADY.search(point.name)]
    pairs = [(point, fault) for point in points for fault in point.faults]
    kinds = (lambda pair: f"{pair[0].operation}/{pair[1]}", lambda pair: _file_of(pair[0]))
    begin, name = f"{PART}/{subject.name}", f"{seed}/{subject.name}"
    single = [
        Case(f"{begin}/{point.name}/{fault}", fault, partial(_try, subject, workspace, point, fault, undisturbed))
        for point, fault in drawn(pairs, seed=name, kinds=kinds)
    ]
    walks = [
        Case(f"{begin}/{walk}", "walk", partial(_walk, subject, workspace, points, f"{seed}/{walk}", undisturbed))
        for walk in (f"walk-{number}" for number in range(_NUM_WALKS))
    ]
    yield from islice(_with_walks(iter(single), [order, *walks]), subject.max_cases)


def _with_walks(cases: Iterator[Case], others: list[Case]) -> Iterator[Case]:
    """Two of `cases`, one of the others, and so on."""
    for other in others:
        yield from islice(cases, 2)
        yield other
    yield from cases


def _traced(subject: Subject, workspace: Workspace) -> tuple[Mapping[str, str], list[str]]:
    """What an undisturbed run ends with, and what it does."""
    trace: list[str] = []

    def make(folder: Path) -> None:
        subject.begin(workspace, folder)
        watched = subject.watched(workspace, folder)
        ran, lines = watched.traced(workspace.commands)
        ended_well(ran, status=143 if subject.term else subject.status)
        if subject.term:
            ended_well(subject.watched_again(workspace, folder).undisturbed(workspace.commands), status=subject.status)
        no_litter(folder / "data", folder / "run")
        nothing_in(watched.scratch)
        trace.extend(lines)

    folder = workspace.made(f"undisturbed-{subject.name}", make)
    return subject.kept(folder), trace


def _check_order(trace: list[str], _: Path) -> None:
    if early := not_yet_on_the_disk(trace):
        raise Broken(f"renamed before it was flushed: {'; '.join(early)}")


def _try(
    subject: Subject, workspace: Workspace, point: Point, fault: str, undisturbed: Mapping[str, str], folder: Path
) -> None:
    subject.begin(workspace, folder)
    watched = subject.watched(workspace, folder)
    ran, was_there = watched.disturbed(workspace.commands, point, fault)
    if not was_there:
        raise Broken(f"it did not come to this point: {ran.described()}")
    _check_end(ran, subject, point, fault, folder)
    if ran.status == subject.status and fault != "kill-worker":
        # It says that all is well, so it must be; what it could not remove is the next run's to remove.
        same_contents(_without_temporaries(subject.kept(folder)), undisturbed)
    _check_rerun(subject, workspace, undisturbed, folder)


def _walk(
    subject: Subject, workspace: Workspace, points: list[Point], seed: str, undisturbed: Mapping[str, str], folder: Path
) -> None:
    """Several faults, each in the run that goes on after the one before; a run may have no such point any more."""
    random, done = Random(seed), []
    subject.begin(workspace, folder)
    for number in range(_WALK_STEPS):
        # One of few operations on one of few files is as likely as a write in the middle of a large one.
        (point,) = islice(drawn(points, seed=str(random.random()), kinds=(lambda p: p.operation, _file_of)), 1)
        watched = (subject.watched_again if number else subject.watched)(workspace, folder)
        fault = random.choice(point.faults)
        ran, was_there = watched.disturbed(workspace.commands, point, fault)
        done.append(f"{point.name}/{fault}{'' if was_there else ' (no more)'}")
        ended_well(ran, status={-9, 0, 1, 2, 143})
    try:
        _check_rerun(subject, workspace, undisturbed, folder)
    except Broken as broken:
        raise Broken(f"after {', '.join(done)}: {broken}") from None


def _check_rerun(subject: Subject, workspace: Workspace, undisturbed: Mapping[str, str], folder: Path) -> None:
    """The command ends, undisturbed, with what it should have ended with in the first place."""
    watched = subject.watched_again(workspace, folder)
    ended_well(watched.undisturbed(workspace.commands), status=subject.status)
    same_contents(subject.kept(folder), undisturbed)
    no_litter(folder / "data", folder / "run")
    nothing_in(watched.scratch)


def _file_of(point: Point) -> str:
    return point.name.rpartition("#")[0]


def _check_end(ran: Ran, subject: Subject, point: Point, fault: str, folder: Path) -> None:
    """The exit status and the words are those of the fault."""
    own = {subject.status, 143} if subject.term else {subject.status}
    if fault in ("kill", "kill-after", "cut"):
        ended_well(ran, status=-9)
    elif fault == "short":
        ended_well(ran, status=own)
    elif fault == "kill-worker":
        ended_well(ran, status={*own, 1})
    else:
        # A file that is not on the disk is no success; other operations may be done without.
        ended_well(ran, status={1, 2} if point.operation == "fsync" else {*own, 1, 2})
        if ran.status not in own and str(folder) not in ran.output:
            raise Broken(f"no path in what it says: {ran.described()}")


def _without_temporaries(files: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in files.items() if "/.tmp-" not in f"/{name}"}
