"""`prep gc`: find and remove files in a data folder that are no longer needed, and unfinished uploads in a bucket.

A file is removed only if its name and its folder match the data format (`clipmill.shards.format`); all other files are
kept and listed. All variants of a column are kept unless its current variant is known to be complete. A variant with
readers (`clipmill.shards.marks`) keeps all files that the readers have opened, including shards that a later run has
replaced.
"""

import errno
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, on_one_line, size_text
from clipmill.manifests.publish import parse_json, rename, target_of, temporaries_in, temporary_path
from clipmill.manifests.publish import remove as remove_file
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.store import MANIFEST_FOLDER, is_table_file, manifest_dir
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.data_folder import ROOT_FILES, RUNNING_FILE, incomplete_variants
from clipmill.prep.core.failure_list import FAILURES_FILE, codes_line
from clipmill.prep.core.plan import problems_of
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.report import why_unfinished
from clipmill.prep.core.shard_result import RUNNING_FOLDER
from clipmill.prep.core.tables import LAYOUT_FOLDER
from clipmill.prep.core.variants import SELECTION_FILE, lost_samples
from clipmill.prep.core.work import usable_works, work_of
from clipmill.prep.registry import columns
from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import commit_path
from clipmill.shards.dataset import current_variant, list_variants, unfinished_variant, variant_dir
from clipmill.shards.format import (
    COMMIT_TABLE_FILE,
    COMMITS_FOLDER,
    CONTENTS_FILE,
    FOLDER,
    RECIPE_FILE,
    folder_of,
    folders_in,
)
from clipmill.shards.marks import Reader, Readers
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    from clipmill.manifests.storage.s3_requests import OpenUpload
    from clipmill.manifests.storage.working_copy import WorkingCopy

_BATCH = 1000  # maximum number of objects that S3 deletes in one request
_LEFTOVER = "temporary file of a killed command"
_ENDED_READER = "mark of a reader that has ended"


@dataclass(frozen=True)
class Item:
    """File that can be removed.

    Attributes:
        path: Path of the file.
        size_bytes: Size of the file.
        reason: Reason why the file is not needed.
        variant: Variant of the file (`column/variant`) if all files of the variant are removed; otherwise None.
        kind: Kind of the file, such as "commit". Files of the same kind can be removed in any order.
    """

    path: Path
    size_bytes: int
    reason: str
    variant: str | None = None
    kind: str = ""

    @property
    def is_recipe(self) -> bool:
        """True if the file is the recipe.json of a variant."""
        return self.variant is not None and self.path.name == RECIPE_FILE


@dataclass(frozen=True)
class Garbage:
    """Files that can be removed, and files that are kept.

    Attributes:
        items: Files to remove, in the order of removal: within a variant, commits precede tars, and the recipe is last.
        unknown: Files and folders that do not match the data format.
        kept_because: Reasons to keep a variant (key `column/variant`), or all variants and shards of a column (key
            `column`).
        current: Current variants (`column/variant`), which are kept.
        folders: Folders to remove if they are empty afterwards, innermost first. The folder of a variant with a recipe
            is not included; it is removed with the recipe.
    """

    items: list[Item]
    unknown: list[Path]
    kept_because: dict[str, str]
    current: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class KeepRules:
    """Rules for keeping variants other than the current and unfinished variants.

    Attributes:
        readers: Readers of the data folder. Variants with readers are kept.
        names: Names of variants to keep.
        min_age_s: Minimum age of a variant to remove, in seconds since its last change; 0 for no limit.
    """

    readers: Readers
    names: Collection[str] = ()
    min_age_s: float = 0.0

    def reason_to_keep(self, column: str, variant: str, *, changed_s: float) -> str | None:
        """Return the reason why a variant is kept; None if it may be removed.

        Args:
            changed_s: Time of the last change to the variant, in seconds since the epoch.
        """
        if readers := self.readers.find(column, variant):
            return _read_by(readers)
        if variant in self.names:
            return "selected by --keep"
        age_s = max(0.0, self.readers.now_s - changed_s)
        if age_s < self.min_age_s:
            return f"changed {duration_text(age_s)} ago, less than --older-than"
        return None


def _read_by(readers: Sequence[Reader]) -> str:
    suffix = f", and {count_noun(len(readers) - 1, 'more reader')}" if len(readers) > 1 else ""
    return f"read by {readers[0].text}{suffix}"


