"""The common part of all plans: the state of each shard and its reason, computed from wanted and stored shards."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from clipmill.prep.core.column import Pending
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT
from clipmill.shards.commits import Commit, read_commits
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.shards.verify import Code, quick_problems

_MISSING = frozenset({Code.TAR_MISSING, Code.INDEX_MISSING})
NUM_CHECK_THREADS = 8  # checking files is I/O-bound


class ShardState(StrEnum):
    """State of a shard in a plan."""

    CURRENT = "current"  # committed as planned
    NEW = "new"
    CHANGED = "changed"  # its inputs differ from those of the commit
    MISSING = "missing"  # committed, but a file is missing
    CORRUPT = "corrupt"  # committed, but a file is damaged
    RETRY = "retry"  # committed with failures that another try may fix
    ORPHANED = "orphaned"  # committed, but none of its content is wanted any more


Problems = Mapping[int, tuple[ShardState, str]]  # shard id -> (MISSING or CORRUPT, reason)


@dataclass(frozen=True)
class WantedShard:
    """A shard that should exist.

    Attributes:
        fingerprint: SHA-256 (hex) of everything that its content depends on.
        num_chunks: number of samples that it will hold.
        rows: its rows in the column's own plan, if that plan has rows.
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
        rows: its rows in the column's own plan, in the order in which the shard stores them.
        num_chunks: number of samples planned.
        num_copied: number of these that are copied from the stored shard; None if that is unknown before it is made.
        num_failed: of a current shard, the number of these that failed when it was made.
    """

    shard_id: int
    split: str
    state: ShardState
    reason: str
    plan_fingerprint: str
    rows: range
    num_chunks: int
    num_copied: int | None = None
    num_failed: int = 0

    @property
    def has_work(self) -> bool:
        return self.state not in (ShardState.CURRENT, ShardState.ORPHANED)

    @property
    def share_of_work(self) -> float:
        """Share of the samples that are not copied, above 0: copying costs little, but not nothing."""
        return 1.0 - 0.98 * (self.num_copied or 0) / max(1, self.num_chunks)


@dataclass(frozen=True)
class StoredShards:
    """Commits of a variant, by shard id, and problems found by a quick check of their files."""

    commits: dict[int, Commit]
    problems: Problems

    def without(self, shard_ids: Collection[int]) -> "StoredShards":
        """Return all but the commits of the given shards."""
        commits = {shard_id: commit for shard_id, commit in self.commits.items() if shard_id not in shard_ids}
        return StoredShards(commits, self.problems)


@dataclass(frozen=True)
class HeldShards:
    """Shards to leave unchanged because what they should hold is unknown, and why it is."""

    shard_ids: frozenset[int] = frozenset()
    because: str = ""


def plan_shards(
    wanted: Iterable[WantedShard],
    stored: StoredShards,
    *,
    what_changed: str,
    orphaned_because: str,
    retry_codes: frozenset[str] = frozenset(),
    unreadable: frozenset[str] = frozenset(),
    held: HeldShards = HeldShards(),
) -> Iterator[ShardPlan]:
    """Return the state of every shard: the wanted shards in their order, followed by orphaned ones.

    Args:
        what_changed: name of the input that changed if the fingerprint differs; used in the reason.
        orphaned_because: reason why none of a committed shard's content is wanted.
        retry_codes: failure codes to try again even if nothing changed, in addition to the transient ones.
        unreadable: ids of videos whose sources cannot be read at present.
        held: shards to leave unchanged.
    """
    known, commits = set[int](), stored.commits
    for shard in wanted:
        known.add(shard.shard_id)
        state, reason = state_of(
            commits.get(shard.shard_id),
            shard.fingerprint,
            problem=stored.problems.get(shard.shard_id),
            retry_codes=TRANSIENT | retry_codes,
            unreadable=unreadable,
            what_changed=what_changed,
        )
        if state == ShardState.CHANGED and shard.shard_id in held.shard_ids:
            yield _as_stored(commits[shard.shard_id], ShardState.CURRENT, held.because)
            continue
        commit = commits.get(shard.shard_id)
        num_held = commit.files.num_samples if commit is not None and commit.files is not None else 0
        is_partial = state == ShardState.CURRENT and commit is not None and commit.failures
        yield ShardPlan(
            shard_id=shard.shard_id,
            split=shard.split,
            state=state,
            reason=reason,
            plan_fingerprint=shard.fingerprint,
            rows=shard.rows,
            num_chunks=shard.num_chunks,
            num_failed=shard.num_chunks - num_held if is_partial else 0,
        )
    for shard_id, commit in commits.items():
        if shard_id not in known and shard_id in held.shard_ids:
            yield _as_stored(commit, ShardState.CURRENT, held.because)
        elif shard_id not in known:
            yield _as_stored(commit, ShardState.ORPHANED, orphaned_because)


def state_of(
    commit: Commit | None,
    fingerprint: str,
    *,
    problem: tuple[ShardState, str] | None,
    retry_codes: frozenset[str],
    unreadable: frozenset[str] = frozenset(),
    what_changed: str,
) -> tuple[ShardState, str]:
    """Return the state of a shard and its reason; `unreadable` are the videos whose sources cannot be read now."""
    if problem is not None:
        return problem
    if commit is None:
        return ShardState.NEW, "not committed yet"
    if commit.plan_fingerprint != fingerprint:
        return ShardState.CHANGED, f"{what_changed} have changed"
    retried = Counter(
        failure.code
        for failure in commit.failures
        if failure.code in retry_codes or (failure.code in SOURCE_AWAY and failure.video_id not in unreadable)
    )
    if retried:
        listed = ", ".join(f"{count} x {code}" for code, count in sorted(retried.items()))
        return ShardState.RETRY, f"earlier failures are retried: {listed}"
    return ShardState.CURRENT, "up to date"


def _as_stored(commit: Commit, state: ShardState, reason: str) -> ShardPlan:
    """Return the plan of a stored shard that is kept as it is, or removed."""
    return ShardPlan(
        shard_id=commit.shard_id,
        split=commit.split,
        state=state,
        reason=reason,
        plan_fingerprint=commit.plan_fingerprint,
        rows=range(0),
        num_chunks=commit.files.num_samples if commit.files and state == ShardState.CURRENT else 0,
    )


def with_work(shards: Sequence[ShardPlan]) -> list[ShardPlan]:
    """Return the shards that need work, longest first, so that no long shard is still running alone at the end."""
    return sorted((shard for shard in shards if shard.has_work), key=lambda shard: -shard.num_chunks)


def pending_of(shards: Sequence[ShardPlan]) -> Pending:
    """Summarise a variant's plan."""
    wanted = [shard for shard in shards if shard.state != ShardState.ORPHANED]
    return Pending(
        num_wanted=sum(shard.num_chunks for shard in wanted),
        wanted_shards=frozenset(shard.shard_id for shard in wanted),
        to_make=dict(Counter(str(shard.state) for shard in shards if shard.has_work)),
        num_orphaned=len(shards) - len(wanted),
    )


