"""Two samples of the campaign: a few cases every day, and a case of nearly every part and command in `make nightly`."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.torture.__main__ import parts_of, report
from tests.torture.campaign import Subjects, run_campaign
from tests.torture.cases import Case
from tests.torture.subjects import SUBJECTS
from tests.torture.workspace import Workspace

SEED = 1
# These subjects start Ray or new interpreters, which prep/core/test_killed.py kills as well, or wait for leases. They
# take longer than all other subjects together.
TOO_LONG = {"chunk-ray", "chunk-fresh", "text-fresh", "late-chunk", "late-gc", "late-gc-twice", "late-scores"}
# These files share the format, writer, reader and repair of another subject's files.
LIKE_OTHERS = {"probes", "contents", "latents-video", "latents-tars", "latents-indexes", "text-indexes"}
LIKE_OTHERS |= {"merged-tables", "scores-tars", "scores-indexes", "subtitles", "packets-mjpeg"}
# Each of these files is damaged, detected and repaired in manifests/test_damaged_manifests.py, shards/test_contents.py,
# prep/video/test_rerun.py, prep/upkeep/test_verify_command.py and prep/upkeep/test_records.py.
DAMAGED_ELSEWHERE = {"tables", "mapped-captions", "lists", "text-tars", "video-indexes", "energon-indexes"}
DAMAGED_ELSEWHERE |= {"manifest", "layouts", "dataset", "recipes", "commits", "video-tars"}
# These subjects run the commands of other subjects, with a different start or end. `unfinished` contains two of them;
# prep/core/test_parts.py, prep/video/test_detection.py and train/test_resume_auto.py kill the others.
SAME_COMMANDS = {"manifest-second", "chunk-again", "text-again", "train-stopped", "chunk-part", "chunk-shots"}
# prep/core/test_left_behind.py kills this command at every moment.
KILLED_ELSEWHERE = {"gc"}
# These subjects use the same machinery as `scores`, `latents` and `train`; train/distributed also kills the last one.
# prep/text/test_run.py, prep/captions/test_endpoint.py and prep/upkeep/test_inspect.py kill and rerun the others.
LIKE_OTHERS |= {"captions", "text", "vlm", "inspect", "train-resumed"}
# Records and input files; prep/upkeep/test_records.py, manifests/test_hostile_annotations.py,
# prep/video/test_bad_input.py, train/data/test_hostile_tars.py or train/inference/test_bad_weights.py has a case of
# each.
DAMAGED_ELSEWHERE |= {
    "shots",
    "further-captions",
    "scores-tables",
    "name",
    "annotations",
    "source",
    "tar",
    "config",
    "checkpoint",
}
LEFT_OUT = TOO_LONG | LIKE_OTHERS | DAMAGED_ELSEWHERE | SAME_COMMANDS | KILLED_ELSEWHERE
# Number of cases per subject. `make nightly` has seven more parts, each with a shorter test elsewhere: `buckets`
# (manifests/storage/test_late_writers.py), `runs` (train/test_bucket_runs.py), `answers`
# (prep/captions/test_endpoint.py), `variants` (prep/core/test_replacement.py), `nodes` (prep/engines/test_cluster.py),
# `keys` (manifests/storage/test_credentials.py), and `marks` (test_many_readers.py).
NUM_CASES = {"points": 1, "damage": 1, "hostile": 1, "unfinished": 1, "sources": 1}
# Only some subjects of these parts, because each of their cases runs several commands.
SUBJECTS_OF = {
    "unfinished": {"chunk-again"},
    "sources": {"mp4"},
}


# Two killed commands, a damaged file and a hostile file. All four cases need only the cheapest data.
EVERY_DAY = {("points", "manifest-first"), ("points", "chunk"), ("damage", "packets"), ("hostile", "weights")}


def test_nothing_of_a_few_cases_is_lost_left_behind_or_served_wrong(tmp_path: Path, forks: Forks) -> None:
    assert run_slice(tmp_path, forks, lambda part, subject: (part, subject) in EVERY_DAY) == EVERY_DAY


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # limit for a shared machine; an idle one takes a minute
def test_nothing_of_a_slice_is_lost_left_behind_or_served_wrong(tmp_path: Path, forks: Forks) -> None:
    tried = run_slice(tmp_path, forks, is_in_slice)
    assert {part for part, _ in tried} == set(NUM_CASES)
    assert tried >= {("points", subject.name) for subject in SUBJECTS if subject.name not in LEFT_OUT}


def is_in_slice(part: str, subject: str) -> bool:
    """Return True if the slice has a case of a subject."""
    return subject in SUBJECTS_OF[part] if part in SUBJECTS_OF else subject not in LEFT_OUT


def first_cases(draw: Callable[[], Iterator[Case]], count: int) -> Iterator[Case]:
    """Return the first `count` cases of a subject."""
    return islice(draw(), count)


def run_slice(folder: Path, forks: Forks, is_included: Callable[[str, str], bool]) -> set[tuple[str, str]]:
    """Run the first cases of the included subjects; return the part and subject of each. All cases must pass."""
    with Workspace(folder, forks) as workspace:
        parts: dict[str, Subjects] = {}
        for part, subjects in parts_of(NUM_CASES, seed=SEED, workspace=workspace).items():
            for name, draw in subjects.items():
                if is_included(part, name):
                    parts.setdefault(part, {})[name] = partial(first_cases, draw, NUM_CASES[part])
        result = run_campaign(parts, workspace, seed=SEED, seconds=1100)
    assert not result.failed, report(result, commit="here")
    return {(outcome.case.part, outcome.case.subject) for outcome in result.outcomes}