@dataclass(frozen=True)
class Removal:
    """Result of a removal.

    Attributes:
        num_files: Number of removed files.
        num_bytes: Total size of the removed files.
        failed: (path, reason) of each file that could not be removed.
    """

    num_files: int
    num_bytes: int
    failed: list[tuple[Path, str]]


def find_garbage(data_dir: Path, rules: KeepRules) -> Garbage:
    """Find the garbage in a data folder.

    The caller must hold the locks of all columns and of the data folder (`folder_lock`).

    Raises:
        UserError: A record is unreadable or has a different version, or a variant in `rules.names` does not exist.
    """
    variants = {name for column in columns() for name in list_variants(data_dir, column.name)}
    for name in rules.names:
        if name not in variants:
            raise UserError(
                f"--keep {name}: there is no such variant in {data_dir}",
                hint="run `prep status` to see the variants",
                flags=("--keep",),
            )
    garbage = Garbage([], [], {})
    garbage.items.extend(Item(data_dir / mark.name, 0, _ENDED_READER) for mark in rules.readers.ended)
    _find_temporaries(data_dir, garbage)
    for column in columns():
        if list_variants(data_dir, column.name):
            _find_in_column(data_dir, column, garbage, rules=rules)
    return garbage


def _find_in_column(data_dir: Path, column: ColumnSpec, garbage: Garbage, *, rules: KeepRules) -> None:
    """Add the garbage of one column to `garbage`."""
    current = current_variant(data_dir, column.name)
    # Until the current variant is complete, other variants may contain the only usable samples.
    reason = _reason_to_keep_all(data_dir, column, current)
    if reason is not None:
        garbage.kept_because[column.name] = reason
        return
    for entry in sorted((data_dir / column.name).iterdir()):
        if target_of(entry.name) is None and (entry.name.startswith(".") or not entry.is_dir()):
            garbage.unknown.append(entry)
    unfinished = unfinished_variant(data_dir, column.name)
    for name in list_variants(data_dir, column.name):
        folder = variant_dir(data_dir, column.name, name)
        if name != current and (late_paths := late_files(folder, column.name)):
            why, variant = "written by a late run, after the variant had been removed", f"{column.name}/{name}"
            garbage.items.extend(
                Item(path, path.lstat().st_size, why, variant=variant, kind=path.suffix) for path in late_paths
            )
            commits = folder / COMMITS_FOLDER
            garbage.folders.extend([*folders_in(folder), *folders_in(commits), commits, folder])
            continue
        if name != current and not is_variant(folder):
            garbage.unknown.append(folder)
            continue
        if name == unfinished:
            garbage.kept_because[f"{column.name}/{name}"] = why_unfinished(column, folder, current=str(current))
            continue
        if name == current:
            stored_files = [commit.files for commit in Variant(folder).commits.values() if commit.files is not None]
            referenced_paths = {path for file in stored_files for path in (file.tar, file.energon_index, file.index)}
            known, unknown = _classify_files(folder, needed_paths=referenced_paths)
            strays = [Path(path) for path in known["data"] if SHARD_FILE.fullmatch(path.rpartition("/")[2])]
            garbage.current.append(f"{column.name}/{name}")
            # A process reads the shards that were committed when it started, but an unfinished training run reads the
            # new shards when it is resumed.
            readers = [reader for reader in rules.readers.find(column.name, name) if not reader.is_run]
            if strays and readers:
                count = count_noun(len(strays), "file")
                garbage.kept_because[f"{column.name}/{name}"] = f"{count} without a commit, {_read_by(readers)}"
            else:
                garbage.items.extend(Item(path, path.lstat().st_size, "not referenced by a commit") for path in strays)
        elif lost := lost_samples(data_dir, column.name, variant=str(current), former_variant=name):
            why = f"it has samples that the current variant lacks ({codes_line(lost)})"
            garbage.kept_because[f"{column.name}/{name}"] = why
            continue
        else:
            known, unknown = _classify_files(folder)
            changed_s = max((Path(path).lstat().st_mtime for paths in known.values() for path in paths), default=0.0)
            if (reason := rules.reason_to_keep(column.name, name, changed_s=changed_s)) is not None:
                garbage.kept_because[f"{column.name}/{name}"] = reason
                continue
            why, variant = "not the current variant", f"{column.name}/{name}"
            garbage.items.extend(
                Item(path, path.lstat().st_size, why, variant=variant, kind=kind)
                for kind, paths in known.items()
                for path in map(Path, paths)
            )
            garbage.folders.extend([*folders_in(folder), *folders_in(folder / COMMITS_FOLDER)])
            garbage.folders.extend(folder / subfolder for subfolder in variant_subfolders())
        garbage.unknown.extend(map(Path, unknown))


