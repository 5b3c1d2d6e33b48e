"""Verification of a variant: every byte of the committed shards and, on request, every frame or number of the samples.

Damage found here has to be repaired by the next run, which checks only sizes and modification times
(clipmill.shards.verify.quick_check). A damaged file that would pass that check is therefore marked by making it newer
than its commit.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import Inaccessible, first_line
from clipmill.manifests.plugins import import_object
from clipmill.manifests.storage.mirrors import file_state, local_copy, mirror_of, set_modified_time
from clipmill.prep.core.column import CheckedSample, ColumnSpec, DeepCode
from clipmill.prep.engines import Outcome
from clipmill.prep.engines.processes import ProcessEngine
from clipmill.shards.commit_table import distrust
from clipmill.shards.commits import Commit, commit_path
from clipmill.shards.index import extensions_of, open_index
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.verify import Code, Problem, check_record, damaged_commit, quick_check, verify_shard

_INDEX_CODES = frozenset({Code.INDEX_CHECKSUM, Code.INDEX_FORMAT, Code.ENERGON_INDEX})
_WORKER_LOST, _INACCESSIBLE = "worker_lost", "inaccessible"


@dataclass(frozen=True)
class Finding:
    """One problem; `key` names the chunk if the problem concerns a single chunk."""

    shard_id: int
    key: str | None
    code: str
    message: str


@dataclass(frozen=True)
class Verified:
    """What was checked and what was found.

    Attributes:
        num_deep: number of frames decoded, or of array rows checked.
        findings: differences from the committed bytes, in shard order.
        unseen: ids of damaged shards that could not be marked, so that the next run would not notice the damage.
        deep_findings: problems of samples whose bytes match the commit.
        inaccessible: shards that a bucket does not give now; nothing is known about them.
    """

    variant: str
    num_shards: int
    num_samples: int
    num_bytes: int
    num_deep: int
    findings: tuple[Finding, ...]
    unseen: tuple[int, ...]
    deep_findings: tuple[Finding, ...]
    inaccessible: tuple[Finding, ...] = ()

    @property
    def num_damaged(self) -> int:
        return len(self.findings) + len(self.deep_findings)

    @property
    def num_problems(self) -> int:
        return self.num_damaged + len(self.inaccessible)


@dataclass(frozen=True)
class DeepTask:
    """One shard to check in depth; `check` is the import path of its column's `check_sample`."""

    variant_dir: Path
    commit: Commit
    check: str


@dataclass(frozen=True)
class DeepResult:
    """Result of the deep check of a shard: number of frames or array rows, and findings as (key, code, message)."""

    shard_id: int
    num_checked: int
    findings: tuple[tuple[str | None, str, str], ...]


