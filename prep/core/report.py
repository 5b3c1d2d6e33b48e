"""Reports of plans and runs, for people and for scripts; shared by all columns."""

import json as json_module
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prep.core.column import recipe_differences
from prep.core.failure_list import failure_lines, failure_values
from prep.core.plan import ShardPlan, ShardState
from prep.core.run import Summary
from shards.dataset import current_variant
from shards.reader import Variant

_MAX_LISTED = 20


@dataclass(frozen=True)
class Report:
    """A command's output in two forms: text lines and JSON values."""

    text: str
    values: dict[str, Any]


def show(report: Report, *, json: bool) -> None:
    """Print a report."""
    print(json_module.dumps(report.values, indent=1) if json else report.text)


def states_lines(shards: Sequence[ShardPlan], *, of: str = "chunks") -> list[str]:
    """Return the number of shards in each state, and those that need attention; `of` names their content."""
    states, held = _count_states(shards)
    listed = [shard for shard in shards if shard.state not in (ShardState.CURRENT, ShardState.NEW)]
    lines = [f"{state:<9}{count:>7} shards {held[state]:>9} {of}" for state, count in sorted(states.items())]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in listed[:_MAX_LISTED]]
    if len(listed) > _MAX_LISTED:
        lines.append(f"... and {len(listed) - _MAX_LISTED} more")
    return lines


def states_values(shards: Sequence[ShardPlan], *, of: str = "chunks") -> dict[str, Any]:
    """Return the same as `states_lines`, as JSON values."""
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


def changed_settings(data_dir: Path, column: str, *, variant: str, recipe: Mapping[str, Any]) -> list[str]:
    """Return the settings in which a planned recipe differs from the current variant; empty if it is that variant."""
    current = current_variant(data_dir, column)
    if current is None or current == variant:
        return []
    return recipe_differences(Variant.open(data_dir, column=column, variant=current).recipe, recipe)


def summary_report(
    summary: Summary, *, listed: Path, speed: str | None = None, nothing: str | None = None, **more: object
) -> Report:
    """Return the report of a run.

    Args:
        listed: path of the list of failures.
        speed: text about the speed of the work, if any was done.
        nothing: why there was no work, if the reason is not that everything is up to date.
        more: further JSON values, placed before the common ones.
    """
    lines = [f"variant  {summary.variant}", f"shards   {summary.num_shards} with {summary.num_chunks} chunks"]
    if summary.num_shards_made:
        lines.append(
            f"made     {summary.num_shards_made} shards: {summary.num_encoded} chunks encoded,"
            f" {summary.num_reused} taken over, {summary.num_bytes_written / 1e6:.1f} MB"
        )
        lines += [f"speed    {speed}"] if speed else []
    elif summary.failures:
        lines.append("nothing was encoded")
    else:
        lines.append(f"nothing was encoded: {nothing or 'everything is as planned'}")
    lines += failure_lines(summary.failures, listed=listed)
    failed = failure_values(summary.failures, listed=listed)
    values = {**more, **asdict(summary), **failed, "num_failed_videos": summary.num_failed_videos}
    return Report("\n".join(lines), values)


def size_text(size_bytes: int) -> str:
    """Format a size in bytes with a suitable unit: 12.3 MB."""
    size, units = float(size_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
