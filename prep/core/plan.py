"""Compute the state of each shard in a plan, with its reason, and the disk use of the plan.

All columns use this module. A state follows from the comparison of the shards that should exist with the stored shards.
"""

import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipmill.manifests.formatting import count_noun, range_text, size_text
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.column import Pending
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT
from clipmill.shards.commits import Commit, read_commits
from clipmill.shards.dataset import list_variants, variant_dir
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.shards.verify import Code, quick_problems

_MISSING = frozenset({Code.TAR_MISSING, Code.INDEX_MISSING})
NUM_CHECK_THREADS = 8  # checking files is I/O-bound


class ShardState(StrEnum):
    """State of a shard in a plan."""

    CURRENT = "current"  # committed as planned
    NEW = "new"
    CHANGED = "changed"  # its inputs differ from the inputs of the commit
    MISSING = "missing"  # committed, but a file is missing
    CORRUPT = "corrupt"  # committed, but a file is damaged
    RETRY = "retry"  # committed with failures that another try may fix
    ORPHANED = "orphaned"  # committed, but the plan no longer needs any of its content


Problems = Mapping[int, tuple[ShardState, str]]  # shard id -> (MISSING or CORRUPT, reason)


@dataclass(frozen=True)
class WantedShard:
    """A shard that should exist.

    Attributes:
        fingerprint: SHA-256 (hex) of everything that its content depends on.
        num_chunks: Number of samples that it will hold.
        rows: Rows of the shard in the column's plan, if that plan has rows.
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
        rows: Rows of the shard in the column's plan, in the order in which the shard stores them.
        num_chunks: Number of planned samples.
        num_copied: Number of samples to copy from the stored shard; None if it is unknown until the shard is made.
        num_failed: Number of samples of a current shard that failed when it was made.
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
    """Shards to leave unchanged because their planned content is unknown, and the reason."""

    shard_ids: frozenset[int] = frozenset()
    because: str = ""


def plan_shards(
    shards: Iterable[WantedShard],
    stored: StoredShards,
    *,
    what_changed: str,
    orphaned_because: str,
    retry_codes: frozenset[str] = frozenset(),
    unreadable: frozenset[str] = frozenset(),
    held: HeldShards = HeldShards(),
) -> Iterator[ShardPlan]:
    """Yield the state of every shard: the planned shards in their order, followed by orphaned shards.

    Args:
        shards: Shards that should exist.
        what_changed: Noun phrase for the input that changed if the fingerprint differs; used in the reason.
        orphaned_because: Reason for orphaned shards.
        retry_codes: Failure codes to try again even if nothing changed, in addition to the transient ones.
        unreadable: Ids of videos whose sources cannot be read at present.
        held: Shards to leave unchanged.
    """
    known, commits = set[int](), stored.commits
    for shard in shards:
        known.add(shard.shard_id)
        state, reason = state_of(
            commits.get(shard.shard_id),
            shard.fingerprint,
            problem=stored.problems.get(shard.shard_id),
            retry_codes=TRANSIENT | retry_codes,
            unreadable=unreadable,
            what_changed=what_changed,
        )
        # The planned content is currently incomplete: keep the stored shard rather than replace it with a part.
        if state == ShardState.CHANGED and shard.shard_id in held.shard_ids:
            yield _stored_plan(commits[shard.shard_id], ShardState.CURRENT, held.because)
            continue
        commit = commits.get(shard.shard_id)
        num_stored = commit.files.num_samples if commit is not None and commit.files is not None else 0
        is_partial = state == ShardState.CURRENT and commit is not None and commit.failures
        yield ShardPlan(
            shard_id=shard.shard_id,
            split=shard.split,
            state=state,
            reason=reason,
            plan_fingerprint=shard.fingerprint,
            rows=shard.rows,
            num_chunks=shard.num_chunks,
            num_failed=shard.num_chunks - num_stored if is_partial else 0,
        )
    for shard_id, commit in commits.items():
        if shard_id not in known and shard_id in held.shard_ids:
            yield _stored_plan(commit, ShardState.CURRENT, held.because)
        elif shard_id not in known:
            yield _stored_plan(commit, ShardState.ORPHANED, orphaned_because)


def state_of(
    commit: Commit | None,
    fingerprint: str,
    *,
    problem: tuple[ShardState, str] | None,
    retry_codes: frozenset[str],
    unreadable: frozenset[str] = frozenset(),
    what_changed: str,
) -> tuple[ShardState, str]:
    """Return the state of a shard and its reason; the arguments are described at `plan_shards`."""
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


def _stored_plan(commit: Commit, state: ShardState, reason: str) -> ShardPlan:
    """Return the plan for a stored shard that is kept unchanged, or removed."""
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
    """Return the shards that need work, largest first, so that no large shard runs alone at the end."""
    return sorted((shard for shard in shards if shard.has_work), key=lambda shard: -shard.num_chunks)


def pending_of(shards: Sequence[ShardPlan]) -> Pending:
    """Summarise a variant's plan."""
    planned = [shard for shard in shards if shard.state != ShardState.ORPHANED]
    return Pending(
        num_wanted=sum(shard.num_chunks for shard in planned),
        wanted_shards=frozenset(shard.shard_id for shard in planned),
        to_make=dict(Counter(str(shard.state) for shard in shards if shard.has_work)),
        num_orphaned=len(shards) - len(planned),
    )


