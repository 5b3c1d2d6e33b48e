"""A plan in words: what is kept, encoded, copied and removed, and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clipmill.manifests.quoting import counted
from clipmill.prep.core.plan import ShardPlan, ShardState

MAX_LISTED = 20
_REASONS = {
    ShardState.NEW: "not made yet",
    ShardState.MISSING: "files are missing",
    ShardState.CORRUPT: "files are damaged; intact samples are copied",
}
# States whose reasons are worth a line for each shard.
_LISTED = (ShardState.MISSING, ShardState.CORRUPT)


@dataclass(frozen=True)
class Words:
    """The vocabulary of a column.

    Attributes:
        sample: noun for a sample, singular.
        verb: what is done to a sample; it ends in e.
        new: why samples of new shards are made.
    """

    sample: str = "chunk"
    verb: str = "encode"
    new: str = _REASONS[ShardState.NEW]


@dataclass
class _Group:
    num_shards: int = 0
    num_made: int = 0
    num_copied: int = 0
    is_known: bool = True


def plan_lines(shards: Sequence[ShardPlan], *, words: Words, reasons: Mapping[int, str] | None = None) -> list[str]:
    """Return what a plan does, one line for each reason, and the shards that are missing or damaged.

    Args:
        reasons: why single shards are made again or removed, by shard ID; the others have the reason of their state.
    """
    lines = []
    kept = [shard for shard in shards if shard.state == ShardState.CURRENT]
    if kept:
        num_failed = sum(shard.num_failed for shard in kept)
        held = _many(sum(shard.num_chunks for shard in kept) - num_failed, len(kept), words, "in")
        lines.append(f"kept     {held}{f'; {num_failed:,} failed, see prep status' if num_failed else ''}")
        reasons_to_hold = {shard.reason for shard in kept if shard.reason.startswith("kept, ")}
        lines += [f"         {reason.removeprefix('kept, ')}" for reason in sorted(reasons_to_hold)]
    groups: dict[str, _Group] = {}
    for shard in shards:
        if shard.has_work:
            group = groups.setdefault(_reason(shard, words, reasons or {}), _Group())
            group.num_shards += 1
            group.num_copied += shard.num_copied or 0
            group.num_made += shard.num_chunks - (shard.num_copied or 0)
            group.is_known &= shard.num_copied is not None or shard.state == ShardState.NEW
    lines += [f"to do    {_work(group, words)}: {reason}" for reason, group in groups.items()]
    removed = [shard for shard in shards if shard.state == ShardState.ORPHANED]
    because = Counter((reasons or {}).get(shard.shard_id, shard.reason) for shard in removed)
    lines += [f"to do    {counted(count, 'shard')} removed: {reason}" for reason, count in because.items()]
    listed = [shard for shard in shards if shard.state in _LISTED]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in listed[:MAX_LISTED]]
    if len(listed) > MAX_LISTED:
        lines.append(f"... and {counted(len(listed) - MAX_LISTED, 'more shard')}")
    return lines


def _reason(shard: ShardPlan, words: Words, reasons: Mapping[int, str]) -> str:
    if shard.shard_id in reasons:
        return reasons[shard.shard_id]
    if shard.state == ShardState.CHANGED:
        return f"{shard.reason}; what is unchanged is copied"
    return words.new if shard.state == ShardState.NEW else _REASONS.get(shard.state, shard.reason)


def _work(group: _Group, words: Words) -> str:
    """Return "12 chunks encoded and 6 copied into 2 shards"."""
    into = f"into {counted(group.num_shards, 'shard')}"
    if not group.is_known:
        return f"at most {counted(group.num_made, words.sample)} {words.verb}d {into}"
    if not group.num_copied:
        return f"{counted(group.num_made, words.sample)} {words.verb}d {into}"
    if not group.num_made:
        return f"{counted(group.num_copied, words.sample)} copied {into}"
    return f"{counted(group.num_made, words.sample)} {words.verb}d and {group.num_copied:,} copied {into}"


def _many(num_samples: int, num_shards: int, words: Words, preposition: str) -> str:
    return f"{counted(num_samples, words.sample)} {preposition} {counted(num_shards, 'shard')}"
