"""Carrying a plan out: the driver. What it knows is in the commits, so it can be killed at any moment and run again."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manifests.publish import publish_bytes, publish_json
from manifests.store import CAPTIONS_FILE, manifest_dir
from prep.data_folder import VIDEO, remove_temporaries
from prep.engines import Engine
from prep.failures import FailureCode
from prep.heartbeat import running_shards
from prep.layout import layout_path, read_layout, write_layout
from prep.plan import ShardPlan, ShardState
from prep.planning import Planned
from prep.progress import ChunkProgress
from prep.shard_task import ShardResult, ShardTask, make_shard, stopped
from shards.commits import Failure, commit_path, read_commits
from shards.dataset import current_variant, set_current_variant
from shards.format import RECIPE_FILE
from shards.lists import write_shard_lists

FAILURES_FILE = "failures.jsonl"
_MAX_FULL_DISKS = 3  # shards in a row that find the disk full before the run gives up


@dataclass
class Summary:
    """What a run did. `failures` also counts what failed in earlier runs and was not tried again."""

    variant: str
    num_shards: int = 0
    num_shards_made: int = 0
    num_chunks: int = 0
    num_encoded: int = 0
    num_reused: int = 0
    num_bytes_written: int = 0
    encoded_s: float = 0.0
    cpu_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    @property
    def num_failed_videos(self) -> int:
        return len({failure.video_id for failure in self.failures})

    def failures_by_code(self) -> dict[str, int]:
        """Code -> failures, the most frequent first."""
        return dict(Counter(failure.code for failure in self.failures).most_common())


def execute(planned: Planned, engine: Engine) -> Summary:
    """Makes every shard of the plan that has work, and brings the variant's records up to date.

    Call it while holding the data folder (`prep.data_folder.writing`).
    """
    plan, folder = planned.plan, planned.variant_dir
    folder.mkdir(parents=True, exist_ok=True)
    remove_temporaries(folder)
    _record(planned)
    if current_variant(planned.data_dir, VIDEO) is None:
        # The first variant can be read while it grows; a later one takes its place when it is whole.
        set_current_variant(planned.data_dir, VIDEO, plan.recipe.variant)
    summary = Summary(plan.recipe.variant)
    stops = []
    for result in _results(planned, engine):
        summary.num_encoded += result.num_chunks - result.num_reused
        summary.num_reused += result.num_reused
        summary.num_bytes_written += result.num_bytes
        summary.encoded_s += result.encoded_s
        summary.cpu_s += result.cpu_s
        summary.num_shards_made += result.stopped_by is None
        if result.stopped_by is not None:
            stops.append(result.stopped_by)
    remove_temporaries(folder)  # of workers that were lost
    _finish(planned, summary, stops)
    return summary


def _record(planned: Planned) -> None:
    """Writes layout and recipe, where they are not there already: a run with nothing to do touches no file."""
    layout, recipe = planned.plan.layout, planned.plan.recipe
    path = layout_path(planned.data_dir, recipe.settings)
    if not path.exists() or not read_layout(path).equals(layout):
        write_layout(path, layout)
    try:
        is_recorded = json.loads((planned.variant_dir / RECIPE_FILE).read_bytes()) == recipe.as_dict()
    except (OSError, ValueError):
        is_recorded = False
    if not is_recorded:
        publish_json(planned.variant_dir / RECIPE_FILE, recipe.as_dict())


def _results(planned: Planned, engine: Engine) -> Iterator[ShardResult]:
    work = planned.work
    if not work:
        return
    tasks = (_task(planned, shard) for shard in work)
    full_disks, made = 0, 0
    settings = planned.plan.recipe.settings
    with ChunkProgress(num_chunks=sum(shard.num_chunks for shard in work), chunk_s=float(settings.len_s)) as progress:
        for outcome in engine.run(make_shard, tasks):
            if outcome is not None:
                result = outcome.result or stopped(outcome.task, FailureCode.WORKER_LOST, outcome.lost or "")
                made += result.num_chunks
                for failure in (*result.failures, *([result.stopped_by] if result.stopped_by else [])):
                    progress.fail(failure.code)
                yield result
                is_full = result.stopped_by is not None and result.stopped_by.code == FailureCode.DISK_FULL
                full_disks = full_disks + 1 if is_full else 0
                if full_disks == _MAX_FULL_DISKS:
                    return
            progress.show(made + sum(shard.num_done for shard in running_shards(planned.variant_dir)))


def _task(planned: Planned, shard: ShardPlan) -> ShardTask:
    return ShardTask(
        variant_dir=planned.variant_dir,
        shard_id=shard.shard_id,
        split=shard.split,
        plan_fingerprint=shard.plan_fingerprint,
        recipe=planned.plan.recipe,
        spans=tuple(planned.plan.spans(shard.rows)),
        old_commit=planned.commits.get(shard.shard_id),
        captions_file=manifest_dir(planned.data_dir) / CAPTIONS_FILE if planned.plan.has_captions else None,
    )


def _finish(planned: Planned, summary: Summary, stops: list[Failure]) -> None:
    """Drops commits that nothing wants, writes the lists, and makes a complete variant the current one."""
    for shard in planned.plan.shards:
        if shard.state == ShardState.ORPHANED:
            commit_path(planned.variant_dir, shard.shard_id).unlink(missing_ok=True)
    commits = read_commits(planned.variant_dir).commits
    write_shard_lists(planned.variant_dir, commits)
    summary.num_shards = sum(commit.files is not None for commit in commits.values())
    summary.num_chunks = sum(commit.files.num_samples for commit in commits.values() if commit.files)
    summary.failures = [
        *planned.plan.failed_sources(),
        *(failure for commit in commits.values() for failure in commit.failures),
        *stops,
    ]
    write_failures(planned.variant_dir / FAILURES_FILE, summary.failures)
    wanted = {shard.shard_id for shard in planned.plan.shards if shard.state != ShardState.ORPHANED}
    if not stops and wanted <= commits.keys():
        set_current_variant(planned.data_dir, VIDEO, planned.plan.recipe.variant)


def write_failures(path: Path, failures: list[Failure]) -> None:
    """Publishes the list of failures, one JSON object a line; no file when there are none."""
    if failures:
        publish_bytes(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in failures).encode())
    else:
        path.unlink(missing_ok=True)
