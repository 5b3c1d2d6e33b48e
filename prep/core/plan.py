"""Compute the state of each shard in a plan, with a reason, and the disk use of the plan. All columns use this module.

A plan compares the shards that should exist with the stored shards.
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
from clipmill.prep.core.column import PendingWork
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT
from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import Commit
from clipmill.shards.dataset import list_variants, variant_dir
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.shards.verify import Code, quick_problems

_MISSING = frozenset({Code.TAR_MISSING, Code.INDEX_MISSING})
NUM_CHECK_THREADS = 8  # number of threads that check files; the checks are I/O-bound


class ShardState(StrEnum):
    """State of a shard in a plan."""

    CURRENT = "current"  # committed as planned
    NEW = "new"
    CHANGED = "changed"  # committed with different inputs
    MISSING = "missing"  # committed, but a file is missing
    CORRUPT = "corrupt"  # committed, but a file is damaged
    RETRY = "retry"  # committed with failures that are retried
    ORPHANED = "orphaned"  # committed, but no longer in the plan


Problems = Mapping[int, tuple[ShardState, str]]  # (MISSING or CORRUPT, reason), keyed by shard ID


@dataclass(frozen=True)
class WantedShard:
    """Shard that should exist.

    Attributes:
        shard_id: ID of the shard.
        split: Split of the shard.
        fingerprint: SHA-256 (hex) of everything that determines the content of the shard.
        num_chunks: Planned number of samples.
        rows: Rows of the shard in the plan of the column; empty if the plan has no rows.
    """

    shard_id: int
    split: str
    fingerprint: str
    num_chunks: int
    rows: range = range(0)


@dataclass(frozen=True)
class ShardPlan:
    """Shard in a plan, with its state.

    Attributes:
        shard_id: ID of the shard.
        split: Split of the shard.
        state: State of the shard.
        reason: Reason for the state, as text.
        plan_fingerprint: SHA-256 (hex) of everything that determines the content of the shard.
        rows: Rows of the shard in the plan of the column, in the order of the samples in the shard.
        num_chunks: Number of planned samples.
        num_copied: Number of samples to copy from the stored shard; None if the number is unknown until the shard is
            made.
        num_failed: Number of samples that failed when the shard was made; only for current shards.
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
    """Stored shards of a variant.

    Attributes:
        commits: Commits of the variant, keyed by shard ID.
        problems: Problems that a quick check of the files found, keyed by shard ID.
    """

    commits: dict[int, Commit]
    problems: Problems

    def without(self, shard_ids: Collection[int]) -> "StoredShards":
        """Return a copy without the commits of the given shards. The problems are kept."""
        commits = {shard_id: commit for shard_id, commit in self.commits.items() if shard_id not in shard_ids}
        return StoredShards(commits, self.problems)


@dataclass(frozen=True)
class HeldShards:
    """Shards to leave unchanged, because their planned content is unknown.

    Attributes:
        shard_ids: IDs of the shards.
        because: Reason why the shards are left unchanged.
    """

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
    """Yield each shard with its state: first the planned shards in order, then the remaining stored shards.

    Args:
        shards: Shards that should exist.
        stored: Stored shards of the variant.
        what_changed: Plural noun phrase for the inputs, such as "its chunks", used in the reason for changed shards.
        orphaned_because: Reason why stored shards are no longer in the plan.
        retry_codes: Codes of failures to retry even if nothing has changed, in addition to transient failures.
        unreadable: IDs of the videos whose sources currently cannot be read.
        held: Shards to leave unchanged.
    """
    planned_ids, commits = set[int](), stored.commits
    for shard in shards:
        planned_ids.add(shard.shard_id)
        state, reason = state_of(
            commits.get(shard.shard_id),
            shard.fingerprint,
            problem=stored.problems.get(shard.shard_id),
            retry_codes=TRANSIENT | retry_codes,
            unreadable=unreadable,
            what_changed=what_changed,
        )
        # The planned content of a held shard is unknown, so keep the stored shard.
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
        if shard_id not in planned_ids and shard_id in held.shard_ids:
            yield _stored_plan(commit, ShardState.CURRENT, held.because)
        elif shard_id not in planned_ids:
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
    """Return the state of a shard, and the reason for the state.

    Args:
        commit: Commit of the shard; None if the shard is not committed.
        fingerprint: Planned fingerprint of the shard.
        problem: Problem with the stored shard, as in `StoredShards.problems`; None if there is no problem.
        retry_codes: Codes of failures to retry even if nothing has changed.
        unreadable: IDs of the videos whose sources currently cannot be read.
        what_changed: Plural noun phrase for the inputs, such as "its chunks", used in the reason for changed shards.
    """
    if problem is not None:
        return problem
    if commit is None:
        return ShardState.NEW, "not committed yet"
    if commit.plan_fingerprint != fingerprint:
        return ShardState.CHANGED, f"{what_changed} have changed"
    retried_codes = Counter(
        failure.code
        for failure in commit.failures
        if failure.code in retry_codes or (failure.code in SOURCE_AWAY and failure.video_id not in unreadable)
    )
    if retried_codes:
        counts = ", ".join(f"{count} x {code}" for code, count in sorted(retried_codes.items()))
        return ShardState.RETRY, f"earlier failures are retried: {counts}"
    return ShardState.CURRENT, "up to date"


