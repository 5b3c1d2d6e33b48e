"""Reports of plans and runs, for people and for scripts; shared by all columns."""

import json as json_module
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.quoting import counted
from clipmill.manifests.units import size_text
from clipmill.prep.core.column import recipe_differences
from clipmill.prep.core.failure_list import failure_lines, failure_values
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan, ShardState
from clipmill.prep.core.plan_words import Words, plan_lines
from clipmill.prep.core.run import Summary
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant

NOTHING_TO_DO = "nothing to do"


@dataclass(frozen=True)
class Report:
    """A command's output in two forms: text lines and JSON values."""

    text: str
    values: dict[str, Any]


def show(report: Report, *, json: bool) -> None:
    """Print a report."""
    print(json_module.dumps(report.values, indent=1) if json else report.text)


def with_part(report: Report, run: PartRun) -> Report:
    """Return the report of a run with how its part ended."""
    return Report(f"{report.text}\n{run.line()}", {**report.values, "part": run.values()})


def states_lines(
    shards: Sequence[ShardPlan],
    *,
    sample: str = "chunk",
    verb: str = "encode",
    reasons: Mapping[int, str] | None = None,
) -> list[str]:
    """Return what a plan keeps, makes, copies and removes, in words, and the shards that need attention.

    Args:
        sample: noun for a sample of the column, singular.
        verb: what the column does to a sample; it ends in e.
        reasons: why single shards are made again or removed, by shard ID; the others have the reason of their state.
    """
    return plan_lines(shards, words=Words(sample, verb), reasons=reasons)


def states_values(shards: Sequence[ShardPlan], *, sample: str = "chunk") -> dict[str, Any]:
    """Return the JSON values of `states_lines`."""
    states, held = _count_states(shards)
    work = [
        {
            "shard_id": shard.shard_id,
            "state": str(shard.state),
            "reason": shard.reason,
            f"num_{sample}s": shard.num_chunks,
            "num_copied": shard.num_copied,
        }
        for shard in shards
        if shard.state != ShardState.CURRENT
    ]
    return {"shards": dict(states), f"{sample}s": dict(held), "work": work}


def _count_states(shards: Sequence[ShardPlan]) -> tuple[Counter[str], Counter[str]]:
    states, held = Counter(str(shard.state) for shard in shards), Counter[str]()
    for shard in shards:
        held[str(shard.state)] += shard.num_chunks
    return states, held


def next_line(command: str) -> str:
    """Return the line of a report with the next command."""
    return f"next     {command}"


def changed_settings(data_dir: Path, column: str, *, variant: str, recipe: Mapping[str, Any]) -> list[str]:
    """Return the settings in which a planned recipe differs from the current variant; empty if it is that variant."""
    current = current_variant(data_dir, column)
    if current is None or current == variant:
        return []
    return recipe_differences(Variant.open(data_dir, column=column, variant=current).recipe, recipe)


def summary_report(
    summary: Summary,
    *,
    listed: Path,
    speed: str | None = None,
    nothing: str | None = None,
    verb: str = "encode",
    **more: object,
) -> Report:
    """Return the report of a run.

    Args:
        listed: path of the list of failures.
        speed: text about the speed of the work, if any was done.
        nothing: why there was no work, if the reason is not that everything is up to date.
        verb: what the column does to a chunk; it ends in e.
        more: further JSON values, placed before the common ones.
    """
    lines = [f"variant  {summary.variant}"]
    if summary.num_shards_made and summary.failures and not summary.num_encoded + summary.num_reused:
        skipped = f"{counted(summary.num_failed_videos, 'video')} skipped ({', '.join(summary.failures_by_code())})"
        lines.append(f"made     no chunks in {counted(summary.num_shards_made, 'shard')}: {skipped}")
    elif summary.num_shards_made:
        empty = f", and {summary.num_shards_empty:,} without chunks" if summary.num_shards_empty else ""
        made = counted(summary.num_shards_made - summary.num_shards_empty, "shard")
        size = f", {size_text(summary.num_bytes_written)}" if summary.num_bytes_written else ""
        lines.append(
            f"made     {made}{empty}: {counted(summary.num_encoded, 'chunk')} {verb}d,"
            f" {summary.num_reused:,} copied{size}"
        )
        lines += [f"speed    {speed}"] if speed else []
    elif summary.failures:
        lines.append(f"nothing was {verb}d")
    else:
        lines.append(f"nothing to {verb}: {nothing or 'all shards are up to date'}")
    lines += [f"left out {refused.node}: {refused.reason}" for refused in summary.refused_workers]
    lines += failure_lines(summary.failures, listed=listed)
    values = {
        **more,
        **asdict(summary),
        **failure_values(summary.failures, listed=listed),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        "refused_workers": [refused.values() for refused in summary.refused_workers],
    }
    return Report("\n".join(lines), values)
