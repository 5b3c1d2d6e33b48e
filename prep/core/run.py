"""Driver for any column: make the shards of a plan that need work, then update the lists and the current variant.

Only commits record the progress of a run, so a run can be killed and restarted at any time.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

from clipmill.manifests.errors import EXIT_FAILED_WORK, EXIT_STORAGE_REFUSED, Inaccessible, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.monitoring import metrics_registry
from clipmill.manifests.progress import Activity
from clipmill.manifests.storage.mirrors import refresh, require_locks
from clipmill.prep.core.column import Addition, ColumnSpec
from clipmill.prep.core.data_folder import is_committed, remove_variant_temporaries, wait_until_seen
from clipmill.prep.core.failure_list import FAILURES_FILE, read_failures, shard_name, write_failures
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT, FailureCode, loss_code
from clipmill.prep.core.parts import Part, PartRun
from clipmill.prep.core.plan import ShardPlan, ShardState, file_problems, with_work
from clipmill.prep.core.progress import RunProgress, warn_refused
from clipmill.prep.core.shard_result import RunningChunks, ShardResult, Stop, W, stop_result
from clipmill.prep.core.variants import lost_samples, make_variant, write_selection
from clipmill.prep.engines import Engine, RefusedNode
from clipmill.prep.engines.admission import worker_ticket
from clipmill.shards.chunk_table import update_chunk_table
from clipmill.shards.commits import Commit, Failure, commit_path, read_commits_by_id
from clipmill.shards.dataset import begin_variant, current_variant, set_current_variant
from clipmill.shards.lists import finish_run
from clipmill.shards.reader import Variant

# Number of consecutive shards with the same stop code after which the run gives up, keyed by failure code.
_MAX_STOPS = {FailureCode.DISK_FULL: 3, FailureCode.ACCESS_REFUSED: 3, FailureCode.ENDPOINT_FAILED: 3}
_MAX_STOPS |= dict.fromkeys(SOURCE_AWAY, 3)  # the file system with the sources was probably unmounted
_MAX_STOPS |= {FailureCode.ENDPOINT_REFUSED: 1, FailureCode.OTHER_MODEL: 1, FailureCode.STORAGE_REFUSED: 1}


@dataclass
class Summary:
    """Result of a run, based on the commits that are on disk at the end of the run.

    Attributes:
        variant: Name of the variant.
        num_shards: Number of committed shards that contain samples.
        num_shards_made: Number of shards made in this run.
        num_shards_empty: Number of shards made in this run in which every sample failed.
        num_chunks: Number of samples in the committed shards.
        num_encoded: Number of samples that this run made.
        num_reused: Number of samples that this run copied from stored shards.
        num_bytes_written: Total size of the tars that this run wrote, in bytes.
        encoded_s: Seconds of video that this run encoded or read to make samples.
        cpu_s: User and system CPU time of the workers, in seconds.
        wall_s: Wall-clock time of the run, in seconds.
        failures: All failures, including failures of earlier runs that were not retried.
        unchanged: Failures that an earlier run reported and that this run had no reason to retry.
        gave_up: Reason why the run ended before all shards were attempted; None if the run did not give up.
        exit_code: Exit code if the run gave up.
        refused_workers: Machines that were excluded from the run, because they failed the admission check, failed their
            tasks, or were lost.
        added: Lines and values that the column adds to the report.
    """

    variant: str
    num_shards: int = 0
    num_shards_made: int = 0
    num_shards_empty: int = 0
    num_chunks: int = 0
    num_encoded: int = 0
    num_reused: int = 0
    num_bytes_written: int = 0
    encoded_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    unchanged: frozenset[Failure] = frozenset()
    gave_up: str | None = None
    exit_code: int = EXIT_FAILED_WORK
    refused_workers: list[RefusedNode] = field(default_factory=list)
    added: Addition = field(default_factory=Addition)

    @property
    def num_failed_videos(self) -> int:
        return len({failure.video_id for failure in self.failures})

    def failures_by_code(self) -> dict[str, int]:
        """Return the number of failures of each code, most frequent first."""
        return dict(Counter(failure.code for failure in self.failures).most_common())


@dataclass(frozen=True)
class Job(Generic[W]):
    """Plan of a column, in the form that the driver runs.

    Attributes:
        column: Spec of the column.
        data_dir: Data folder.
        variant_dir: Folder of the variant.
        recipe: Content of recipe.json.
        shards: All shards of the plan, including shards without work.
        make: Function that takes a task, makes and commits one shard, and returns the result. The function must be
            defined at module level, because it is sent to workers.
        task: Function that takes a shard and returns its task, the argument of `make`.
        video_ids: Function that takes a shard and returns the IDs of its videos. An ID may occur more than once.
        planning_failures: Failures found by planning that do not belong to a shard, such as unusable sources.
        chunk_s: Seconds of video in a full chunk, for the progress bar; None to omit the speed.
        needs: Requirements for a worker's machine (`clipmill.prep.engines.admission.Ticket`); None if there are none.
        lag_limit_s: Maximum time in seconds until commits that workers have reported become visible.
        read_again: IDs of the videos whose unusable sources were read again, because the failure may be temporary.
        where: Condition that selects the samples of the plan, to record with the variant; None for all samples.
        request_values: Further values of the request to record with the variant, keyed by flag name.
    """

    column: ColumnSpec
    data_dir: Path
    variant_dir: Path
    recipe: dict[str, Any]
    shards: Sequence[ShardPlan]
    make: Callable[[W], ShardResult]
    task: Callable[[ShardPlan], W]
    video_ids: Callable[[ShardPlan], Iterable[str]]
    planning_failures: Sequence[Failure]
    chunk_s: float | None
    needs: tuple[str, str] | None = None
    lag_limit_s: float = 0.0
    read_again: frozenset[str] = frozenset()
    where: str | None = None
    request_values: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        return self.variant_dir.name


def execute(job: Job[W], engine: Engine, *, part_run: PartRun | None = None) -> Summary:
    """Make the shards of a job that need work, and update the lists and the current variant.

    The caller must hold the lock of the column (`clipmill.prep.core.data_folder.lock_for_writing`).

    Args:
        engine: Engine that runs the tasks.
        part_run: Part that this process makes; None to make all shards. The last part to end updates the lists
            and the current variant.
    """
    folder = job.variant_dir
    if part_run is not None:
        part_run.agree(job.variant, where=job.where, package=job.column.package)
    make_variant(folder, job.recipe)
    write_selection(folder, job.where, job.request_values)
    has_work = any(shard.has_work for shard in job.shards)
    if has_work and (part_run is None or part_run.is_first):
        remove_variant_temporaries(folder)
    # The first variant of a column is current while it grows. A later variant becomes current once it is complete.
    begin_variant(job.data_dir, job.column.name, job.variant)
    if part_run is not None:
        part_run.begin()
    part_job = job
    if part_run is not None:
        part_job = replace(job, shards=[shard for shard in job.shards if part_run.part.owns(shard.shard_id)])
    reported_failures = frozenset(read_failures(folder / FAILURES_FILE))
    summary, begin_s = Summary(job.variant), time.monotonic()
    results = {result.shard_id: result for result in _results(part_job, engine, summary)}
    summary.wall_s = time.monotonic() - begin_s
    with Activity("checking the shards and writing the lists"):
        if has_work:
            refresh(folder)  # fetch commits from workers on other nodes
        if part_run is None or part_run.end():
            if part_run is not None:
                num_parts, shard_ids = part_run.part.count, [shard.shard_id for shard in job.shards]
                part_run.await_others(
                    lambda: Counter(
                        shard_id % num_parts for shard_id in shard_ids if commit_path(folder, shard_id).is_file()
                    )
                )
            if has_work:
                remove_variant_temporaries(folder)  # remove files of lost workers
            _finish(job, part_job, summary, results, part_run)
        else:
            commits = read_commits_by_id(folder, {shard.shard_id for shard in part_job.shards})
            part_run.report_made(len(commits))
            missing = _missing_shards(part_job, commits, results, gave_up=summary.gave_up)
            _account(part_job, commits, summary, results, missing)
    summary.unchanged = unchanged_failures(
        summary.failures, reported_failures, variant_dir=folder, shards=job.shards, read_again=job.read_again
    )
    return summary


def _results(job: Job[W], engine: Engine, summary: Summary) -> Iterator[ShardResult]:
    work = with_work(job.shards)
    if not work:
        return
    num_chunks = {shard.shard_id: shard.num_chunks for shard in work}
    # Mean cost of a sample in each shard, where making a sample costs 1 and copying a sample costs about 0.02.
    costs = {shard.shard_id: 1.0 - 0.98 * (shard.num_copied or 0) / max(1, shard.num_chunks) for shard in work}
    column, num_samples, meters = job.column.name, sum(num_chunks.values()), None
    if (registry := metrics_registry()) is not None:
        from clipmill.prep.core.meters import meters_of

        meters = meters_of(registry)
        meters.begin(column, job.planning_failures, num_samples=num_samples)
    progress = RunProgress(
        job.column.activity,
        noun=job.column.sample,
        num_samples=num_samples,
        work=sum(num_chunks[shard_id] * cost for shard_id, cost in costs.items()),
        sample_s=job.chunk_s,
        num_shards=len(work),
    )

    def tasks() -> Iterator[W]:
        progress.start()
        yield from (job.task(shard) for shard in work if summary.gave_up is None)

    num_made, work_done = 0, 0.0
    num_same_stops, last_code = 0, None  # number of consecutive shards with the same stop reason
    running = RunningChunks(job.variant_dir, shard_ids=num_chunks.keys(), costs=costs)
    with worker_ticket(job.variant_dir, package=job.column.package, needs=job.needs) as ticket, progress:
        command = job.column.command
        for outcome in engine.run(job.make, tasks(), check=ticket, name=lambda task: f"{command} {task.shard_id:06d}"):
            require_locks(job.variant_dir)
            if isinstance(outcome, RefusedNode):
                summary.refused_workers.append(outcome)
                warn_refused(outcome)
                if meters is not None:
                    meters.exclude(column)
            elif outcome is not None:
                result = outcome.result or stop_result(
                    outcome.task, loss_code(crashed=outcome.crashed), outcome.lost or ""
                )
                num_made += result.num_chunks
                work_done += num_chunks[result.shard_id] * costs[result.shard_id]
                running.finish(result.shard_id)
                if meters is not None:
                    meters.finish(column, result)
                if result.stopped_by is None:
                    progress.finish_shard(result.num_chunks)
                for failure in result.reasons:
                    progress.fail(failure.code)
                stop = result.common_cause
                stop_code = stop.code if stop is not None else None
                yield result
                num_same_stops, last_code = (num_same_stops if stop_code == last_code else 0) + 1, stop_code
                if stop is not None and num_same_stops == _MAX_STOPS.get(stop.code):
                    summary.gave_up = f"stopped: {stop.message}"
                    if stop.code == FailureCode.STORAGE_REFUSED:
                        summary.exit_code = EXIT_STORAGE_REFUSED
                    if stop.code == FailureCode.DISK_FULL:
                        summary.gave_up = f"stopped, because the disk was full for {num_same_stops} consecutive shards"
                        return
                    # Let the running shards finish: the responses that a server is computing are already paid for.
            num_running = running.num_done()
            if meters is not None:
                meters.show(column, num_done=num_made + num_running)
            progress.show(num_made + num_running, work_done + running.work_done(), has_begun=running.has_begun)


def _finish(
    job: Job[W], part_job: Job[W], summary: Summary, results: dict[int, ShardResult], part_run: PartRun | None
) -> None:
    """Remove commits that are no longer planned, write the lists, and make the variant current if it is complete.

    Args:
        part_job: Copy of `job` with only the shards of this process.
        results: Results that workers reported, keyed by shard ID.
    """
    orphaned_ids = {shard.shard_id for shard in job.shards if shard.state == ShardState.ORPHANED}
    planned_ids = {shard.shard_id for shard in job.shards} - orphaned_ids
    commits = finish_run(job.variant_dir, dropped_ids=orphaned_ids, planned_ids=planned_ids)
    if job.lag_limit_s:
        # On network file systems, new commits may become visible with a delay.
        made_ids = {shard_id for shard_id, result in results.items() if result.stopped_by is None}
        ids = made_ids & _missing_shards(part_job, commits, results, gave_up=summary.gave_up).keys()
        fingerprints = [(shard.shard_id, shard.plan_fingerprint) for shard in part_job.shards if shard.shard_id in ids]
        what = f"{count_noun(len(ids), 'shard')} in {job.variant_dir}"
        if ids and wait_until_seen(what, lambda: is_committed(job.variant_dir, fingerprints), limit_s=job.lag_limit_s):
            commits = finish_run(job.variant_dir, dropped_ids=orphaned_ids, planned_ids=planned_ids)
    missing = _missing_shards(job, commits, results, gave_up=summary.gave_up, part_run=part_run)
    _account(part_job, commits, summary, results, missing)
    summary.failures = [*job.planning_failures, *summary.failures]
    not_made = []
    for shard_id, stop in missing.items():
        if part_run is not None and not part_run.part.owns(shard_id):
            part_run.count_not_made(shard_id)
            not_made.append(Failure(shard_name(shard_id), None, str(stop.code), stop.message))
    write_failures(job.variant_dir / FAILURES_FILE, [*summary.failures, *not_made])
    try:
        update_chunk_table(Variant(job.variant_dir), column=job.column.name)
    except (UserError, Inaccessible) as error:  # without the table, training reads the indexes, which is slower
        hint = f"hint: {error.hint}\n" if isinstance(error, UserError) and error.hint else ""
        sys.stderr.write(f"warning: {error}\n{hint}")
    if missing or not summary.num_chunks:  # an empty variant must not replace a different variant
        return
    column, current = job.column.name, current_variant(job.data_dir, job.column.name)
    if not lost_samples(job.data_dir, column, variant=job.variant, former_variant=current):
        set_current_variant(job.data_dir, column, job.variant)


def _account(
    part_job: Job[W],
    commits: dict[int, Commit],
    summary: Summary,
    results: dict[int, ShardResult],
    missing: dict[int, Stop],
) -> None:
    """Add the totals of the commits and the work of this run to the summary."""
    summary.num_shards = sum(commit.files is not None for commit in commits.values())
    summary.num_chunks = sum(commit.files.num_samples for commit in commits.values() if commit.files)
    for shard in with_work(part_job.shards):
        if shard.shard_id in missing:
            continue
        summary.num_shards_made += 1
        summary.num_shards_empty += commits[shard.shard_id].files is None
        result = results.get(shard.shard_id)
        if result is not None and result.stopped_by is None:  # otherwise, the worker was lost after the commit
            summary.num_encoded += result.num_chunks - result.num_reused
            summary.num_reused += result.num_reused
            summary.num_bytes_written += result.num_bytes
            summary.encoded_s += result.encoded_s
            summary.cpu_s += result.cpu_s
    summary.failures = [failure for commit in commits.values() for failure in commit.failures]
    # A missing shard counts as a failure of each of its videos or, in state RETRY, of each video that failed earlier.
    for shard in part_job.shards:
        if (stop := missing.get(shard.shard_id)) is not None:
            commit = commits.get(shard.shard_id)
            old_failures = commit.failures if shard.state == ShardState.RETRY and commit is not None else None
            ids = part_job.video_ids(shard) if old_failures is None else [failure.video_id for failure in old_failures]
            summary.failures += [Failure(name, None, str(stop.code), stop.message) for name in dict.fromkeys(ids)]


def _missing_shards(
    job: Job[W],
    commits: dict[int, Commit],
    results: dict[int, ShardResult],
    *,
    gave_up: str | None,
    part_run: PartRun | None = None,
) -> dict[int, Stop]:
    """Return the reason why each missing shard is not on disk as planned, keyed by shard ID."""
    work_ids = [shard.shard_id for shard in with_work(job.shards)]
    problems = file_problems(
        job.variant_dir, {shard_id: commits[shard_id] for shard_id in work_ids if shard_id in commits}
    )
    stops = {}
    for shard in job.shards:
        shard_id = shard.shard_id
        stop = why_missing(
            shard,
            variant_dir=job.variant_dir,
            commit=commits.get(shard_id),
            problem=problems[shard_id][1] if shard_id in problems else None,
            result=results.get(shard_id),
            gave_up=gave_up,
            other_part=None if part_run is None or part_run.part.owns(shard_id) else part_run.part_of(shard_id),
        )
        if stop is not None:
            stops[shard_id] = stop
    return stops


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
    """Return the reason why a shard is not on disk as planned; None if it is on disk or no longer planned.

    Args:
        commit: Commit of the shard on disk; None if there is no commit.
        problem: Problem with the files of the commit; None if there is no problem.
        result: Result that the worker reported; None if there is no result.
        gave_up: Reason why the run gave up; None if it did not give up.
        other_part: Part that the shard belongs to; None if this process makes the shard.
    """
    if shard.state == ShardState.ORPHANED:
        return None
    is_stored = commit is not None and commit.plan_fingerprint == shard.plan_fingerprint and problem is None
    if other_part is not None:
        return None if is_stored else Stop(FailureCode.SHARD_MISSING, f"part {other_part} has not made the shard")
    stop = None if result is None else result.stopped_by
    # A lost worker may have committed its shard before it disappeared.
    if is_stored and (stop is None or stop.code in (FailureCode.WORKER_LOST, FailureCode.WORKER_CRASHED)):
        is_made = result is not None and stop is None
        if is_made or shard.state != ShardState.RETRY or (commit is not None and not commit.failures):
            return None
    if stop is not None:
        return stop
    if result is not None:
        reason = problem or "there is no commit for this plan"
        message = f"the worker reported success, but {reason} ({variant_dir})"
    elif shard.has_work:
        message = f"not attempted: {gave_up or 'the run ended first'}"
    else:
        message = "the commit was removed during the run"
    return Stop(FailureCode.SHARD_MISSING, message)


def unchanged_failures(
    failures: Iterable[Failure],
    reported_failures: Collection[Failure],
    *,
    variant_dir: Path,
    shards: Sequence[ShardPlan],
    read_again: Collection[str],
) -> frozenset[Failure]:
    """Return the failures that an earlier run reported and that this run had no reason to retry.

    Args:
        failures: Failures of this run.
        reported_failures: Failures that an earlier run listed.
        shards: Shards of the plan.
        read_again: IDs of the videos whose sources were read again, because the failure may be temporary.
    """
    if not reported_failures:
        return frozenset()
    retried_failures: set[Failure] = set()
    states = {shard.shard_id: shard.state for shard in with_work(shards)}
    for shard_id, commit in read_commits_by_id(variant_dir, states).items():
        # If a shard is made again for a different reason, its permanent failures recur, but do not count as retried.
        is_retried = states[shard_id] == ShardState.RETRY
        retried_failures.update(failure for failure in commit.failures if is_retried or failure.code in SOURCE_AWAY)
    return frozenset(
        failure
        for failure in failures
        if failure in reported_failures
        and failure not in retried_failures
        and failure.code not in TRANSIENT
        and failure.video_id not in read_again
    )
