"""Every point: each write, fsync, rename, link, unlink, rmdir and mkdir of each command goes wrong in turn.

The command is killed before and after it, or it fails with EIO or ENOSPC, or a write is cut short. Then the command
runs again, undisturbed: what it leaves must be, byte for byte, what a run leaves that nothing disturbed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from tests.torture.cases import Broken, Case, drawn
from tests.torture.checks import ended_well, no_litter, nothing_in, same_contents
from tests.torture.commands import Ran
from tests.torture.subjects import SUBJECTS, Subject
from tests.torture.watched import Point, not_yet_on_the_disk, points_of
from tests.torture.workspace import Workspace

PART = "points"
# How often a sign of life is written depends on the time that the work takes.
_UNSTEADY = re.compile(r"/\.tmp-running/.*#(?!1$)")


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """The cases of each command, in an order that `seed` decides."""
    return {subject.name: partial(_cases_of, subject, seed, workspace) for subject in SUBJECTS}


def _cases_of(subject: Subject, seed: int, workspace: Workspace) -> Iterator[Case]:
    undisturbed, trace = _traced(subject, workspace)
    points = [point for point in points_of(trace) if not _UNSTEADY.search(point.name)]
    pairs = [(point, fault) for point in points for fault in point.faults]
    kinds = (lambda pair: f"{pair[0].operation}/{pair[1]}", lambda pair: pair[0].name.rpartition("#")[0])
    in_order = drawn(pairs, seed=f"{seed}/{subject.name}", kinds=kinds)
    for number, (point, fault) in enumerate(islice(in_order, subject.max_cases)):
        if number == 2:
            yield Case(f"{PART}/{subject.name}/order", "order", partial(_check_order, trace))
        run = partial(_try, subject, workspace, point, fault, undisturbed)
        yield Case(f"{PART}/{subject.name}/{point.name}/{fault}", fault, run)


def _traced(subject: Subject, workspace: Workspace) -> tuple[Mapping[str, str], list[str]]:
    """What an undisturbed run ends with, and what it does."""
    trace: list[str] = []

    def make(folder: Path) -> None:
        subject.begin(workspace, folder)
        watched = subject.watched(workspace, folder)
        ran, lines = watched.traced(workspace.commands)
        ended_well(ran, status=143 if subject.term else subject.status)
        if subject.term:
            ended_well(subject.run_again(workspace, folder), status=subject.status)
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
    ended_well(subject.run_again(workspace, folder), status=subject.status)
    same_contents(subject.kept(folder), undisturbed)
    no_litter(folder / "data", folder / "run")
    nothing_in(watched.scratch)


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