def _stored_plan(commit: Commit, state: ShardState, reason: str) -> ShardPlan:
    """Return the plan of a stored shard that is kept unchanged or removed."""
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
    """Return the shards that need work, largest first, so that no large shard starts last."""
    return sorted((shard for shard in shards if shard.has_work), key=lambda shard: -shard.num_chunks)


def pending_of(shards: Sequence[ShardPlan]) -> PendingWork:
    """Return the remaining work of a variant, given its planned shards."""
    planned_shards = [shard for shard in shards if shard.state != ShardState.ORPHANED]
    return PendingWork(
        num_wanted=sum(shard.num_chunks for shard in planned_shards),
        wanted_shards=frozenset(shard.shard_id for shard in planned_shards),
        to_make=dict(Counter(str(shard.state) for shard in shards if shard.has_work)),
        num_orphaned=len(shards) - len(planned_shards),
    )


def stored_shards(folder: Path) -> StoredShards:
    """Read the commits in the folder of a variant, and check the committed files."""
    records = read_commits(folder)
    problems = file_problems(folder, records.commits)
    for damaged in records.damaged:
        problems[damaged.shard_id] = (ShardState.CORRUPT, str(damaged))
    return StoredShards(records.commits, problems)


def file_problems(folder: Path, commits: Mapping[int, Commit]) -> dict[int, tuple[ShardState, str]]:
    """Return (state, reason) of each shard with files that a quick check finds missing or damaged, keyed by ID."""
    return {
        shard_id: (ShardState.MISSING if problems[0].code in _MISSING else ShardState.CORRUPT, problems[0].message)
        for shard_id, problems in quick_problems(folder, commits.values()).items()
    }


def problems_of(variant: Variant) -> dict[int, tuple[str, str]]:
    """Return the problems that a quick check finds in the files of a variant, as {shard ID: (state, reason)}."""
    problems: dict[int, tuple[str, str]] = {
        shard_id: (str(state), reason)
        for shard_id, (state, reason) in file_problems(variant.directory, variant.commits).items()
    }
    problems |= {damaged.shard_id: ("corrupt", str(damaged)) for damaged in variant.damaged}
    return dict(sorted(problems.items()))


def is_readable(shard: CommittedShard) -> bool:
    """Return True if the index of a shard can be read and has rows."""
    try:
        return shard.index.num_rows > 0
    except (Damaged, OSError):
        return False


@dataclass(frozen=True)
class DiskUse:
    """Disk use of a column in bytes, before and after the plan runs, if no variant is removed.

    Attributes:
        data_bytes: Size of the complete data folder before the run.
        variant_bytes: Size of each variant of the column before the run, keyed by name.
        has_variant: True if `variant_bytes` contains the planned variant.
        added_bytes: Minimum and maximum size of the files that the run writes, including copies; None if unknown.
        freed_bytes: Size of the files that `prep gc` removes once the planned variant is complete, unless training runs
            read them: other variants of the column, and shards of the planned variant that are replaced or removed.
        free_bytes: Free space on the disk; None if the data folder is in a bucket or the free space is unknown.
    """

    data_bytes: int
    variant_bytes: dict[str, int]
    has_variant: bool
    added_bytes: tuple[float, float] | None
    freed_bytes: int
    free_bytes: int | None

    @property
    def fits(self) -> bool:
        """False if the free space may be too small for the added files."""
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
        """Return the disk use as lines of text."""
        variants = f" in {count_noun(len(self.variant_bytes), 'variant')}" if self.variant_bytes else ""
        column_bytes = sum(self.variant_bytes.values())
        parts = [f"{size_text(column_bytes)}{variants} now" if variants else "no variant of this column yet"]
        if self.added_bytes is None:
            parts.append("added size unknown")
        elif self.added_bytes[1]:
            low, high = (size_text(round(size)) for size in self.added_bytes)
            parts.append(f"{range_text(low, high) if self.added_bytes[0] else f'at most {high}'} to be added")
        if self.free_bytes is not None:
            parts.append(f"{size_text(self.free_bytes)} free")
        lines = [f"disk     {'; '.join(parts)} (complete data folder: {size_text(self.data_bytes)})"]
        if self.freed_bytes:
            num_others = len(self.variant_bytes) - self.has_variant
            what = f"{count_noun(num_others, 'other variant')}" if num_others else "earlier shards"
            kept_text = f"{what} {'is' if num_others == 1 else 'are'} kept until this variant is complete"
            lines.append(f"         {kept_text}; then `prep gc` frees up to {size_text(self.freed_bytes)}")
        if not self.fits:
            lines.append("warning  the run may fill the disk: free some space, or use a folder on a different disk")
        return lines


def disk_use(
    data_dir: Path,
    *,
    column: str,
    variant: str,
    added_bytes: tuple[float, float] | None,
    replaced_bytes: int = 0,
) -> DiskUse:
    """Measure the disk use of a data folder, and compute how the plan of a column changes it.

    Args:
        column: Name of the planned column.
        variant: Name of the planned variant.
        added_bytes: Minimum and maximum size of the files that the run writes, including copies; None if unknown.
        replaced_bytes: Total size of the shards that the run replaces or removes.
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
                    with suppress(OSError):  # the file was removed after the folder was listed
                        total += entry.stat(follow_symlinks=False).st_size
    return total