def verify_variant(
    variant: Variant,
    *,
    column: ColumnSpec,
    deep: bool,
    num_workers: int,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
    on_deep_shard: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Read every byte of the committed shards; with `deep`, also check every sample of the undamaged shards.

    Args:
        num_workers: number of shards checked in parallel: by threads that read, by processes that decode.
        on_shard: called with (shards read, number of shards).
        on_deep_shard: called likewise during the deep check.
    """
    problems = {damaged.shard_id: [damaged] for damaged in map(damaged_commit, variant.damaged)}
    refused: dict[int, Finding] = {}
    for done, (commit, outcome) in enumerate(_verify_bytes(variant, num_threads=num_workers), 1):
        on_shard(done, len(variant.commits))
        if isinstance(outcome, Inaccessible):
            refused[commit.shard_id] = Finding(commit.shard_id, None, _INACCESSIBLE, str(outcome))
        elif outcome:
            problems[commit.shard_id] = outcome
    unseen = [
        shard_id
        for shard_id, of_shard in problems.items()
        if (commit_of := variant.commits.get(shard_id)) and not mark(variant.directory, commit_of, of_shard)
    ]
    tried = problems.keys() | refused.keys()
    whole = [commit for shard_id, commit in variant.commits.items() if shard_id not in tried and commit.files]
    results = []
    if deep:
        for result in _check_deep(variant, whole, column=column, num_workers=num_workers):
            results.append(result)
            on_deep_shard(len(results), len(whole))
    files = [commit.files for commit in variant.commits.values() if commit.files is not None]
    deep_findings = [
        Finding(result.shard_id, key, code, message)
        for result in sorted(results, key=lambda result: result.shard_id)
        for key, code, message in result.findings
    ]
    refused |= {finding.shard_id: finding for finding in deep_findings if finding.code == _INACCESSIBLE}
    return Verified(
        variant=variant.directory.name,
        num_shards=len(files),
        num_samples=sum(file.num_samples for file in files),
        num_bytes=sum(file.tar_bytes + file.index_bytes for file in files),
        num_deep=sum(result.num_checked for result in results),
        findings=tuple(
            Finding(problem.shard_id, problem.key, str(problem.code), problem.message)
            for _, of_shard in sorted(problems.items())
            for problem in of_shard
        ),
        unseen=tuple(sorted(unseen)),
        deep_findings=tuple(finding for finding in deep_findings if finding.code != _INACCESSIBLE),
        inaccessible=tuple(refused[shard_id] for shard_id in sorted(refused)),
    )


def mark(folder: Path, commit: Commit, problems: list[Problem]) -> bool:
    """Mark a damaged shard for the next run; return True if the next run will notice the damage."""
    if any(problem.code == Code.COMMIT_DAMAGED for problem in problems):
        with suppress(OSError):
            distrust(commit_path(folder, commit.shard_id))
            return True
        return False
    if commit.files is None:
        return True
    is_index = all(problem.code in _INDEX_CODES for problem in problems)
    # The quick check reads again files that are newer than their commit. A flipped bit does not change the modification
    # time by itself, and neither does copying a file with its times preserved.
    with suppress(OSError, Inaccessible):
        if quick_check(folder, commit):
            return True
        committed_ns = file_state(commit_path(folder, commit.shard_id))[1]
        now_ns = max(time.time_ns(), committed_ns + 1_000_000_000)
        energon = all(problem.code == Code.ENERGON_INDEX for problem in problems)
        name = commit.files.energon_index if energon else commit.files.index if is_index else commit.files.tar
        set_modified_time(folder / name, time_ns=now_ns)
        return bool(quick_check(folder, commit))
    return False


def _verify_bytes(variant: Variant, *, num_threads: int) -> Iterator[tuple[Commit, list[Problem] | Inaccessible]]:
    with ThreadPoolExecutor(num_threads) as pool:
        running = {pool.submit(_verify_one, variant.directory, commit): commit for commit in variant.commits.values()}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _verify_one(variant_dir: Path, commit: Commit) -> list[Problem] | Inaccessible:
    try:
        # The commit may come from the table of commits.
        return check_record(variant_dir, commit) or verify_shard(variant_dir, commit)
    except Inaccessible as error:
        return error


def _check_deep(
    variant: Variant, commits: list[Commit], *, column: ColumnSpec, num_workers: int
) -> Iterator[DeepResult]:
    longest_first = sorted(commits, key=lambda commit: -(commit.files.num_samples if commit.files else 0))
    tasks = (DeepTask(variant.directory, commit, column.check_sample) for commit in longest_first)
    check = None
    if (mirror := mirror_of(variant.directory)) is not None:
        from clipmill.manifests.storage.working_copy import mount_problem

        check = partial(mount_problem, mirror.access)
    for outcome in ProcessEngine(num_workers=num_workers).run(check_deep, tasks, check=check):
        if not isinstance(outcome, Outcome):
            continue
        lost = DeepResult(outcome.task.commit.shard_id, 0, ((None, _WORKER_LOST, outcome.lost or ""),))
        yield outcome.result or lost


def check_deep(task: DeepTask) -> DeepResult:
    """Check the samples of a shard one after another, in a worker; one sample is in memory at a time."""
    findings: list[tuple[str | None, str, str]] = []
    num_checked, key = 0, None
    try:
        check_sample = import_object(task.check)
        for row, members in _samples(task):
            key = row["key"]
            checked: CheckedSample = check_sample(row, members, task.commit.split)
            num_checked += checked.num_checked
            findings += [(key, str(code), message) for code, message in checked.differences]
    except (Damaged, OSError) as error:
        findings.append((None, str(DeepCode.UNREADABLE), str(error)))
    except Inaccessible as error:
        findings.append((None, _INACCESSIBLE, str(error)))
    except Exception as error:  # noqa: BLE001 - of any kind, as it may be the code of others
        findings.append((key, str(DeepCode.CHECK_FAILED), f"{task.check}: {type(error).__name__}: {first_line(error)}"))
    return DeepResult(task.commit.shard_id, num_checked, tuple(findings))


def _samples(task: DeepTask) -> Iterator[tuple[dict[str, Any], dict[str, bytes]]]:
    """Yield each sample's index row and its members."""
    if task.commit.files is None:
        return
    table = open_index(task.variant_dir / task.commit.files.index)
    path = task.variant_dir / task.commit.files.tar
    with local_copy(path), path.open("rb") as tar:
        for number in range(table.num_rows):
            row = {name: table[name][number].as_py() for name in table.column_names}
            members = {}
            for extension in extensions_of(table):
                tar.seek(row[f"{extension}_offset"])
                members[extension] = tar.read(row[f"{extension}_size"])
            yield row, members
