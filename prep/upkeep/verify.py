"""`prep verify`: check every byte of shards and records and, with `--deep`, every frame or value of the samples.

The next run repairs the damage, but it checks only sizes and modification times (clipmill.shards.verify.quick_check).
If a damaged file would pass that check, `prep verify` makes the file newer than its commit, so that the run reads it.

The records of a data folder are the manifest, probes, shots, layouts and dataset.json. Each finding contains the
command that repairs the record.
"""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.errors import NOT_A_FILE, Inaccessible, UserError, first_line
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.plugins import import_object
from clipmill.manifests.schema import MANIFEST_FILE
from clipmill.manifests.storage.mirrors import file_state, local_copy, mirror_of, set_modified_time
from clipmill.manifests.store import TABLE_FILES, manifest_dir, open_captions, read_rejected_rows, read_videos
from clipmill.prep.core.column import CheckedSample, ColumnSpec, DeepCode, StoredRecipe
from clipmill.prep.core.data_folder import PROBES_FILE, SHOTS_FILE
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.tables import (
    LAYOUT_FOLDER,
    DamagedLayout,
    owner_of_layout,
    read_layout,
    read_table_file,
    variants_of,
)
from clipmill.prep.core.variants import SELECTION_FILE, read_selection, stored_request
from clipmill.prep.core.work import work_of
from clipmill.prep.engines import Outcome
from clipmill.prep.engines.processes import ProcessEngine
from clipmill.prep.registry import column_named, columns
from clipmill.prep.sources.shot_table import SHOTS
from clipmill.prep.sources.table import PROBES
from clipmill.prep.upkeep.garbage import late_files
from clipmill.shards.columns import VIDEO, command_for
from clipmill.shards.commit_table import distrust_folder
from clipmill.shards.commits import Commit, commit_path
from clipmill.shards.dataset import commands_of, current_variant, list_variants, variant_dir
from clipmill.shards.format import DATASET_FILE, RECIPE_FILE
from clipmill.shards.index import extensions_of, open_index
from clipmill.shards.lists import damaged_lists
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.verify import Code, Problem, check_record, commit_problem, quick_check, verify_shard

_INDEX_CODES = frozenset({Code.INDEX_CHECKSUM, Code.INDEX_FORMAT, Code.ENERGON_INDEX})
_WORKER_LOST, _INACCESSIBLE = "worker_lost", "inaccessible"


@dataclass(frozen=True)
class Finding:
    """Problem in a shard.

    Attributes:
        shard_id: ID of the shard.
        key: Key of the sample that has the problem; None if the problem is not in a single sample.
        code: Code of the problem.
        message: Description of the problem.
    """

    shard_id: int
    key: str | None
    code: str
    message: str


