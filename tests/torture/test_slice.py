"""A slice of the campaign: some cases of every part, in the minute that a test may take."""

from pathlib import Path

from tests.torture.__main__ import PARTS, parts_of, report
from tests.torture.campaign import run_campaign
from tests.torture.workspace import Workspace

SEED = 1
NUM_CASES = 45


def test_nothing_of_a_slice_is_lost_left_behind_or_served_wrong(tmp_path: Path) -> None:
    with Workspace(tmp_path) as workspace:
        parts = parts_of(None, seed=SEED, workspace=workspace)
        result = run_campaign(parts, workspace, seconds=240, max_cases=NUM_CASES)
    assert not result.failed, report(result, seed=SEED, commit="here")
    assert {one.case.part for one in result.outcomes} == set(PARTS)
