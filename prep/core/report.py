"""Reports of plans and runs, for people and for scripts; shared by all columns."""

import json as json_module
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.formatting import count_noun, size_text
from clipmill.prep.core.column import recipe_differences
from clipmill.prep.core.failure_list import failure_lines, failure_values
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan, ShardState
from clipmill.prep.core.run import Summary
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant

NOTHING_TO_DO = "nothing to do"
MAX_LISTED = 20
_REASONS = {
    ShardState.NEW: "not made yet",
    ShardState.MISSING: "files are missing",
    ShardState.CORRUPT: "files are damaged; intact samples are copied",
}
# States whose reasons are worth a line for each shard.
_LISTED = (ShardState.MISSING, ShardState.CORRUPT)


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


@dataclass
class _Group:
    num_shards: int = 0
    num_made: int = 0
    num_copied: int = 0
    is_known: bool = True


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
    lines = []
    kept = [shard for shard in shards if shard.state == ShardState.CURRENT]
    if kept:
        num_failed = sum(shard.num_failed for shard in kept)
        num_held = sum(shard.num_chunks for shard in kept) - num_failed
        held = f"{count_noun(num_held, sample)} in {count_noun(len(kept), 'shard')}"
        lines.append(f"kept     {held}{f'; {num_failed:,} failed, see prep status' if num_failed else ''}")
        reasons_to_hold = {shard.reason for shard in kept if shard.reason.startswith("kept, ")}
        lines += [f"         {reason.removeprefix('kept, ')}" for reason in sorted(reasons_to_hold)]
    groups: dict[str, _Group] = {}
    for shard in shards:
        if shard.has_work:
            group = groups.setdefault(_reason(shard, reasons or {}), _Group())
            group.num_shards += 1
            group.num_copied += shard.num_copied or 0
            group.num_made += shard.num_chunks - (shard.num_copied or 0)
            group.is_known &= shard.num_copied is not None or shard.state == ShardState.NEW
    lines += [f"to do    {_work(group, sample, verb)}: {reason}" for reason, group in groups.items()]
    removed = [shard for shard in shards if shard.state == ShardState.ORPHANED]
    because = Counter((reasons or {}).get(shard.shard_id, shard.reason) for shard in removed)
    lines += [f"to do    {count_noun(count, 'shard')} removed: {reason}" for reason, count in because.items()]
    listed = [shard for shard in shards if shard.state in _LISTED]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in listed[:MAX_LISTED]]
    if len(listed) > MAX_LISTED:
        lines.append(f"... and {count_noun(len(listed) - MAX_LISTED, 'more shard')}")
    return lines


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
    retry: Sequence[str] = ("prep", "retry"),
    **more: object,
) -> Report:
    """Return the report of a run.

    Args:
        listed: path of the list of failures.
        speed: text about the speed of the work, if any was done.
        nothing: why there was no work, if the reason is not that everything is up to date.
        verb: what the column does to a chunk; it ends in e.
        retry: Words of the command that tries the failures of the column again.
        more: further JSON values, placed before the common ones.
    """
    lines = [f"variant  {summary.variant}"]
    if summary.num_shards_made and summary.failures and not summary.num_encoded + summary.num_reused:
        skipped = f"{count_noun(summary.num_failed_videos, 'video')} skipped ({', '.join(summary.failures_by_code())})"
        lines.append(f"made     no chunks in {count_noun(summary.num_shards_made, 'shard')}: {skipped}")
    elif summary.num_shards_made:
        empty = f", and {summary.num_shards_empty:,} without chunks" if summary.num_shards_empty else ""
        made = count_noun(summary.num_shards_made - summary.num_shards_empty, "shard")
        size = f", {size_text(summary.num_bytes_written)}" if summary.num_bytes_written else ""
        lines.append(
            f"made     {made}{empty}: {count_noun(summary.num_encoded, 'chunk')} {verb}d,"
            f" {summary.num_reused:,} copied{size}"
        )
        lines += [f"speed    {speed}"] if speed else []
    elif summary.failures:
        lines.append(f"nothing was {verb}d")
    else:
        lines.append(f"nothing to {verb}: {nothing or 'all shards are up to date'}")
    lines += [f"left out {refused.node}: {refused.reason}" for refused in summary.refused_workers]
    lines += [*failure_lines(summary.failures, listed=listed, retry=retry), *summary.added.lines]
    values = {
        **more,
        **{name: value for name, value in asdict(summary).items() if name != "added"},
        **failure_values(summary.failures, listed=listed),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        "refused_workers": [refused.values() for refused in summary.refused_workers],
        **summary.added.values,
    }
    return Report("\n".join(lines), values)


def _reason(shard: ShardPlan, reasons: Mapping[int, str]) -> str:
    if shard.shard_id in reasons:
        return reasons[shard.shard_id]
    if shard.state == ShardState.CHANGED:
        return f"{shard.reason}; what is unchanged is copied"
    return _REASONS.get(shard.state, shard.reason)


def _work(group: _Group, sample: str, verb: str) -> str:
    """Return "12 chunks encoded and 6 copied into 2 shards"."""
    into, made = f"into {count_noun(group.num_shards, 'shard')}", f"{count_noun(group.num_made, sample)} {verb}d"
    if not group.is_known:
        return f"at most {made} {into}"
    if not group.num_copied:
        return f"{made} {into}"
    if not group.num_made:
        return f"{count_noun(group.num_copied, sample)} copied {into}"
    return f"{made} and {group.num_copied:,} copied {into}"