@dataclass(frozen=True)
class VerifyResult:
    """Result of the verification of a variant.

    Attributes:
        variant: Name of the variant.
        num_shards: Number of committed shards with samples.
        num_samples: Number of samples in these shards.
        num_bytes: Total size of the tars and indexes in bytes.
        num_deep: Number of decoded frames or checked array rows.
        findings: Differences from the committed bytes, ordered by shard ID.
        unseen: IDs of damaged shards that could not be marked. The next run will not notice their damage.
        deep_findings: Problems of samples whose bytes match the commit.
        inaccessible: Shards that currently cannot be read from the bucket. They may or may not be damaged.
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
    """Task that checks the samples of a shard.

    Attributes:
        variant_dir: Folder of the variant.
        commit: Commit of the shard.
        check: Import path of the column's `check_sample`.
    """

    variant_dir: Path
    commit: Commit
    check: str


@dataclass(frozen=True)
class DeepResult:
    """Result of checking the samples of a shard.

    Attributes:
        shard_id: ID of the shard.
        num_checked: Number of decoded frames or checked array rows.
        findings: (key, code, message) of each problem.
    """

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
) -> VerifyResult:
    """Read every byte of the committed shards and, with `deep`, check every sample of the undamaged shards.

    Damaged shards are marked, so that the next run makes them again.

    Args:
        num_workers: Number of shards to process in parallel: in threads when reading, in processes when decoding.
        on_shard: Function (number of shards read, total number) that is called after each shard.
        on_deep_shard: Function (number of shards checked, total number) that is called after each shard of the deep
            check.
    """
    problems = {damaged.shard_id: [damaged] for damaged in map(commit_problem, variant.damaged)}
    inaccessible: dict[int, Finding] = {}
    with ThreadPoolExecutor(num_workers) as pool:
        commits_by_future = {
            pool.submit(_verify_commit, variant.directory, commit): commit for commit in variant.commits.values()
        }
        try:
            for done, future in enumerate(as_completed(commits_by_future), 1):
                on_shard(done, len(variant.commits))
                shard_id, outcome = commits_by_future[future].shard_id, future.result()
                if isinstance(outcome, Inaccessible):
                    inaccessible[shard_id] = Finding(shard_id, None, _INACCESSIBLE, str(outcome))
                elif outcome:
                    problems[shard_id] = outcome
        finally:
            pool.shutdown(cancel_futures=True)  # if the command is interrupted, do not read more shards
    unseen = [
        shard_id
        for shard_id, shard_problems in problems.items()
        if (commit := variant.commits.get(shard_id)) and not mark_damage(variant.directory, commit, shard_problems)
    ]
    unusable_ids = problems.keys() | inaccessible.keys()
    intact_commits = [
        commit for shard_id, commit in variant.commits.items() if shard_id not in unusable_ids and commit.files
    ]
    results = []
    if deep:
        for result in _check_deep(variant, intact_commits, column=column, num_workers=num_workers):
            results.append(result)
            on_deep_shard(len(results), len(intact_commits))
    files = [commit.files for commit in variant.commits.values() if commit.files is not None]
    deep_findings = [
        Finding(result.shard_id, key, code, message)
        for result in sorted(results, key=lambda result: result.shard_id)
        for key, code, message in result.findings
    ]
    inaccessible |= {finding.shard_id: finding for finding in deep_findings if finding.code == _INACCESSIBLE}
    return VerifyResult(
        variant=variant.directory.name,
        num_shards=len(files),
        num_samples=sum(file.num_samples for file in files),
        num_bytes=sum(file.tar_bytes + file.index_bytes for file in files),
        num_deep=sum(result.num_checked for result in results),
        findings=tuple(
            Finding(problem.shard_id, problem.key, str(problem.code), problem.message)
            for _, shard_problems in sorted(problems.items())
            for problem in shard_problems
        ),
        unseen=tuple(sorted(unseen)),
        deep_findings=tuple(finding for finding in deep_findings if finding.code != _INACCESSIBLE),
        inaccessible=tuple(inaccessible[shard_id] for shard_id in sorted(inaccessible)),
    )


def mark_damage(folder: Path, commit: Commit, problems: list[Problem]) -> bool:
    """Mark a damaged shard, so that the next run makes it again. Return True if the next run will notice the damage."""
    if any(problem.code == Code.COMMIT_DAMAGED for problem in problems):
        with suppress(OSError):
            distrust_folder(commit_path(folder, commit.shard_id))
            return True
        return False
    if commit.files is None:
        return True
    is_index = all(problem.code in _INDEX_CODES for problem in problems)
    # The quick check reads only files that are newer than their commit, but neither a flipped bit nor a copy that
    # preserves times changes the modification time.
    with suppress(OSError, Inaccessible):
        if quick_check(folder, commit):
            return True
        committed_ns = file_state(commit_path(folder, commit.shard_id))[1]
        now_ns = max(time.time_ns(), committed_ns + 1_000_000_000)
        is_energon_index = all(problem.code == Code.ENERGON_INDEX for problem in problems)
        name = commit.files.energon_index if is_energon_index else commit.files.index if is_index else commit.files.tar
        set_modified_time(folder / name, time_ns=now_ns)
        return bool(quick_check(folder, commit))
    return False


def _verify_commit(folder: Path, commit: Commit) -> list[Problem] | Inaccessible:
    try:
        # The commit may have been read from the commit table, so check the file of the commit too.
        return check_record(folder, commit) or verify_shard(folder, commit)
    except Inaccessible as error:
        return error


def _check_deep(
    variant: Variant, commits: list[Commit], *, column: ColumnSpec, num_workers: int
) -> Iterator[DeepResult]:
    sorted_commits = sorted(commits, key=lambda commit: -(commit.files.num_samples if commit.files else 0))
    tasks = (DeepTask(variant.directory, commit, column.check_sample) for commit in sorted_commits)
    check = None
    if (mirror := mirror_of(variant.directory)) is not None:
        from clipmill.manifests.storage.mounting import mount_problem

        check = partial(mount_problem, mirror.access)
    for outcome in ProcessEngine(num_workers=num_workers).run(check_deep, tasks, check=check):
        if not isinstance(outcome, Outcome):
            continue
        loss = DeepResult(outcome.task.commit.shard_id, 0, ((None, _WORKER_LOST, outcome.lost or ""),))
        yield outcome.result or loss


def check_deep(task: DeepTask) -> DeepResult:
    """Check the samples of a shard in a worker process, with one sample in memory at a time."""
    findings: list[tuple[str | None, str, str]] = []
    num_checked, key = 0, None
    try:
        check_sample = import_object(task.check)
        if task.commit.files is None:
            return DeepResult(task.commit.shard_id, 0, ())
        table = open_index(task.variant_dir / task.commit.files.index)
        path = task.variant_dir / task.commit.files.tar
        with local_copy(path), path.open("rb") as tar:
            for index_row in range(table.num_rows):
                row = {name: table[name][index_row].as_py() for name in table.column_names}
                row["tar"] = path
                key, members = row["key"], {}
                for extension in extensions_of(table):
                    tar.seek(row[f"{extension}_offset"])
                    members[extension] = tar.read(row[f"{extension}_size"])
                checked_sample: CheckedSample = check_sample(row, members, task.commit.split)
                num_checked += checked_sample.num_checked
                findings += [(key, str(code), message) for code, message in checked_sample.differences]
    except (Damaged, OSError) as error:
        findings.append((None, str(DeepCode.UNREADABLE), str(error)))
    except Inaccessible as error:
        findings.append((None, _INACCESSIBLE, str(error)))
    except Exception as error:  # noqa: BLE001 - a plugin's check may raise anything
        findings.append((key, str(DeepCode.CHECK_FAILED), f"{task.check}: {type(error).__name__}: {first_line(error)}"))
    return DeepResult(task.commit.shard_id, num_checked, tuple(findings))


@dataclass(frozen=True)
class RecordFinding:
    """Damaged or missing record.

    Attributes:
        path: Path of the record.
        message: Description of the damage.
        repair: Command that repairs the record.
    """

    path: str
    message: str
    repair: str


def check_folder_records(data_dir: Path) -> list[RecordFinding]:
    """Check the records of a data folder that do not belong to a variant, including their checksums."""
    return [
        *_check_manifest(data_dir),
        *_check_tables(data_dir),
        *_check_dataset(data_dir),
        *_check_layouts(data_dir),
    ]


def check_variant_records(variant: Variant, *, column: ColumnSpec, data_dir: Path) -> list[RecordFinding]:
    """Check the records of a variant: recipe, selection, lists of commits and shards, and extra files of the column."""
    folder = variant.directory
    repair = f"prep {command_for(column.name, folder.name)} with the settings of {folder.name}"
    problems = []
    try:
        recipe = variant.recipe
    except UserError as error:
        problems.append((folder / RECIPE_FILE, str(error)))
    else:
        if not folder.name.endswith(f"-{recipe_fingerprint(recipe)[:8]}"):
            problems.append((folder / RECIPE_FILE, "the recipe does not match the fingerprint in the folder name"))
        else:
            with suppress(UserError):  # the command of a recipe with a different version is unknown
                repair = column.command_line(stored_request(variant), data_dir=data_dir)
    try:
        read_selection(folder)
    except UserError as error:
        problems.append((folder / SELECTION_FILE, str(error)))
    if variant.contents_damage is not None:
        problems.append((variant.contents_damage.path, str(variant.contents_damage)))
    problems += [(damage.path, str(damage)) for damage in damaged_lists(folder, variant.commits)]
    for extra in work_of(column).extra_folders:
        for path in sorted((folder / extra.name).iterdir()) if (folder / extra.name).is_dir() else ():
            if extra.file_names.fullmatch(path.name) and not extra.is_complete(path):
                problems.append((path, "the content does not match the hash in the file name"))
    for file in work_of(column).extra_files:
        if (problem := file.problem(variant)) is not None:
            problems.append((folder / file.name, problem))
    return [RecordFinding(str(path), message, repair) for path, message in problems]


def _check_manifest(data_dir: Path) -> Iterator[RecordFinding]:
    folder = manifest_dir(data_dir)
    repair = "the same `prep manifest` commands as before, in the same order"
    if not (folder / MANIFEST_FILE).exists():
        if any((folder / name).exists() for name in TABLE_FILES):
            yield RecordFinding(
                str(folder / MANIFEST_FILE), "the file is missing, but other manifest files exist", repair
            )
        return
    messages = []
    for read in (read_videos, _read_captions, read_rejected_rows, lambda folder: open_stored_captions(folder).verify()):
        try:
            read(data_dir)
        except UserError as error:
            messages.append(str(error))
    yield from (RecordFinding(str(folder), message, repair) for message in dict.fromkeys(messages))


def _read_captions(data_dir: Path) -> None:
    with open_captions(data_dir) as file:
        try:
            for group in range(file.num_row_groups):
                file.read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"the captions cannot be read: {error}") from error


def _check_tables(data_dir: Path) -> Iterator[RecordFinding]:
    """Check the tables of probes and shots. A missing table is not damage, because a run rebuilds it if needed."""
    for path, schema in ((data_dir / PROBES_FILE, PROBES), (data_dir / SHOTS_FILE, SHOTS)):
        try:
            read_table_file(path, schema=schema)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            if schema is PROBES:
                message = f"{error}; until the table is repaired, all sources are probed again"
                repair = f"prep plan --data {shlex.quote(str(data_dir))}"
            else:
                detect_command = f"prep {command_for(VIDEO)} --cut shots"
                message = f"{error}; until the table is repaired, `{detect_command}` detects all shots again"
                command = _command_of(data_dir, column_named(VIDEO), lambda stored: stored.get("cut") == "shots")
                repair = command or f"{detect_command} with the same settings as before"
            yield RecordFinding(str(path), message, repair)


def _check_dataset(data_dir: Path) -> Iterator[RecordFinding]:
    path = data_dir / DATASET_FILE
    used_columns = [column for column in columns() if list_variants(data_dir, column.name)]
    try:
        incomplete_columns = [column for column in used_columns if current_variant(data_dir, column.name) is None]
    except UserError as error:
        yield RecordFinding(str(path), str(error), str(getattr(error, "hint", "")))
        return
    for column in used_columns:
        for name in list_variants(data_dir, column.name):
            folder = variant_dir(data_dir, column.name, name)
            if name != current_variant(data_dir, column.name) and late_files(folder, column.name):
                message = "a late run wrote commits after the variant had been removed"
                yield RecordFinding(str(folder), message, f"prep gc --data {shlex.quote(str(data_dir))}")
    if incomplete_columns:
        commands = ", ".join(
            _command_of(data_dir, column, lambda stored: True) or commands_of(data_dir, column.name)
            for column in incomplete_columns
        )
        names = ", ".join(column.name for column in incomplete_columns)
        no_current = f"no variant is current, but there are variants of {names}"
        message = no_current if path.exists() else "the file is missing, but variants exist"
        yield RecordFinding(str(path), message, f"{commands} with the same settings as before")


def _check_layouts(data_dir: Path) -> Iterator[RecordFinding]:
    for path in sorted((data_dir / LAYOUT_FOLDER).glob("*.parquet")):
        try:
            read_layout(path)
        except (DamagedLayout, OSError) as error:
            yield RecordFinding(str(path), str(error), _layout_repair(path, data_dir))
    layouts = set()
    for column in columns():
        for variant in variants_of(data_dir, column.name):
            # Skip unreadable recipes, which are reported separately, recipes of different versions, and columns that
            # cannot be loaded.
            with suppress(UserError):
                if (name := work_of(column).layout_file(variant.recipe)) is not None and variant.commits:
                    layouts.add(data_dir / LAYOUT_FOLDER / name)
    for path in layouts:
        if not path.exists():
            message = "the layout is missing, but shards depend on it"
            yield RecordFinding(str(path), message, _layout_repair(path, data_dir))


def _layout_repair(path: Path, data_dir: Path) -> str:
    owner, command = owner_of_layout(path), None
    column = next((column for column in columns() if column.name == owner), None)
    if column is not None:
        layout_file = work_of(column).layout_file
        command = _command_of(data_dir, column, lambda stored: layout_file(stored) == path.name)
    return command or f"{commands_of(data_dir, owner)} with the same settings as before"


def _command_of(data_dir: Path, column: ColumnSpec, matches: Callable[[StoredRecipe], bool]) -> str | None:
    """Return the command for a variant with a matching recipe (preferably the current variant), or None."""
    current = None
    with suppress(UserError):  # a damaged dataset.json is reported separately
        current = current_variant(data_dir, column.name)
    for name in sorted(list_variants(data_dir, column.name), key=lambda name: name != current):
        with suppress(UserError):  # the recipe is unreadable or has a different version
            stored = stored_request(Variant(variant_dir(data_dir, column.name, name)))
            if matches(stored):
                return column.command_line(stored, data_dir=data_dir)
    return None


def verified_text(result: VerifyResult, *, column: ColumnSpec, max_findings: int) -> str:
    """Return a line for each finding, up to `max_findings`, and a summary."""
    findings = [*result.findings, *result.deep_findings, *result.inaccessible]
    lines = [
        f"shard {finding.shard_id:06d}  {finding.code}  {finding.key or '-'}  "
        f"{finding.message.removeprefix(f'{finding.key}: ')}"
        for finding in findings[:max_findings]
    ]
    if len(findings) > max_findings:
        lines.append(f"... and {len(findings) - max_findings:,} more; use --json for the full list")
    total = f"{count_noun(result.num_samples, column.sample)} in {count_noun(result.num_shards, 'shard')}"
    deep = f", {count_noun(result.num_deep, column.checked_noun)}" if result.num_deep else ""
    state = "damaged" if result.num_damaged else "not read completely" if result.inaccessible else "OK"
    lines.append(f"{column.name} {result.variant}: {total}, {size_text(result.num_bytes)} read{deep}: {state}")
    if not result.num_shards and not result.num_problems:
        lines[-1] += "; no shards yet (`prep status` shows the next step)"
    return "\n".join(lines)


def repairs_text(records: list[RecordFinding]) -> list[str]:
    """Return a line with the number of damaged records and the commands that repair them; [] if there are none."""
    if not records:
        return []
    commands = dict.fromkeys(record.repair for record in records)
    repair = repair_text("; ".join(commands), (record.message for record in records))
    return [f"{count_noun(len(records), 'missing or damaged record')}; {repair}"]


def repair_text(command: str, messages: Iterable[str]) -> str:
    """Return a clause that explains how to repair damage.

    Args:
        command: Command that repairs the damage.
        messages: Descriptions of the damage. If a folder has the name of a file, the user has to move the folder
            first, because no command replaces a folder.
    """
    has_folder = any(NOT_A_FILE in message for message in messages)
    first_step = "remove or move the folders that have the names of files, then " if has_folder else ""
    return f"to repair, {first_step}run: {command}"


def failure_text(result: VerifyResult, variant: Variant, *, column: ColumnSpec, data_dir: Path) -> str:
    """Describe the damage in a variant, how to repair it, and how many shards could not be read from the bucket."""
    num_shards = len({finding.shard_id for finding in (*result.findings, *result.deep_findings)})
    name, parts = variant.directory.name, []
    if result.num_damaged:
        parts.append(f"{count_noun(result.num_damaged, 'problem')} in {count_noun(num_shards, 'shard')} of {name}")
    if result.findings:
        try:
            command = column.command_line(stored_request(variant), data_dir=data_dir)
        except UserError:
            command = f"prep {command_for(column.name, name)} with the settings of the variant"
        parts.append(repair_text(command, (finding.message for finding in result.findings)))
    # A run does not notice the damage in these shards, so the user has to remove their commits.
    unmarked_ids = sorted({*result.unseen, *(finding.shard_id for finding in result.deep_findings)})
    if unmarked_ids:
        paths = ", ".join(str(commit_path(variant.directory, shard_id)) for shard_id in unmarked_ids[:5])
        suffix = f" and {len(unmarked_ids) - 5} more" if len(unmarked_ids) > 5 else ""
        parts.append(
            f"a run cannot detect some of the damage; to repair it, first remove these commits: {paths}{suffix}"
        )
    if result.inaccessible:
        shards = count_noun(len(result.inaccessible), "shard")
        parts.append(f"{shards} of {name} cannot be accessed but may be intact; verify again later")
    return "; ".join(parts)
