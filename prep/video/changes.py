"""What is encoded and what is copied in the shards of a plan that exist already, and why.

A worker copies the chunks whose encoder pass is unchanged from the stored shard. Comparing the plan with the stored
indexes tells beforehand which these are.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.prep.core.plan import NUM_CHECK_THREADS, ShardPlan, ShardState
from clipmill.prep.video.plan import Plan
from clipmill.shards.commits import Commit
from clipmill.shards.damage import Damaged
from clipmill.shards.index import open_index

_COMPARED = (ShardState.CHANGED, ShardState.RETRY)
_MAX_COMPARED = 5_000  # shards, about a minute; of more shards the plan says less


@dataclass(frozen=True)
class ShardChange:
    """How a shard differs from the stored one.

    Attributes:
        rows: rows of the plan with the spans that are encoded; those of the others are copied.
        num_copied: number of chunks that are copied.
        because: why the shard is written again.
    """

    rows: tuple[int, ...]
    num_copied: int
    because: str


def with_changes(plan: Plan, commits: Mapping[int, Commit], variant_dir: Path) -> dict[int, ShardChange]:
    """Compare the shards of a plan with the stored ones; return how they differ, by shard ID.

    `plan.shards` then have `num_copied`. Shards that are new or whose index cannot be read are left out.
    """
    compared = [shard for shard in plan.shards if shard.state in _COMPARED and shard.shard_id in commits]
    if not compared or len(compared) > _MAX_COMPARED:
        return {}
    moved = plan.shards_of_moved_videos(commits)
    comparing = f"comparing {counted(len(compared), 'changed shard')}"
    found: dict[int, ShardChange] = {}
    with Activity(comparing) as now, ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        show = now.counter(comparing)
        changes = pool.map(
            lambda shard: _change(
                plan, shard, commits[shard.shard_id], variant_dir, has_moved_videos=shard.shard_id in moved
            ),
            compared,
        )
        for number, (shard, change) in enumerate(zip(compared, changes, strict=True), 1):
            show(number, len(compared))
            if change is not None:
                found[shard.shard_id] = change
    plan.shards = [
        replace(shard, num_copied=found[shard.shard_id].num_copied) if shard.shard_id in found else shard
        for shard in plan.shards
    ]
    return found


def _change(
    plan: Plan, shard: ShardPlan, commit: Commit, variant_dir: Path, *, has_moved_videos: bool
) -> ShardChange | None:
    stored: set[tuple[str, str]] = set()
    has_captions = False
    if commit.files is not None:
        try:
            index = open_index(variant_dir / commit.files.index)
            stored = set(zip(*(index[name].to_pylist() for name in ("video_id", "span_fingerprint")), strict=True))
        except (Damaged, OSError):
            return None
        has_captions = "txt_offset" in index.column_names
    keys = plan.span_keys(shard.rows)
    rows = tuple(row for row, key in zip(shard.rows, keys, strict=True) if key not in stored)
    wanted = {video_id for video_id, _ in keys}
    known = {video_id for video_id, _ in stored} | {failure.video_id for failure in commit.failures}
    changed = {key[0] for key in keys if key not in stored} & known - {one.video_id for one in commit.failures}
    removed = "removed or moved to another split" if has_moved_videos else "removed"
    reasons = [
        *([counted(len(wanted - known), "new video")] if wanted - known else []),
        *([f"{counted(len(changed), 'video')} changed"] if changed else []),
        *([f"{counted(len(known - wanted), 'video')} {removed}"] if known - wanted else []),
    ]
    if shard.state == ShardState.RETRY:
        reasons = [shard.reason]
    elif not reasons:
        reasons = ["captions changed" if plan.has_captions or has_captions else "names of videos or datasets changed"]
    num_encoded = sum(len(span.span.chunk_frames) for span in plan.spans(rows))
    return ShardChange(rows, shard.num_chunks - num_encoded, ", ".join(reasons))
