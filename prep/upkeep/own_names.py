"""Which names in a data folder are those of files that `prep` writes; nothing else is ever removed."""

import re
from pathlib import Path

from clipmill.manifests.publish import parse_json
from clipmill.manifests.store import MANIFEST_FOLDER, is_table_file
from clipmill.prep.core.data_folder import ROOT_FILES
from clipmill.prep.core.failure_list import FAILURES_FILE
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.selection import SELECTION_FILE
from clipmill.prep.core.work import usable_works
from clipmill.prep.registry import columns
from clipmill.shards.commits import commit_path, read_commits
from clipmill.shards.dataset import variant_dir
from clipmill.shards.format import COMMIT_TABLE_FILE, COMMITS_FOLDER, FOLDER, RECIPE_FILE, folder_of
from clipmill.shards.merged_table import CHUNKS_FILE

SHARD_FILE = re.compile(r"\d{6,}-[0-9a-f]{8}\.(tar|tar\.idx|index\.arrow)")
FOLDER_FILE = re.compile(rf"{SHARD_FILE.pattern}|{re.escape(CHUNKS_FILE)}")  # in a folder of shards
COMMIT_FILE = re.compile(r"\d{6,}\.json")
_LIST_FILE = re.compile(r"shards(-[A-Za-z0-9_-]+)?\.txt")
DATA_FILES = (SHARD_FILE, _LIST_FILE, *(re.compile(re.escape(name)) for name in (FAILURES_FILE, SELECTION_FILE)))


def parts_of_variants() -> dict[str, tuple[str, re.Pattern[str]]]:
    """Return the folders that a variant's folder may contain, with the kind and the name pattern of their files."""
    extra = {part.name: ("data", part.file_names) for work in usable_works(columns()) for part in work.extra_folders}
    return {COMMITS_FOLDER: ("commit", COMMIT_FILE), **extra}


def is_variant(folder: Path) -> bool:
    """Return True if prep made the folder: its name ends in the fingerprint of the recipe in it."""
    try:
        recipe = parse_json((folder / RECIPE_FILE).read_bytes())
        made_here = "schema" in recipe and folder.name.endswith(f"-{recipe_fingerprint(recipe)[:8]}")
    except (OSError, ValueError, TypeError):
        return False
    return made_here and not folder.is_symlink()


def late_files(folder: Path, column: str) -> list[Path]:
    """Return the files that a run has written into the folder of a variant after `prep gc` had removed it.

    They are commits, which have checksums, and then the files that these name. It is empty for the folder of a variant,
    and if the folder holds anything else.
    """
    if (folder / RECIPE_FILE).exists() or folder.is_symlink() or not (folder / COMMITS_FOLDER).is_dir():
        return []
    commits = [commit for commit in read_commits(folder).commits.values() if commit.column == column]
    named = [commit_path(folder, commit.shard_id) for commit in commits]
    files = [commit.files for commit in commits if commit.files is not None]
    named += [folder / path for file in files for path in (file.tar, file.energon_index, file.index)]
    found = {path for path in folder.rglob("*") if not path.is_dir()}
    return [path for path in named if path in found] if found <= set(named) else []


def is_at_home(folder: str, name: str) -> bool:
    """Return True if `folder` is the one for the shard that the file is named after, if it is named after one."""
    if not FOLDER.fullmatch(folder):
        return True
    number = re.match(r"\d+", name)
    return number is None or folder_of(int(number[0])) == folder


def is_ours(data_dir: Path, key: str) -> bool:
    """Return True if only `prep` writes an object of this name: a table, or a file of a variant that it made."""
    folder, _, name = key.rpartition("/")
    if folder in ("", MANIFEST_FOLDER):
        return is_table_file(name) if folder else name in ROOT_FILES
    column, _, rest = folder.partition("/")
    variant, _, part = rest.partition("/")
    if column not in {known.name for known in columns()} or not variant or variant.startswith("."):
        return False
    if not is_variant(variant_dir(data_dir, column, variant)):
        return False
    if not part or FOLDER.fullmatch(part):
        extra = {file.name for work in usable_works(columns()) for file in work.extra_files} | {COMMIT_TABLE_FILE}
        is_known = (FOLDER_FILE if part else SHARD_FILE).fullmatch(name) is not None and is_at_home(part, name)
        return is_known or (not part and name in extra)
    return part in parts_of_variants() and parts_of_variants()[part][1].fullmatch(name) is not None
