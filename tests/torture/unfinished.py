"""State that readers see between a kill and the rerun, and the failures that a run records.

A command is killed at each write, fsync and rename of a durable file, before or after it, or after half of a write. No
other command runs before readers look:

- Each file has, byte for byte, its old content or content that the undisturbed command publishes.
- The files of each commit are complete, and every sample of its shards comes from the earlier run or equals the sample
  of the undisturbed run.
- `prep status` reports no damage.

`commits` has only kills right after a commit gets its name.

`failures`: sources are damaged, and the command is killed or not. The run that completes has exit status 1. Exactly its
failures are in the commits of their shards and in failures.jsonl; the same holds after an additional run.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random

from clipmill.prep.synthetic import FrameNumberVideo
from tests.prep.running import contents
from tests.torture import bases
from tests.torture.cases import Broken, Case, draw
from tests.torture.checks import ended_well, samples, whole_shards
from tests.torture.points import trace_undisturbed
from tests.torture.subjects import SUBJECTS, Subject
from tests.torture.watched import Point, Watched, points_of
from tests.torture.workspace import Workspace

PART = "unfinished"
_NAMES = ("manifest-second", "chunk", "chunk-again", "captions", "scores", "latents", "text-again", "retry")
_COLUMNS = {"chunk": "video", "chunk-again": "video", "retry": "video", "scores": "scores", "latents": "latents"}
_OPERATIONS = ("write", "truncate", "fsync", "rename")
_FAULTS = ("kill", "kill-after", "cut")
# Journals and heartbeats, which grow in place, and temporary files.
_IN_PLACE = re.compile(r"(^|/)(\.tmp-|answers/|bank/)")
_UNREAD = re.compile(r"TMPDIR|/\.tmp-running/|\.lock#|-workers#")
_COMMITTED = re.compile(r"rename:.*/commits/\d+\.json#")
_NUM_FAILURES, _NUM_VIDEOS = 30, 6
_CHUNK = (*bases.CHUNK, *bases.ENGINE)


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each command, in an order determined by `seed`."""
    killed = [subject for subject in SUBJECTS if subject.name in _NAMES]
    of_commands = {subject.name: partial(_cases, seed, workspace, subject) for subject in killed}
    commits = partial(_cases_of_commits, seed, workspace)
    return {**of_commands, "commits": commits, "failures": partial(_cases_of_failures, seed, workspace)}


def _cases(seed: int, workspace: Workspace, subject: Subject) -> Iterator[Case]:
    _, trace = trace_undisturbed(subject, workspace)
    pairs = [
        (point, fault)
        for point in points_of(trace)
        if point.operation in _OPERATIONS and not _UNREAD.search(point.name)
        for fault in _FAULTS
        if fault in point.faults or (fault == "kill-after" and point.operation != "write")
    ]
    kinds = (lambda pair: f"{pair[0].operation}/{pair[1]}", lambda pair: pair[0].name.rpartition("#")[0])
    for point, fault in draw(pairs, seed=f"{seed}/{PART}/{subject.name}", kinds=kinds):
        name = f"{PART}/{subject.name}/{point.name}/{fault}"
        yield Case(name, fault, partial(_look, subject, workspace, point, fault))


def _cases_of_commits(seed: int, workspace: Workspace) -> Iterator[Case]:
    """Yield kills right after a commit gets its name: the files that it lists must be complete by then."""
    pairs = []
    for subject in SUBJECTS:
        if subject.name in _COLUMNS:
            points = points_of(trace_undisturbed(subject, workspace)[1])
            pairs += [(subject, point) for point in points if _COMMITTED.match(point.name)]
    for subject, point in draw(pairs, seed=f"{seed}/{PART}/commits", kinds=[lambda pair: pair[0].name]):
        name = f"{PART}/commits/{subject.name}/{point.name}"
        yield Case(name, "kill-after", partial(_look, subject, workspace, point, "kill-after"))


