"""Tests of the outcome of each shard at the end of a run, as a table: a function of plan, commit and report."""

from pathlib import Path

import pytest

from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.parts import Part
from clipmill.prep.core.plan import ShardPlan, ShardState
from clipmill.prep.core.run import why_missing
from clipmill.prep.core.shard_result import ShardResult, Stop
from clipmill.prep.engines import MachineFault
from clipmill.shards.commits import Commit, Failure, ShardFiles

FILES = ShardFiles("000004-0.tar", 1, "0", "000004-0.index.arrow", 1, "0", 3)
COMMITS = {
    "no commit": None,
    "as planned": Commit("text", 4, "train", "planned", FILES, ()),
    "with failures": Commit("text", 4, "train", "planned", FILES, (Failure("v", None, FailureCode.TIMEOUT, ""),)),
    "of before": Commit("text", 4, "train", "before", FILES, ()),
}
RESULTS = {
    "no report": None,
    "made": ShardResult(4),
    "worker lost": ShardResult(4, stopped_by=Stop(FailureCode.WORKER_LOST, "lost")),
    "disk full": ShardResult(4, stopped_by=Stop(FailureCode.DISK_FULL, "full")),
}
NOT_TRIED, REMOVED = "not attempted: the run ended first", "the commit was removed during the run"
NO_COMMIT, NO_TAR = (
    f"the worker reported success, but {why} (data)" for why in ("there is no commit for this plan", "no tar")
)


@pytest.mark.parametrize(
    ("state", "commit", "problem", "result", "why"),
    [
        (ShardState.NEW, "as planned", None, "made", None),
        (ShardState.NEW, "with failures", None, "made", None),
        (ShardState.NEW, "no commit", None, "made", NO_COMMIT),
        (ShardState.CHANGED, "of before", None, "made", NO_COMMIT),
        (ShardState.NEW, "as planned", "no tar", "made", NO_TAR),
        # The shard was committed before the worker disappeared, or before the disk confirmed it.
        (ShardState.NEW, "as planned", None, "worker lost", None),
        (ShardState.NEW, "no commit", None, "worker lost", "lost"),
        (ShardState.NEW, "as planned", None, "disk full", "full"),
        # Another run of the same plan has made the shard in the meantime, or no run has.
        (ShardState.NEW, "as planned", None, "no report", None),
        (ShardState.CHANGED, "of before", None, "no report", NOT_TRIED),
        (ShardState.CORRUPT, "as planned", "no tar", "no report", NOT_TRIED),
        # The commit that contains the failures to retry is older than the run.
        (ShardState.RETRY, "with failures", None, "made", None),
        (ShardState.RETRY, "with failures", None, "worker lost", "lost"),
        (ShardState.RETRY, "as planned", None, "worker lost", None),
        (ShardState.RETRY, "with failures", None, "no report", NOT_TRIED),
        (ShardState.CURRENT, "with failures", None, "no report", None),
        (ShardState.CURRENT, "no commit", None, "no report", REMOVED),
        (ShardState.ORPHANED, "no commit", None, "no report", None),
    ],
)
def test_the_outcome_of_a_shard(
    state: ShardState, commit: str, problem: str | None, result: str, why: str | None
) -> None:
    shard = ShardPlan(4, "train", state, "", "planned", range(3), 3)
    reason = why_missing(
        shard, variant_dir=Path("data"), commit=COMMITS[commit], problem=problem, result=RESULTS[result]
    )
    assert (None if reason is None else reason.message) == why


@pytest.mark.parametrize("state", [state for state in ShardState if state != ShardState.ORPHANED])
@pytest.mark.parametrize(
    ("commit", "problem", "is_made"),
    [
        ("as planned", None, True),
        ("with failures", None, True),
        ("as planned", "no tar", False),
        ("of before", None, False),
        ("no commit", None, False),
    ],
)
def test_a_shard_of_another_part_counts_as_it_lies_there(
    state: ShardState, commit: str, problem: str | None, is_made: bool
) -> None:
    shard = ShardPlan(4, "train", state, "", "planned", range(3), 3)
    reason = why_missing(
        shard,
        variant_dir=Path("data"),
        commit=COMMITS[commit],
        problem=problem,
        result=None,
        other_part=Part(2, 3),
    )
    assert reason == (None if is_made else Stop(FailureCode.SHARD_MISSING, "part 2/3 has not made the shard"))


def test_why_the_run_ended_is_said() -> None:
    shard = ShardPlan(4, "train", ShardState.NEW, "", "planned", range(3), 3)
    reason = why_missing(shard, variant_dir=Path("data"), commit=None, problem=None, result=None, gave_up="disk full")
    assert reason == Stop(FailureCode.SHARD_MISSING, "not attempted: disk full")


SURE, DOUBTFUL = MachineFault("why"), MachineFault("why", is_doubtful=True)


@pytest.mark.parametrize(
    ("code", "num_chunks", "num_reused", "fault", "is_common"),
    [
        # From then on, a full disk and expired keys make everything on this machine fail.
        (FailureCode.DISK_FULL, 0, 0, SURE, True),
        (FailureCode.DISK_FULL, 2, 0, SURE, False),
        (FailureCode.STORAGE_REFUSED, 2, 0, SURE, True),
        (FailureCode.STORAGE_REFUSED, 2, 2, SURE, True),
        # So does a lost mount; next to new samples, only single files may be missing.
        (FailureCode.SOURCE_MISSING, 0, 0, SURE, True),
        (FailureCode.SOURCE_MISSING, 2, 2, SURE, True),
        (FailureCode.SOURCE_MISSING, 2, 0, DOUBTFUL, False),
        (FailureCode.ACCESS_REFUSED, 2, 1, DOUBTFUL, False),
        # A program fails either on this machine only, or on every machine.
        (FailureCode.WORKER_CRASHED, 0, 0, DOUBTFUL, False),
        (FailureCode.ENCODE_FAILED, 0, 0, DOUBTFUL, False),
        (FailureCode.ENCODE_FAILED, 2, 0, None, False),
        (FailureCode.DECODE_ERRORS, 0, 0, None, False),
    ],
)
def test_what_the_failures_of_a_shard_say_about_its_machine_and_about_the_run(
    code: FailureCode, num_chunks: int, num_reused: int, fault: MachineFault | None, is_common: bool
) -> None:
    result = ShardResult(4, num_chunks, num_reused, failures=(Failure("v", None, code, "why"),))
    expected = None if fault is None else MachineFault(f"{code}: why", is_doubtful=fault.is_doubtful)
    assert result.machine_fault == expected
    assert result.common_cause == (Stop(code, "why") if is_common else None)
