"""Reports of plans and runs as text and JSON, and HTML pages; shared by all columns."""

import json as json_module
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_bytes, remove_temporaries
from clipmill.prep.core.column import recipe_differences
from clipmill.prep.core.failure_list import failure_lines, failure_values
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
# States whose reasons are listed shard by shard.
_LISTED = (ShardState.MISSING, ShardState.CORRUPT)


@dataclass(frozen=True)
class Report:
    """Output of a command in two forms: text lines and JSON values."""

    text: str
    values: dict[str, Any]


def show(report: Report, *, json: bool) -> None:
    """Print a report."""
    print(json_module.dumps(report.values, indent=1) if json else report.text)


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
    """Return lines about the shards that a plan keeps, makes and removes, and about shards with damaged files.

    Args:
        sample: Noun for a sample of the column, singular.
        verb: Regular verb for making a sample, such as encode.
        reasons: Reasons why single shards are made again or removed, by shard id. For other shards, the reason follows
            from their state.
    """
    lines = []
    kept = [shard for shard in shards if shard.state == ShardState.CURRENT]
    if kept:
        num_failed = sum(shard.num_failed for shard in kept)
        num_held = sum(shard.num_chunks for shard in kept) - num_failed
        held = f"{count_noun(num_held, sample)} in {count_noun(len(kept), 'shard')}"
        lines.append(f"kept     {held}{f'; {num_failed:,} failed, see prep status' if num_failed else ''}")
        hold_reasons = {shard.reason for shard in kept if shard.reason.startswith("kept, ")}
        lines += [f"         {reason.removeprefix('kept, ')}" for reason in sorted(hold_reasons)]
    # Shards with the same reason share a line: a plan may have thousands of them.
    groups: dict[str, _Group] = {}
    for shard in shards:
        if shard.has_work:
            reason = _REASONS.get(shard.state, shard.reason)
            if shard.state == ShardState.CHANGED:
                reason = f"{shard.reason}; what is unchanged is copied"
            group = groups.setdefault((reasons or {}).get(shard.shard_id, reason), _Group())
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
    states, held = Counter(str(shard.state) for shard in shards), Counter[str]()
    for shard in shards:
        held[str(shard.state)] += shard.num_chunks
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


def next_line(command: str) -> str:
    """Return the line of a report with the next command."""
    return f"next     {command}"


def changed_settings(data_dir: Path, column: str, *, variant: str, recipe: Mapping[str, Any]) -> list[str]:
    """Return the differences of a planned recipe from the current variant; empty if it makes the current variant."""
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
        listed: Path of the list of failures.
        speed: Text about the speed of the work, if any was done.
        nothing: Reason why there was no work; None for the usual reason.
        verb: Regular verb for making a sample, such as encode.
        retry: Arguments of the command that retries the failures of the column.
        more: Additional JSON values, placed before the common ones.
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
            f"made     {made}{empty}: {count_noun(summary.num_encoded, 'chunk')} {verb.removesuffix('e')}ed,"
            f" {summary.num_reused:,} copied{size}"
        )
        lines += [f"speed    {speed}"] if speed else []
    elif summary.failures:
        lines.append(f"nothing was {verb.removesuffix('e')}ed")
    else:
        reason = "all shards are up to date" if summary.num_shards else "no shard belongs to this command"
        lines.append(f"nothing to {verb}: {nothing or reason}")
    lines += [f"left out {refused.node}: {refused.reason}" for refused in summary.refused_workers]
    lines += [*failure_lines(summary.failures, listed=listed, retry=retry), *summary.added.lines]
    values = {
        **more,
        **{name: value for name, value in asdict(summary).items() if name not in ("added", "exit_code")},
        **failure_values(summary.failures, listed=listed),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        "refused_workers": [refused.values() for refused in summary.refused_workers],
        **summary.added.values,
    }
    return Report("\n".join(lines), values)


def _work(group: _Group, sample: str, verb: str) -> str:
    """Return the work of a group as text, such as "12 chunks encoded and 6 copied into 2 shards"."""
    into = f"into {count_noun(group.num_shards, 'shard')}"
    made = f"{count_noun(group.num_made, sample)} {verb.removesuffix('e')}ed"
    if not group.is_known:
        return f"at most {made} {into}"
    if not group.num_copied:
        return f"{made} {into}"
    if not group.num_made:
        return f"{count_noun(group.num_copied, sample)} copied {into}"
    return f"{made} and {group.num_copied:,} copied {into}"


@dataclass(frozen=True)
class PageRequest:
    """Request for a page that `prep inspect --html` writes.

    Attributes:
        path: HTML file to write.
        where: Expression that selects samples (clipmill.shards.where); None for all.
        num_samples: Number of samples to show; None for the default of the page.
        on_sample: Function that is called with (number of samples read, number to read) after each sample.
    """

    path: Path
    where: str | None = None
    num_samples: int | None = None
    on_sample: Callable[[int, int], None] = lambda done, total: None


def publish_page(path: Path, template: Path, **values: Any) -> int:
    """Render and publish a page, remove temporary files of killed commands, and return the size of the page in bytes.

    Raises:
        UserError: The page cannot be written.
    """
    from clipmill.shards.pages.templates import load_template

    content = load_template(template).render(**values).encode()
    try:
        with folder_lock(path.parent):
            remove_temporaries(path.parent, of=path.name.__eq__)
            publish_bytes(path, content)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}", hint="give another file") from None
    return len(content)
