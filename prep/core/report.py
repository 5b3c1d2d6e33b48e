"""What plans and runs of every column say to people and to scripts."""

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
    """One answer in two forms."""

    text: str
    values: dict[str, Any]


def show(report: Report, *, json: bool) -> None:
    """Prints an answer."""
    print(json_module.dumps(report.values, indent=1) if json else report.text)


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


def changed_settings(data_dir: Path, column: str, *, variant: str, recipe: Mapping[str, Any]) -> list[str]:
    """Settings in which a planned recipe differs from the current variant; empty when it is the current variant."""
    current = current_variant(data_dir, column)
    if current is None or current == variant:
        return []
    return recipe_differences(Variant.open(data_dir, column=column, variant=current).recipe, recipe)


def summary_report(
    summary: Summary, *, listed: Path, speed: str | None = None, nothing: str | None = None, **more: object
) -> Report:
    """What a run did.

    Args:
        listed: the list of its failures.
        speed: of the work, where there was some.
        nothing: why there was none, where it is not that everything is as planned.
        more: values for scripts, before the others.
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
    """Bytes in a unit that suits them: 12.3 MB."""
    size, units = float(size_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
