"""What a plan and a run say to people and to scripts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.keys import split_key
from prep.core.data_folder import VIDEO
from prep.core.failure_list import failure_lines, failure_values
from prep.core.run import Summary
from prep.video.plan import ShardPlan, ShardState
from prep.video.planning import Planned
from prep.video.recipe import recipe_differences
from shards.dataset import current_variant
from shards.reader import Variant

_MAX_LISTED = 20


@dataclass(frozen=True)
class Report:
    """One answer in two forms."""

    text: str
    values: dict[str, Any]


def plan_report(planned: Planned) -> Report:
    """What would be done, by state and reason, with an estimate."""
    plan, cost = planned.plan, planned.estimate()
    against = changed_settings(planned)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in against)]
    lines += states_lines(plan.shards)
    lines += [f"unusable {count:>7} videos: {code}" for code, count in sorted(plan.unusable.items())]
    if any(shard.has_work for shard in plan.shards):
        lines.append(
            f"estimate {_hours(cost.core_hours)} of one core for {_hours(cost.video_hours)} of video,"
            f" {cost.size_bytes / 1e9:.2f} GB"
        )
    else:
        lines.append("nothing to do")
    values = {
        "variant": plan.recipe.variant,
        "changed_settings": against,
        "num_videos": plan.num_videos,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unusable_videos": dict(plan.unusable),
        "estimate": asdict(cost),
    }
    return Report("\n".join(lines), values)


def states_lines(shards: Sequence[ShardPlan], *, of: str = "chunks") -> list[str]:
    """How many shards are in each state, and those about which there is something to say; `of` what they hold."""
    states, held = _count_states(shards)
    listed = [shard for shard in shards if shard.state not in (ShardState.CURRENT, ShardState.NEW)]
    lines = [f"{state:<9}{count:>7} shards {held[state]:>9} {of}" for state, count in sorted(states.items())]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in listed[:_MAX_LISTED]]
    if len(listed) > _MAX_LISTED:
        lines.append(f"... and {len(listed) - _MAX_LISTED} more")
    return lines


def states_values(shards: Sequence[ShardPlan], *, of: str = "chunks") -> dict[str, Any]:
    """The same for scripts."""
    states, held = _count_states(shards)
    work = [
        {
            "shard_id": shard.shard_id,
            "state": str(shard.state),
            "reason": shard.reason,
            f"num_{of}": shard.num_chunks,
        }
        for shard in shards
        if shard.state != ShardState.CURRENT
    ]
    return {"shards": dict(states), of: dict(held), "work": work}


def _count_states(shards: Sequence[ShardPlan]) -> tuple[Counter[str], Counter[str]]:
    states, held = Counter(str(shard.state) for shard in shards), Counter[str]()
    for shard in shards:
        held[str(shard.state)] += shard.num_chunks
    return states, held


def changed_settings(planned: Planned) -> list[str]:
    """Settings in which the plan differs from the current variant; empty when it is the current variant."""
    current = current_variant(planned.data_dir, VIDEO)
    if current is None or current == planned.plan.recipe.variant:
        return []
    old = Variant.open(planned.data_dir, column=VIDEO, variant=current).recipe
    return recipe_differences(old, planned.plan.recipe.as_dict())


def explanation(planned: Planned, name: str) -> Report:
    """Why one chunk, or one video, would be made or not.

    Raises:
        UserError: the manifest has no such video.
    """
    plan = planned.plan
    try:
        video_id = split_key(name)[0]
    except ValueError:
        video_id = name
    if not plan.has_video(video_id) and plan.has_video(name):
        video_id = name
    if not plan.has_video(video_id):
        raise UserError(
            f'no video "{video_id}" in the manifest', hint="give a key or a video_id as `prep inspect` shows them"
        )
    shards = [shard for shard in plan.shards if any(span.video_id == video_id for span in plan.spans(shard.rows))]
    failed = [failure for failure in plan.failed_sources() if failure.video_id == video_id]
    settings = changed_settings(planned)
    values = {
        "video_id": video_id,
        "variant": plan.recipe.variant,
        "changed_settings": settings,
        "unusable": [asdict(failure) for failure in failed],
        "shards": [{"shard_id": shard.shard_id, "state": str(shard.state), "reason": shard.reason} for shard in shards],
    }
    lines = [f"{name}: video {video_id} in variant {plan.recipe.variant}"]
    lines += [f"setting  {difference}" for difference in settings]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in shards]
    lines += [f"unusable {failure.code}: {failure.message}" for failure in failed]
    return Report("\n".join(lines), values)


def summary_values(summary: Summary, *, listed: Path) -> dict[str, Any]:
    """A run's summary for scripts; `listed` is the list of its failures."""
    failed = failure_values(summary.failures, listed=listed)
    return {**asdict(summary), **failed, "num_failed_videos": summary.num_failed_videos}


def summary_text(summary: Summary, *, listed: Path) -> str:
    """A run's summary for people; `listed` is the list of its failures."""
    lines = [f"variant  {summary.variant}", f"shards   {summary.num_shards} with {summary.num_chunks} chunks"]
    if summary.num_shards_made:
        lines.append(
            f"made     {summary.num_shards_made} shards: {summary.num_encoded} chunks encoded,"
            f" {summary.num_reused} taken over, {summary.num_bytes_written / 1e6:.1f} MB"
        )
        if summary.cpu_s and summary.encoded_s:
            lines.append(
                f"speed    {summary.encoded_s / summary.cpu_s:.1f}x real time a core ({summary.cpu_s:.1f} CPU-s)"
            )
    else:
        lines.append("nothing was encoded" + ("" if summary.failures else ": everything is as planned"))
    lines += failure_lines(summary.failures, listed=listed)
    return "\n".join(lines)


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