def _look(subject: Subject, workspace: Workspace, point: Point, fault: str, folder: Path) -> None:
    undisturbed = workspace.folder / "made" / f"undisturbed-{subject.name}"
    subject.begin(workspace, folder)
    data, column = folder / "data", _COLUMNS.get(subject.name)
    before = contents(data)
    ran, was_there = subject.watched(workspace, folder).disturb(workspace.commands, point, fault)
    if not was_there:
        raise Broken(f"it did not come to this point: {ran.describe()}")
    ended_well(ran, status=-9)
    versions = {*before.values(), *(undisturbed / "versions.txt").read_text().split()}
    versions |= set(contents(undisturbed / "data").values())
    torn = [name for name, digest in contents(data).items() if digest not in versions and not _IN_PLACE.search(name)]
    if torn:
        raise Broken(f"neither the old file nor a new one: {', '.join(torn)}")
    whole_shards(data)
    if column is not None and any(data.glob(f"{column}/*/commits/[0-9]*.json")):
        folders = [undisturbed, *([subject.base(workspace)] if subject.base is not None else [])]
        having = [made / "data" for made in folders if any(made.glob(f"data/{column}/*/commits/[0-9]*.json"))]
        known = {digest for columns_of in having for digest in samples(columns_of, column=column).values()}
        if other := [name for name, digest in samples(data, column=column).items() if digest not in known]:
            raise Broken(f"neither an old sample nor a new one: {', '.join(other[:6])}")
    ended_well(workspace.commands.run("prep", ["status", "--data", data], scratch=folder / "tmp"), status=0)


def _cases_of_failures(seed: int, workspace: Workspace) -> Iterator[Case]:
    for number in range(_NUM_FAILURES):
        random = Random(f"{seed}/{PART}/failures/{number}")
        damaged = sorted(random.sample(range(_NUM_VIDEOS), random.randrange(1, 4)))
        is_killed = random.random() < 0.5
        name = f"{PART}/failures/{number:02d}-{'+'.join(map(str, damaged))}{'-killed' if is_killed else ''}"
        kind = "killed" if is_killed else "damaged"
        check = partial(_check_failures, workspace, damaged, is_killed=is_killed)
        yield Case(name, kind, check)


def _check_failures(workspace: Workspace, damaged: list[int], folder: Path, *, is_killed: bool) -> None:
    data = folder / "data"
    shutil.copytree(workspace.made("failing-videos", _write_videos), folder / "videos")
    bases.prep(workspace, folder, "manifest", "folder", folder / "videos")
    for number in damaged:
        _damage(folder / "videos" / f"{number}.mp4")
    if is_killed:
        watched = Watched("prep", (*_CHUNK, "--data", data), folder)
        _, was_there = watched.disturb(workspace.commands, _first_commit(workspace), "kill-after")
        if not was_there:
            raise Broken("the command was not killed: it did not come to its first commit")
    for statuses in ({1}, {0, 1}):  # a rerun may skip the failures that the previous run reported
        ran = workspace.commands.run("prep", [*_CHUNK, "--data", data], scratch=folder / "tmp")
        ended_well(ran, status=statuses)
        expected = {(str(number), "decode_errors") for number in damaged}
        records = [json.loads(path.read_text()) for path in data.glob("video/*/commits/[0-9]*.json")]
        committed = {(failure["video_id"], failure["code"]) for record in records for failure in record["failures"]}
        (listing,) = data.glob("video/*/failures.jsonl")
        listed = {(line["video_id"], line["code"]) for line in map(json.loads, listing.read_text().splitlines())}
        if not committed == listed == expected:
            where = f"in commits {sorted(committed)}, listed {sorted(listed)}"
            raise Broken(f"the failures are {sorted(expected)}, {where}: {ran.describe()}")
        shown = {name.split("_")[0] for name in samples(data)}
        if shown & {str(number) for number in damaged} or len(shown) != _NUM_VIDEOS - len(damaged):
            raise Broken(f"chunks of {sorted(shown)}: {ran.describe()}")


def _first_commit(workspace: Workspace) -> Point:
    """Return the point at which the first shard of `prep chunk` gets its commit.

    The path of a commit contains the name of the variant, so the point is taken from a trace.
    """
    chunk = next(subject for subject in SUBJECTS if subject.name == "chunk")
    return next(point for point in points_of(trace_undisturbed(chunk, workspace)[1]) if _COMMITTED.match(point.name))


def _write_videos(folder: Path) -> None:
    for number in range(_NUM_VIDEOS):
        video = FrameNumberVideo(num_frames=12, fps=Fraction(10), width=64, height=64, first_number=50 * number)
        video.write(folder / f"{number}.mp4")


def _damage(path: Path) -> None:
    """Overwrite the last frames of a video; a probe decodes only the first one."""
    content, state = bytearray(path.read_bytes()), path.stat()
    end = content.index(b"moov") - 4
    content[end - 150 : end] = bytes(150)
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
