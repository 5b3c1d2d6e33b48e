"""The outcome of a shard at the end of a run: whether it is on disk as planned, whatever its worker reported.

The plan says what is wanted, the commit and a quick check of its files what is there, and the result what the worker
reported. Only what is there counts, with two exceptions: a worker that reports an error has not had its commit
confirmed by the disk, and a commit with failures that were tried again is from before this run unless a worker made it.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT, FailureCode
from clipmill.prep.core.parts import Part
from clipmill.prep.core.plan import ShardPlan, ShardState, with_work
from clipmill.prep.core.shard_result import ShardResult, Stop
from clipmill.shards.commits import Commit, Failure, read_commits_of


def why_missing(
    shard: ShardPlan,
    *,
    variant_dir: Path,
    commit: Commit | None,
    problem: str | None,
    result: ShardResult | None,
    gave_up: str | None = None,
    other_part: Part | None = None,
) -> Stop | None:
    """Return why a shard is not on disk as planned; None if it is, or if it is not wanted.

    Args:
        commit: the one on disk.
        problem: what is wrong with its files.
        result: what its worker reported; None if no worker has returned one.
        gave_up: why the run ended early.
        other_part: the part that the shard was left to; None if it was left to this process.
    """
    if shard.state == ShardState.ORPHANED:
        return None
    is_stored = commit is not None and commit.plan_fingerprint == shard.plan_fingerprint and problem is None
    if other_part is not None:
        return None if is_stored else Stop(FailureCode.SHARD_MISSING, f"part {other_part} has not made it")
    stop = None if result is None else result.stopped_by
    # A lost worker may have committed its shard before it disappeared.
    if is_stored and (stop is None or stop.code in (FailureCode.WORKER_LOST, FailureCode.WORKER_CRASHED)):
        is_made = result is not None and stop is None
        if is_made or shard.state != ShardState.RETRY or (commit is not None and not commit.failures):
            return None
    if stop is not None:
        return stop
    if result is not None:
        message = f"the worker reported success, but in {variant_dir}: {problem or 'no commit for this plan'}"
    elif shard.has_work:
        message = f"not attempted: {gave_up or 'the run ended before'}"
    else:
        message = "its commit was removed during the run"
    return Stop(FailureCode.SHARD_MISSING, message)


def unchanged_failures(
    failures: Iterable[Failure],
    reported: Collection[Failure],
    *,
    variant_dir: Path,
    shards: Sequence[ShardPlan],
    read_again: Collection[str],
) -> frozenset[Failure]:
    """Return the failures of a run that an earlier run has reported and that this one had no reason to try again.

    Args:
        reported: Failures that the earlier run has listed.
        shards: Shards of the plan.
        read_again: IDs of videos whose source was read again, as its failure may pass.
    """
    if not reported:
        return frozenset()
    tried: set[Failure] = set()
    due = {shard.shard_id: shard.state for shard in with_work(shards)}
    for shard_id, commit in read_commits_of(variant_dir, due).items():
        # In a shard that is made again for another reason, what failed for good fails again.
        is_retried = due[shard_id] == ShardState.RETRY
        tried.update(failure for failure in commit.failures if is_retried or failure.code in SOURCE_AWAY)
    return frozenset(
        failure
        for failure in failures
        if failure in reported
        and failure not in tried
        and failure.code not in TRANSIENT
        and failure.video_id not in read_again
    )
