"""Fault injection at every point: each write, fsync, rename, link, unlink, rmdir and mkdir of each command.

The command is killed before or after the operation, the operation fails with EIO or ENOSPC, or a write is truncated.
Processes that read source videos are killed, once or each time, and so is ffmpeg. Then the command runs again without
faults: the result must be byte-identical to the result of an undisturbed run. A video whose readers are killed each
time is omitted from the first run, and may end up in additional shards; its samples must be the same.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well, no_litter, nothing_in, same_contents, samples, whole_shards
from tests.torture.commands import Ran
from tests.torture.subjects import SUBJECTS, Subject
from tests.torture.watched import Point, not_yet_on_the_disk, points_of
from tests.torture.workspace import Workspace

PART = "points"
_NUM_WALKS, _WALK_STEPS = 20, 3
_OF_WORKERS = ("kill-worker", "kill-2", "kill-3", "kill-each", "kill-started")  # the command continues
# The number of heartbeats depends on the duration of the work.
_UNSTEADY = re.compile(r"/\.tmp-running/.*#(?!1$)")


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each command, in an order determined by `seed`."""
    return {subject.name: partial(_cases_of, subject, seed, workspace) for subject in SUBJECTS}


def _cases_of(subject: Subject, seed: int, workspace: Workspace) -> Iterator[Case]:
    undisturbed, trace = trace_undisturbed(subject, workspace)
    order = Case(f"{PART}/{subject.name}/order", "order", partial(_check_order, trace))
    points = [point for point in points_of(trace) if not _UNSTEADY.search(point.name)]
    pairs = [(point, fault) for point in points for fault in point.faults]
    kinds = (lambda pair: f"{pair[0].operation}/{pair[1]}", lambda pair: _file_of(pair[0]))
    begin, name = f"{PART}/{subject.name}", f"{seed}/{subject.name}"
    single = [
        Case(f"{begin}/{point.name}/{fault}", fault, partial(_try, subject, workspace, point, fault, undisturbed))
        for point, fault in draw(pairs, seed=name, kinds=kinds)
    ]
    walks = [
        Case(f"{begin}/{walk}", "walk", partial(_walk, subject, workspace, points, f"{seed}/{walk}", undisturbed))
        for walk in (f"walk-{number}" for number in range(_NUM_WALKS))
    ]
    yield from islice(_with_walks(iter(single), [order, *walks]), subject.max_cases)


def _with_walks(cases: Iterator[Case], others: list[Case]) -> Iterator[Case]:
    """Alternate two of `cases` with one of `others`."""
    for other in others:
        yield from islice(cases, 2)
        yield other
    yield from cases


def trace_undisturbed(subject: Subject, workspace: Workspace) -> tuple[Mapping[str, str], list[str]]:
    """Trace a run without faults; return its final contents and its log of operations."""

    def make(folder: Path) -> None:
        subject.begin(workspace, folder)
        watched = subject.watched(workspace, folder)
        ran, lines = watched.trace(workspace.commands)
        ended_well(ran, status=143 if subject.term else subject.status)
        if subject.term:
            ended_well(
                subject.watched_again(workspace, folder).run_undisturbed(workspace.commands), status=subject.status
            )
        no_litter(folder / "data", folder / "run")
        nothing_in(watched.scratch)
        (folder / "trace.txt").write_text("\n".join(lines))

    folder = workspace.made(f"undisturbed-{subject.name}", make)
    return subject.kept(folder), (folder / "trace.txt").read_text().splitlines()


def _check_order(trace: list[str], _: Path) -> None:
    if early := not_yet_on_the_disk(trace):
        raise Broken(f"renamed before it was flushed: {'; '.join(early)}")


def _try(
    subject: Subject, workspace: Workspace, point: Point, fault: str, undisturbed: Mapping[str, str], folder: Path
) -> None:
    subject.begin(workspace, folder)
    watched = subject.watched(workspace, folder)
    ran, was_there = watched.disturb(workspace.commands, point, fault)
    if not was_there:
        raise Broken(f"it did not come to this point: {ran.describe()}")
    _check_end(ran, subject, point, fault, folder)
    whole_shards(folder / "data")
    if ran.status == subject.status:
        # The command reports success, so the result must be complete. Files that it could not remove are left to the
        # next run. A warning names derived files that it could not write; their earlier versions may remain.
        unwritten = {name for name in undisturbed if f"{name} was not written" in ran.output}
        digests, expected = (
            {name: digest for name, digest in contents.items() if name not in unwritten}
            for contents in (_without_temporaries(subject.kept(folder)), undisturbed)
        )
        same_contents(digests, expected)
    if fault == "kill-each":
        ended_well(subject.watched_last(workspace, folder).run_undisturbed(workspace.commands), status=subject.status)
        undisturbed_folder = workspace.folder / "made" / f"undisturbed-{subject.name}"
        same_contents(samples(folder / "data"), samples(undisturbed_folder / "data"))
    else:
        _check_rerun(subject, workspace, undisturbed, folder)


def _walk(
    subject: Subject, workspace: Workspace, points: list[Point], seed: str, undisturbed: Mapping[str, str], folder: Path
) -> None:
    """Inject several faults, each in the run that continues after the previous fault; a point may no longer occur."""
    random, done = Random(seed), []
    subject.begin(workspace, folder)
    for number in range(_WALK_STEPS):
        # Weighted so that a rare operation on a rare file is as likely as one of the many writes to a large file.
        (point,) = islice(draw(points, seed=str(random.random()), kinds=(lambda p: p.operation, _file_of)), 1)
        watched = (subject.watched_again if number else subject.watched)(workspace, folder)
        fault = random.choice([fault for fault in point.faults if fault != "kill-each"])
        ran, was_there = watched.disturb(workspace.commands, point, fault)
        done.append(f"{point.name}/{fault}{'' if was_there else ' (no more)'}")
        ended_well(ran, status={-9, 0, 1, 2, 143})
    try:
        _check_rerun(subject, workspace, undisturbed, folder)
    except Broken as broken:
        raise Broken(f"after {', '.join(done)}: {broken}") from None


def _check_rerun(subject: Subject, workspace: Workspace, undisturbed: Mapping[str, str], folder: Path) -> None:
    """Check that the command, run again without faults, produces the expected result."""
    watched = subject.watched_last(workspace, folder)
    ended_well(watched.run_undisturbed(workspace.commands), status=subject.status)
    same_contents(subject.kept(folder), undisturbed)
    no_litter(folder / "data", folder / "run")
    nothing_in(watched.scratch)


def _file_of(point: Point) -> str:
    return point.name.rpartition("#")[0]


def _check_end(ran: Ran, subject: Subject, point: Point, fault: str, folder: Path) -> None:
    """Check that the exit status and the output match the fault."""
    statuses = {subject.status, 143} if subject.term else {subject.status}
    if fault in ("kill", "kill-after", "cut"):
        ended_well(ran, status=-9)
    elif fault == "short":
        ended_well(ran, status=statuses)
    elif fault in _OF_WORKERS:
        ended_well(ran, status={*statuses, 1, 2} if fault == "kill-started" else {*statuses, 1})
    else:
        # A failed fsync must be reported; other operations may be dispensable.
        is_said = point.operation != "fsync" or any(
            text in ran.output for text in ("was not written", "cannot be written")
        )
        ended_well(ran, status={*statuses, 1, 2} if is_said else {1, 2})
        if ran.status not in statuses and str(folder) not in ran.output:
            raise Broken(f"no path in what it says: {ran.describe()}")


def _without_temporaries(files: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in files.items() if "/.tmp-" not in f"/{name}"}