def remove(garbage: Garbage, *, on_item: Callable[[int, int], None] = lambda done, total: None) -> Removal:
    """Remove the items, and then the empty folders. If a removal is killed, the next call completes it.

    Args:
        on_item: Function (number of items done, total number) that is called after each batch.
    """
    num_files, num_bytes, failed = 0, 0, []
    items = [item for item in garbage.items if not item.is_recipe]
    recipes = [item for item in garbage.items if item.is_recipe]

    def attempt(item: Item, step: Callable[[], object]) -> None:
        nonlocal num_files, num_bytes
        try:
            step()
        except OSError as error:
            failed.append((item.path, error.strerror or str(error)))
        else:
            num_files, num_bytes = num_files + 1, num_bytes + item.size_bytes

    num_seen = 0
    for _, group in groupby(items, lambda item: (item.variant, item.kind)):
        # Files of a kind can be removed in any order, so a batch is a single request in a bucket.
        while batch := list(islice(group, _BATCH)):
            try:
                remove_file(*(item.path for item in batch))
            except OSError:  # a file cannot be removed, so remove the files one by one
                for item in batch:
                    attempt(item, partial(remove_file, item.path))
            else:
                num_files, num_bytes = num_files + len(batch), num_bytes + sum(item.size_bytes for item in batch)
            num_seen += len(batch)
            on_item(num_seen, len(items))
    for folder in garbage.folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # the folder contains unknown files
                failed.append((folder, error.strerror or str(error)))
    for item in recipes:
        folder = item.path.parent
        if any(folder in path.parents for path, _ in failed):
            continue  # the folder is still a variant, so the next call will remove it
        has_recipe_only = set(folder.iterdir()) == {item.path}
        attempt(item, partial(_remove_variant, folder) if has_recipe_only else partial(remove_file, item.path))
    return Removal(num_files, num_bytes, failed)


def _remove_variant(folder: Path) -> None:
    """Remove the folder of a variant that contains only the recipe.

    The folder first gets a temporary name. If the removal is killed, `incomplete_variants` finds the folder, because
    its name is temporary and it contains at most a recipe.
    """
    renamed_folder = rename(folder, temporary_path(folder))
    (renamed_folder / RECIPE_FILE).unlink()
    renamed_folder.rmdir()


def _reason_to_keep_all(data_dir: Path, column: ColumnSpec, current: str | None) -> str | None:
    """Return the reason why all variants of a column must be kept, or None."""
    if current is None:
        return "there is no current variant"
    folder = variant_dir(data_dir, column.name, current)
    if not folder.is_dir():
        return f"the current variant {current} is missing"
    variant = Variant(folder)
    if problems := problems_of(variant):
        shard_id, (state, why) = next(iter(problems.items()))
        num_more = len(problems) - 1
        suffix = f", and {count_noun(num_more, 'more damaged shard')}" if num_more else ""
        return f"the current variant is damaged: shard {shard_id:06d} is {state} ({why}){suffix}"
    if not variant.shards():
        return "the current variant has no shards yet"
    pending = work_of(column).pending(data_dir, variant)
    if pending.stale_because is not None:
        return f"the current variant is stale: {pending.stale_because}"
    if pending.wanted_shards is None:
        return "it is unknown whether the current variant is complete"
    missing_ids = pending.wanted_shards - variant.commits.keys()
    if missing_ids:
        return f"the current variant is incomplete: {count_noun(len(missing_ids), 'shard')} not made yet"
    return None