def stored_shards(folder: Path) -> StoredShards:
    """Read the commits in the folder of a variant and check the files that they list."""
    records = read_commits(folder)
    problems = file_problems(folder, records.commits)
    for damaged in records.damaged:
        problems[damaged.shard_id] = (ShardState.CORRUPT, str(damaged))
    return StoredShards(records.commits, problems)


def file_problems(folder: Path, commits: Mapping[int, Commit]) -> dict[int, tuple[ShardState, str]]:
    """Return the shards whose files are missing or damaged, according to a quick check of each file."""
    return {
        shard_id: (ShardState.MISSING if problems[0].code in _MISSING else ShardState.CORRUPT, problems[0].message)
        for shard_id, problems in quick_problems(folder, commits.values()).items()
    }


def problems_of(variant: Variant) -> dict[int, tuple[str, str]]:
    """Return shard id -> (problem, reason), from a quick check of all files that the variant's commits list."""
    problems: dict[int, tuple[str, str]] = {
        shard_id: (str(state), reason)
        for shard_id, (state, reason) in file_problems(variant.directory, variant.commits).items()
    }
    problems |= {damaged.shard_id: ("corrupt", str(damaged)) for damaged in variant.damaged}
    return dict(sorted(problems.items()))


def is_readable(shard: CommittedShard) -> bool:
    """Return True if the shard's index is readable."""
    try:
        return shard.index.num_rows > 0
    except (Damaged, OSError):
        return False


@dataclass(frozen=True)
class DiskUse:
    """Disk use before and after the run of a plan, in bytes, if no variant is removed.

    Attributes:
        data_bytes: Size of the complete data folder before the run.
        variant_bytes: Size of each variant of the planned column, by name.
        has_variant: True if `variant_bytes` contains the planned variant.
        added_bytes: Lowest and highest size of the files that the run writes, including copies; None if unknown.
        freed_bytes: Size that `prep gc` frees once the planned variant is complete, unless training runs read the
            files: the column's other variants, and the shards of this variant that are replaced or removed.
        free_bytes: Free space of the disk; None in a bucket.
    """

    data_bytes: int
    variant_bytes: dict[str, int]
    has_variant: bool
    added_bytes: tuple[float, float] | None
    freed_bytes: int
    free_bytes: int | None

    @property
    def fits(self) -> bool:
        """False if the disk may be too small."""
        return self.free_bytes is None or self.added_bytes is None or self.added_bytes[1] <= self.free_bytes

    def values(self) -> dict[str, Any]:
        """Return the disk use as JSON values."""
        added = None if self.added_bytes is None else list(self.added_bytes)
        return {
            "data_bytes": self.data_bytes,
            "variant_bytes": self.variant_bytes,
            "added_bytes_range": added,
            "freed_by_gc_bytes": self.freed_bytes,
            "free_bytes": self.free_bytes,
            "fits": self.fits,
        }

    def lines(self) -> list[str]:
        """Return the disk use as text lines."""
        variants = f" in {count_noun(len(self.variant_bytes), 'variant')}" if self.variant_bytes else ""
        column_bytes = sum(self.variant_bytes.values())
        now = f"{size_text(column_bytes)}{variants} now" if variants else "nothing of this column yet"
        parts = [now]
        if self.added_bytes is None:
            parts.append("how much is added is unknown")
        elif self.added_bytes[1]:
            low, high = (size_text(round(size)) for size in self.added_bytes)
            parts.append(f"{range_text(low, high) if self.added_bytes[0] else f'at most {high}'} to be added")
        if self.free_bytes is not None:
            parts.append(f"{size_text(self.free_bytes)} free")
        lines = [f"disk     {'; '.join(parts)} (complete data folder: {size_text(self.data_bytes)})"]
        if self.freed_bytes:
            num_others = len(self.variant_bytes) - self.has_variant
            what = f"{count_noun(num_others, 'other variant')}" if num_others else "earlier shards"
            kept = f"{what} {'is' if num_others == 1 else 'are'} kept beside it"
            lines.append(f"         {kept}; then `prep gc` frees up to {size_text(self.freed_bytes)}")
        if not self.fits:
            lines.append("warning  this may not fit on the disk: free some space, or give a folder on another disk")
        return lines


def disk_use(
    data_dir: Path,
    *,
    column: str,
    variant: str,
    added_bytes: tuple[float, float] | None,
    replaced_bytes: int = 0,
) -> DiskUse:
    """Measure the disk use of a data folder and of a plan for it.

    Args:
        variant: Name of the planned variant.
        added_bytes: Lowest and highest size of the files that the run writes, including copies; None if unknown.
        replaced_bytes: Size of the shards that the run replaces or removes.
    """
    sizes = {name: folder_bytes(variant_dir(data_dir, column, name)) for name in list_variants(data_dir, column)}
    free_bytes = None
    if mirror_of(data_dir) is None:
        with suppress(OSError):
            free_bytes = shutil.disk_usage(data_dir).free
    return DiskUse(
        data_bytes=folder_bytes(data_dir),
        variant_bytes=sizes,
        has_variant=variant in sizes,
        added_bytes=added_bytes,
        freed_bytes=sum(size for name, size in sizes.items() if name != variant) + replaced_bytes,
        free_bytes=free_bytes,
    )


def folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of all readable files in a folder and its subfolders."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    with suppress(OSError):  # removed since the folder was listed
                        total += entry.stat(follow_symlinks=False).st_size
    return total
