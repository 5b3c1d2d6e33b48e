"""A sample of the campaign: a few cases of every part, in about a minute."""

from pathlib import Path

import pytest

from tests.forks import Forks
from tests.torture.__main__ import PARTS, parts_of, report
from tests.torture.campaign import run_campaign
from tests.torture.subjects import SUBJECTS
from tests.torture.workspace import Workspace

SEED = 1
# They import torch in each new process, which takes longer than everything else together.
TOO_LONG = {"text-fresh"}
NUM_CASES = 48  # a third from each part, so that each command is included


@pytest.mark.timeout(1200)  # on a shared machine; it takes a minute on an idle one
def test_nothing_of_a_slice_is_lost_left_behind_or_served_wrong(tmp_path: Path, forks: Forks) -> None:
    with Workspace(tmp_path, forks) as workspace:
        parts = parts_of(None, seed=SEED, workspace=workspace)
        for name in TOO_LONG:
            del parts["points"][name]
        result = run_campaign(parts, workspace, seconds=1100, max_cases=NUM_CASES)
    assert not result.failed, report(result, seed=SEED, commit="here")
    tried = {(one.case.part, one.case.subject) for one in result.outcomes}
    assert {part for part, _ in tried} == set(PARTS)
    assert tried >= {("points", subject.name) for subject in SUBJECTS if subject.name not in TOO_LONG}