def _classify_files(folder: Path, *, needed_paths: Collection[str] = ()) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of a variant, keyed by kind in the order of removal, and the unknown files.

    Args:
        needed_paths: Files to omit, as paths relative to the folder.
    """
    # Lists of commits are removed before the commits.
    known: dict[str, list[str]] = {"contents": [], "commit table": [], "commit": [], "data": [], "recipe": []}
    unknown: list[str] = []
    subfolders = variant_subfolders()
    derived_names = {file.name for work in usable_works(columns()) for file in work.extra_files}
    for entry in _entries(folder):
        is_folder, is_link = entry.is_dir(follow_symlinks=False), entry.is_symlink()
        if entry.name in needed_paths or _is_temporary(entry):
            continue
        if is_folder and entry.name in subfolders:
            kind, file_names = subfolders[entry.name]
            _classify_subfolder(entry, file_names, known=known[kind], unknown=unknown)
        elif is_folder and FOLDER.fullmatch(entry.name):
            _classify_subfolder(entry, FOLDER_FILE, known=known["data"], unknown=unknown, needed_paths=needed_paths)
        elif is_folder and entry.name == RUNNING_FOLDER:
            unknown.extend(file.path for file in _entries(entry) if not RUNNING_FILE.fullmatch(file.name))
        elif is_folder or is_link:
            unknown.append(entry.path)
        elif entry.name in (CONTENTS_FILE, COMMIT_TABLE_FILE):
            known["contents" if entry.name == CONTENTS_FILE else "commit table"].append(entry.path)
        elif entry.name == RECIPE_FILE:
            known["recipe"].append(entry.path)
        elif entry.name in derived_names or any(file_names.fullmatch(entry.name) for file_names in DATA_FILES):
            known["data"].append(entry.path)
        else:
            unknown.append(entry.path)
    return known, unknown


def _classify_subfolder(
    folder: "os.DirEntry[str]",
    file_names: re.Pattern[str],
    *,
    known: list[str],
    unknown: list[str],
    needed_paths: Collection[str] = (),
) -> None:
    """Add the files in a variant's subfolder to `known` or `unknown`. The commits may be in further subfolders."""
    for entry in _entries(folder):
        if f"{folder.name}/{entry.name}" in needed_paths or _is_temporary(entry):
            continue
        if folder.name == COMMITS_FOLDER and FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            _classify_subfolder(entry, file_names, known=known, unknown=unknown)
            continue
        is_known = file_names.fullmatch(entry.name) and is_in_shard_folder(folder.name, entry.name) and entry.is_file()
        (known if is_known else unknown).append(entry.path)


def _entries(folder: "Path | os.DirEntry[str]") -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _find_temporaries(data_dir: Path, garbage: Garbage) -> None:
    """Add files left behind by killed commands. The caller holds all locks, so no command is writing these files."""
    _add_temporaries(data_dir, garbage, matches=ROOT_FILES.__contains__)
    _add_temporaries(manifest_dir(data_dir), garbage)
    _add_temporaries(data_dir / LAYOUT_FOLDER, garbage)
    for column in columns():
        for folder in incomplete_variants(data_dir, column.name):
            garbage.items.extend(Item(path, path.lstat().st_size, _LEFTOVER) for path in sorted(folder.iterdir()))
            garbage.folders.append(folder)
        for name in list_variants(data_dir, column.name):
            folder = variant_dir(data_dir, column.name, name)
            if not (folder / RECIPE_FILE).is_file():
                continue  # the folder does not belong to prep
            commits = folder / COMMITS_FOLDER
            for subfolder in (
                folder,
                *folders_in(folder),
                *folders_in(commits),
                *(folder / subfolder_name for subfolder_name in variant_subfolders()),
            ):
                _add_temporaries(subfolder, garbage)
            for path in sorted((folder / RUNNING_FOLDER).glob("*")):
                if RUNNING_FILE.fullmatch(path.name):
                    garbage.items.append(Item(path, path.lstat().st_size, _LEFTOVER))
            garbage.folders.append(folder / RUNNING_FOLDER)


def _add_temporaries(folder: Path, garbage: Garbage, *, matches: Callable[[str], bool] = lambda target: True) -> None:
    paths = temporaries_in(folder, matches=matches)
    garbage.items.extend(Item(path, path.lstat().st_size, _LEFTOVER) for path in paths)


def _is_temporary(entry: "os.DirEntry[str]") -> bool:
    return target_of(entry.name) is not None and entry.is_file(follow_symlinks=False)


