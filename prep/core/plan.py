"""What every plan consists of: the state of each shard, and why. A function of what is wanted and what is stored."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prep.core.column import Pending
from prep.core.failures import SOURCE_AWAY, TRANSIENT
from shards.commits import Commit, read_commits
from shards.damage import Damaged
from shards.reader import CommittedShard, Variant
from shards.verify import Code, quick_check

_MISSING = frozenset({Code.TAR_MISSING, Code.INDEX_MISSING})
NUM_LOOKING_THREADS = 8  # looking at files waits more than it computes


class ShardState(StrEnum):
    """What a plan says of a shard."""

    CURRENT = "current"  # committed as planned
    NEW = "new"
    CHANGED = "changed"  # what it is made from differs from what was committed
    MISSING = "missing"  # committed, but a file is gone
    CORRUPT = "corrupt"  # committed, but a file is damaged
    RETRY = "retry"  # committed with failures that another try may cure
    ORPHANED = "orphaned"  # committed, but nothing of it is wanted any more


Problems = Mapping[int, tuple[ShardState, str]]  # shard id -> MISSING or CORRUPT, and why


@dataclass(frozen=True)
class WantedShard:
    """A shard that is wanted.

    Attributes:
        fingerprint: SHA-256 (hex) of all that its content depends on.
        num_chunks: samples that it will hold.
        rows: of the column's own plan, where it has rows.
    """

    shard_id: int
    split: str
    fingerprint: str
    num_chunks: int
    rows: range = range(0)


@dataclass(frozen=True)
class ShardPlan:
    """One shard of a plan.

    Attributes:
        rows: of the column's own plan, in the order in which the shard holds them.
        num_chunks: samples planned.
    """

    shard_id: int
    split: str
    state: ShardState
    reason: str
    plan_fingerprint: str
    rows: range
    num_chunks: int

    @property
    def has_work(self) -> bool:
        return self.state not in (ShardState.CURRENT, ShardState.ORPHANED)


def plan_shards(
    wanted: Iterable[WantedShard],
    commits: Mapping[int, Commit],
    *,
    problems: Problems,
    what_changed: str,
    orphaned_because: str,
    retry_codes: frozenset[str] = frozenset(),
    unreadable: frozenset[str] = frozenset(),
    held: frozenset[int] = frozenset(),
) -> Iterator[ShardPlan]:
    """The state of every shard: those of `wanted` in their order, then committed ones that nothing is left of.

    Args:
        commits: of the variant, by shard id.
        what_changed: what a shard whose fingerprint differs is made from, for the reason.
        orphaned_because: why nothing of a committed shard is wanted.
        retry_codes: failures with these codes are tried again even if nothing changed, as are those that may pass by
            themselves.
        unreadable: videos whose sources cannot be read now.
        held: shards that stay as they are because it cannot be told what is wanted of them.
    """
    known = set()
    for shard in wanted:
        known.add(shard.shard_id)
        state, reason = state_of(
            commits.get(shard.shard_id),
            shard.fingerprint,
            problem=problems.get(shard.shard_id),
            retry_codes=TRANSIENT | retry_codes,
            unreadable=unreadable,
            what_changed=what_changed,
        )
        if state == ShardState.CHANGED and shard.shard_id in held:
            yield _kept(commits[shard.shard_id])
            continue
        yield ShardPlan(
            shard_id=shard.shard_id,
            split=shard.split,
            state=state,
            reason=reason,
            plan_fingerprint=shard.fingerprint,
            rows=shard.rows,
            num_chunks=shard.num_chunks,
        )
    for shard_id, commit in commits.items():
        if shard_id not in known:
            yield _kept(commit) if shard_id in held else _orphaned(commit, orphaned_because)


def state_of(
    commit: Commit | None,
    fingerprint: str,
    *,
    problem: tuple[ShardState, str] | None,
    retry_codes: frozenset[str],
    unreadable: frozenset[str] = frozenset(),
    what_changed: str,
) -> tuple[ShardState, str]:
    """State of a shard, and why; `unreadable` are the videos whose sources cannot be read now."""
    if problem is not None:
        return problem
    if commit is None:
        return ShardState.NEW, "not committed yet"
    if commit.plan_fingerprint != fingerprint:
        return ShardState.CHANGED, f"{what_changed} have changed"
    again = Counter(
        failure.code
        for failure in commit.failures
        if failure.code in retry_codes or (failure.code in SOURCE_AWAY and failure.video_id not in unreadable)
    )
    if again:
        listed = ", ".join(f"{count} x {code}" for code, count in sorted(again.items()))
        return ShardState.RETRY, f"failed before and may pass now: {listed}"
    return ShardState.CURRENT, "committed as planned"


def _kept(commit: Commit) -> ShardPlan:
    return ShardPlan(
        shard_id=commit.shard_id,
        split=commit.split,
        state=ShardState.CURRENT,
        reason="a source of it cannot be read, and how long it was is not known any more",
        plan_fingerprint=commit.plan_fingerprint,
        rows=range(0),
        num_chunks=commit.files.num_samples if commit.files else 0,
    )


def _orphaned(commit: Commit, reason: str) -> ShardPlan:
    return ShardPlan(
        shard_id=commit.shard_id,
        split=commit.split,
        state=ShardState.ORPHANED,
        reason=reason,
        plan_fingerprint=commit.plan_fingerprint,
        rows=range(0),
        num_chunks=0,
    )


def with_work(shards: Sequence[ShardPlan]) -> list[ShardPlan]:
    """Shards with something to do, the longest first: a long one begun last would be waited for alone."""
    return sorted((shard for shard in shards if shard.has_work), key=lambda shard: -shard.num_chunks)


def pending_of(shards: Sequence[ShardPlan]) -> Pending:
    """What a plan says of its variant."""
    wanted = [shard for shard in shards if shard.state != ShardState.ORPHANED]
    return Pending(
        num_wanted=sum(shard.num_chunks for shard in wanted),
        wanted_shards=frozenset(shard.shard_id for shard in wanted),
        to_make=dict(Counter(str(shard.state) for shard in shards if shard.has_work)),
    )


@dataclass(frozen=True)
class StoredShards:
    """What is committed of a variant, and what is wrong with it by a quick look at its files."""

    commits: dict[int, Commit]
    problems: dict[int, tuple[ShardState, str]]


def stored_shards(variant_dir: Path) -> StoredShards:
    """Reads the commits of a variant and looks at the files that they name."""
    found = read_commits(variant_dir)
    problems = file_problems(variant_dir, found.commits)
    for damaged in found.damaged:
        problems[damaged.shard_id] = (ShardState.CORRUPT, str(damaged))
    return StoredShards(found.commits, problems)


def file_problems(variant_dir: Path, commits: dict[int, Commit]) -> dict[int, tuple[ShardState, str]]:
    """Shards whose files are missing or damaged, by a quick look at each."""
    with ThreadPoolExecutor(NUM_LOOKING_THREADS) as pool:
        looked = pool.map(lambda commit: quick_check(variant_dir, commit), commits.values())
        return {
            shard_id: (ShardState.MISSING if problems[0].code in _MISSING else ShardState.CORRUPT, problems[0].message)
            for shard_id, problems in zip(commits, looked, strict=True)
            if problems
        }


def problems_of(variant: Variant) -> dict[int, tuple[str, str]]:
    """Shard id -> what is wrong and why, from a quick look at the files of every commit of an opened variant."""
    found: dict[int, tuple[str, str]] = {
        shard_id: (str(state), why)
        for shard_id, (state, why) in file_problems(variant.directory, variant.commits).items()
    }
    found |= {damaged.shard_id: ("corrupt", str(damaged)) for damaged in variant.damaged}
    return dict(sorted(found.items()))


def is_readable(shard: CommittedShard) -> bool:
    """Whether the shard's index can be used."""
    try:
        return shard.index.num_rows > 0
    except (Damaged, OSError):
        return False