def stored_shards(variant_dir: Path) -> StoredShards:
    """Read the commits of a variant and check the files that they list."""
    found = read_commits(variant_dir)
    problems = file_problems(variant_dir, found.commits)
    for damaged in found.damaged:
        problems[damaged.shard_id] = (ShardState.CORRUPT, str(damaged))
    return StoredShards(found.commits, problems)


def file_problems(variant_dir: Path, commits: Mapping[int, Commit]) -> dict[int, tuple[ShardState, str]]:
    """Return the shards whose files are missing or damaged, according to a quick check of each file."""
    return {
        shard_id: (ShardState.MISSING if problems[0].code in _MISSING else ShardState.CORRUPT, problems[0].message)
        for shard_id, problems in quick_problems(variant_dir, commits.values()).items()
    }


def problems_of(variant: Variant) -> dict[int, tuple[str, str]]:
    """Return shard id -> (problem, reason), from a quick check of all files listed in an open variant's commits."""
    found: dict[int, tuple[str, str]] = {
        shard_id: (str(state), why)
        for shard_id, (state, why) in file_problems(variant.directory, variant.commits).items()
    }
    found |= {damaged.shard_id: ("corrupt", str(damaged)) for damaged in variant.damaged}
    return dict(sorted(found.items()))


def is_readable(shard: CommittedShard) -> bool:
    """Return True if the shard's index is readable."""
    try:
        return shard.index.num_rows > 0
    except (Damaged, OSError):
        return False