SHARD_FILE = re.compile(r"\d{6,}-[0-9a-f]{8}\.(tar|tar\.idx|index\.arrow)")
FOLDER_FILE = re.compile(rf"{SHARD_FILE.pattern}|{re.escape(CHUNKS_FILE)}")  # files in a folder of shards
COMMIT_FILE = re.compile(r"\d{6,}\.json")
_LIST_FILE = re.compile(r"shards(-[A-Za-z0-9_-]+)?\.txt")
DATA_FILES = (SHARD_FILE, _LIST_FILE, *(re.compile(re.escape(name)) for name in (FAILURES_FILE, SELECTION_FILE)))


def variant_subfolders() -> dict[str, tuple[str, re.Pattern[str]]]:
    """Return the possible subfolders of a variant, as {name: (kind of the files, pattern of the file names)}."""
    extra = {part.name: ("data", part.file_names) for work in usable_works(columns()) for part in work.extra_folders}
    return {COMMITS_FOLDER: ("commit", COMMIT_FILE), **extra}


def is_variant(folder: Path) -> bool:
    """Return True if prep made the folder: its name ends with the fingerprint of the recipe in it."""
    try:
        recipe = parse_json((folder / RECIPE_FILE).read_bytes())
        has_fingerprint = "schema" in recipe and folder.name.endswith(f"-{recipe_fingerprint(recipe)[:8]}")
    except (OSError, ValueError, TypeError):
        return False
    return has_fingerprint and not folder.is_symlink()


def late_files(folder: Path, column: str) -> list[Path]:
    """Return the files that a run wrote into the folder of a variant after `prep gc` had removed the variant.

    The list contains the commits, which have checksums, followed by the files that the commits name. It is empty if the
    folder is a variant or contains any other file.
    """
    if (folder / RECIPE_FILE).exists() or folder.is_symlink() or not (folder / COMMITS_FOLDER).is_dir():
        return []
    commits = [commit for commit in read_commits(folder).commits.values() if commit.column == column]
    paths = [commit_path(folder, commit.shard_id) for commit in commits]
    files = [commit.files for commit in commits if commit.files is not None]
    paths += [folder / path for file in files for path in (file.tar, file.energon_index, file.index)]
    existing_paths = {path for path in folder.rglob("*") if not path.is_dir()}
    return [path for path in paths if path in existing_paths] if existing_paths <= set(paths) else []


def is_in_shard_folder(folder: str, name: str) -> bool:
    """Return False if the folder is a folder of shards and the file name begins with a shard ID of another folder."""
    if not FOLDER.fullmatch(folder):
        return True
    shard_id = re.match(r"\d+", name)
    return shard_id is None or folder_of(int(shard_id[0])) == folder


def belongs_to_format(data_dir: Path, key: str) -> bool:
    """Return True if prep wrote the object: a record of the data folder, or a file of a variant that prep made."""
    folder, _, name = key.rpartition("/")
    if folder in ("", MANIFEST_FOLDER):
        return is_table_file(name) if folder else name in ROOT_FILES
    column, _, rest = folder.partition("/")
    variant, _, subfolder = rest.partition("/")
    if column not in {known.name for known in columns()} or not variant or variant.startswith("."):
        return False
    if not is_variant(variant_dir(data_dir, column, variant)):
        return False
    if not subfolder or FOLDER.fullmatch(subfolder):
        extra_names = {file.name for work in usable_works(columns()) for file in work.extra_files} | {COMMIT_TABLE_FILE}
        is_shard_file = (FOLDER_FILE if subfolder else SHARD_FILE).fullmatch(name) is not None
        return (is_shard_file and is_in_shard_folder(subfolder, name)) or (not subfolder and name in extra_names)
    return subfolder in variant_subfolders() and variant_subfolders()[subfolder][1].fullmatch(name) is not None


@dataclass(frozen=True)
class BucketGarbage:
    """Unfinished uploads to abort, and objects that are kept.

    Attributes:
        uploads: Uploads that killed commands left unfinished.
        foreign: Keys of objects that do not match the data format.
        unknown_because: Reason why the uploads could not be listed, or None.
    """

    uploads: Sequence["OpenUpload"] = ()
    foreign: Sequence[str] = ()
    unknown_because: str | None = None


def find_bucket_garbage(data_dir: Path) -> BucketGarbage:
    """Find the unfinished uploads of killed commands in a bucket. The caller must hold the locks of all columns.

    The parts of an unfinished upload take up space, but object listings do not contain them.
    """
    if (copy := _copy_of(data_dir)) is None:
        return BucketGarbage()
    foreign = copy.foreign_keys()
    try:
        uploads = [upload for upload in copy.objects.open_uploads() if belongs_to_format(data_dir, upload.key)]
    except (UserError, OSError) as error:  # the account lacks permission, or the server does not support the request
        return BucketGarbage(foreign=foreign, unknown_because=str(getattr(error, "strerror", None) or error))
    return BucketGarbage(uploads, foreign)


def abort_uploads(uploads: Sequence["OpenUpload"], data_dir: Path) -> None:
    """Abort unfinished uploads to free the space that their parts take up.

    Raises:
        UserError: The bucket does not exist, or denies access.
        OSError: The bucket does not respond.
        LeaseLost: A lock was lost. The locks are checked even if there are no uploads.
    """
    if (copy := _copy_of(data_dir)) is None:
        return
    copy.require_locks()
    for upload in uploads:
        copy.require_locks()
        copy.objects.abort(upload)


def _copy_of(data_dir: Path) -> "WorkingCopy | None":
    if (mirror := mirror_of(data_dir)) is None:
        return None
    from clipmill.manifests.storage.working_copy import WorkingCopy

    assert isinstance(mirror, WorkingCopy)
    return mirror


def garbage_text(garbage: Garbage, in_bucket: BucketGarbage, removal: Removal | None, *, data_dir: Path) -> str:
    """Return the report of `prep gc`: removed files with their sizes, and kept files with the reasons.

    Args:
        in_bucket: Unfinished uploads, and objects that do not match the data format.
        removal: Result of the removal; None in a dry run.
    """
    verb = "to remove" if removal is None else "removed"
    lines = []
    for variant, items in groupby(garbage.items, key=lambda item: item.variant):
        if variant is None:
            lines += [
                f"{verb:<11}{item.path.relative_to(data_dir)} ({size_text(item.size_bytes)}): {item.reason}"
                for item in items
            ]
        else:
            group = list(items)
            files, size = count_noun(len(group), "file"), size_text(sum(item.size_bytes for item in group))
            lines.append(f"{verb:<11}{variant} ({files}, {size}): {group[0].reason}")
    lines += [
        f"{verb:<11}{upload.key} (started {upload.start_time or 'at an unknown time'}): upload of a killed command"
        for upload in in_bucket.uploads
    ]
    names = [*(str(path.relative_to(data_dir)) for path in garbage.unknown), *in_bucket.foreign]
    lines += [f"{'left':<11}{on_one_line(name)}: not part of the data format" for name in names]
    if in_bucket.unknown_because is not None:
        lines.append(f"{'kept':<11}unfinished uploads, which cannot be listed: {in_bucket.unknown_because}")
    kept_because = dict.fromkeys(garbage.current if removal is None else (), "the current variant")
    for name, why in (kept_because | garbage.kept_because).items():
        lines.append(f"{'kept':<11}{name if '/' in name else f'all variants and shards of {name}'}: {why}")
    if not (in_bucket.uploads or (garbage.items if removal is None else removal.num_files)):
        lines.append("nothing to remove")
    elif removal is None:
        lines.append(f"{size_text(sum(item.size_bytes for item in garbage.items))} would be freed")
    else:
        lines.append(f"{size_text(removal.num_bytes)} freed")
    return "\n".join(lines)


def garbage_values(garbage: Garbage, in_bucket: BucketGarbage, removal: Removal | None) -> dict[str, Any]:
    """Return the content of `garbage_text` as a JSON-serialisable dict."""
    return {
        "dry_run": removal is None,
        "items": [
            {
                "path": os.fspath(item.path),
                "size_bytes": item.size_bytes,
                "reason": item.reason,
                "variant": item.variant,
            }
            for item in garbage.items
        ],
        "uploads": [upload.key for upload in in_bucket.uploads],
        "unknown": [*map(os.fspath, garbage.unknown), *in_bucket.foreign],
        "kept_because": garbage.kept_because,
        "num_bytes": sum(item.size_bytes for item in garbage.items) if removal is None else removal.num_bytes,
        "failed": [] if removal is None else [{"path": os.fspath(path), "why": why} for path, why in removal.failed],
    }
