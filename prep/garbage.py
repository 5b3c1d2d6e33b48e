"""What of a data folder nothing needs any more, and removing it.

Only files whose names and places are the format's are ever removed; everything else is left and named. When it is
not certain that the current variant is whole, all of the variants are kept.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.publish import TEMPORARY_PREFIX
from manifests.store import MANIFEST_FILE, manifest_dir, read_videos
from prep.data_folder import COLUMNS, VIDEO
from prep.heartbeat import RUNNING_FOLDER
from prep.outlook import outlook_of
from prep.recipe import recipe_from_dict
from prep.run import FAILURES_FILE
from prep.sources import read_probes
from prep.status import problems_of
from prep.text.bank import BANK_FOLDER, BLOCK_FILE
from prep.wanted import wanted
from shards.dataset import current_variant, list_variants, variant_dir
from shards.format import COMMITS_FOLDER, CONTENTS_FILE, RECIPE_FILE
from shards.reader import Variant

_SHARD_FILE = re.compile(r"\d{6,}-[0-9a-f]{8}\.(tar|tar\.idx|index\.arrow)")
_COMMIT_FILE = re.compile(r"\d{6,}\.json")
_LIST_FILE = re.compile(r"shards(-[A-Za-z0-9_-]+)?\.txt")
_LEFT_BEHIND = "left by a command that was killed"
_TEMPORARY_FILE = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{12}}-.+")


@dataclass(frozen=True)
class Item:
    """One file that can go."""

    path: Path
    size_bytes: int
    reason: str
    variant: str | None = None  # set where the whole variant goes


@dataclass(frozen=True)
class Garbage:
    """What can go, and what stays although it is nobody's.

    Attributes:
        items: in the order in which they have to be removed: a variant's commits before its tars, its recipe last.
        unknown: files and folders that are not of the format.
        kept_because: column -> why all of its variants and shards are kept, where they are.
    """

    items: list[Item]
    unknown: list[Path]
    kept_because: dict[str, str]


@dataclass(frozen=True)
class Removed:
    """What a removal did; `failed` are (path, why)."""

    num_files: int
    num_bytes: int
    failed: list[tuple[Path, str]]


def find_garbage(data_dir: Path) -> Garbage:
    """Looks for garbage; call it while `prep.data_folder.writing`.

    Raises:
        UserError: a record cannot be read, or is of another version.
    """
    garbage = Garbage(list(_temporaries(data_dir)), [], {})
    for column in COLUMNS:
        if list_variants(data_dir, column):
            _look_at_column(data_dir, column, garbage)
    return garbage


def _look_at_column(data_dir: Path, column: str, garbage: Garbage) -> None:
    """Adds what there is of one column to `garbage`."""
    current = current_variant(data_dir, column)
    reason = _why_keep_all(data_dir, column, current)
    if reason is not None:
        garbage.kept_because[column] = reason
        return
    for name in list_variants(data_dir, column):
        folder = variant_dir(data_dir, column, name)
        if name != current and not _is_variant(folder):
            garbage.unknown.append(folder)
            continue
        known, strange = _sorted_files(folder)
        garbage.unknown.extend(strange)
        if name == current:
            garbage.items.extend(_uncommitted(folder, known))
        else:
            why = "not the current variant"
            garbage.items.extend(Item(path, _size(path), why, variant=f"{column}/{name}") for path in known)


def remove(garbage: Garbage) -> Removed:
    """Removes the items, and the folders that are empty then."""
    num_files, num_bytes, failed = 0, 0, []
    for item in garbage.items:
        try:
            item.path.unlink(missing_ok=True)
        except OSError as error:
            failed.append((item.path, error.strerror or str(error)))
        else:
            num_files, num_bytes = num_files + 1, num_bytes + item.size_bytes
    folders = {item.path.parent for item in garbage.items if item.variant is not None}
    folders |= {item.path.parent for item in garbage.items if item.path.parent.name == RUNNING_FOLDER}
    folders |= {folder.parent for folder in folders if folder.name in (COMMITS_FOLDER, RUNNING_FOLDER, BANK_FOLDER)}
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        # A folder with something unknown in it stays.
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return Removed(num_files, num_bytes, failed)


def _why_keep_all(data_dir: Path, column: str, current: str | None) -> str | None:
    """Why nothing of any variant may go, or None."""
    if current is None:
        return "no variant is current"
    folder = variant_dir(data_dir, column, current)
    if not folder.is_dir():
        return f"the current variant {current} is missing"
    variant = Variant(folder)
    if problems := problems_of(variant):
        shard_id, (state, why) = next(iter(problems.items()))
        return f"the current variant is damaged: shard {shard_id:06d} is {state} ({why}), one of {len(problems)}"
    if not variant.shards():
        return "the current variant has no shards yet"
    if column == VIDEO:
        wanted_shards = _wanted_chunks(data_dir, variant.recipe)
    else:
        outlook = outlook_of(data_dir, column, variant)
        if outlook.stale_because is not None:
            return f"the current variant is stale: {outlook.stale_because}"
        if outlook.wanted_shards is None:
            return "it cannot be told whether the current variant is whole"
        wanted_shards = outlook.wanted_shards
    missing = wanted_shards - variant.commits.keys()
    if missing:
        return f"the current variant is not whole: shards not made yet: {len(missing)}"
    return None


def _wanted_chunks(data_dir: Path, stored: dict[str, Any]) -> frozenset[int]:
    if not (manifest_dir(data_dir) / MANIFEST_FILE).exists():
        raise UserError(
            f"{data_dir} has no manifest: what is needed cannot be told", hint="make it again with `prep manifest`"
        )
    settings = recipe_from_dict(stored).settings()
    return wanted(data_dir, settings, videos=read_videos(data_dir), probes=read_probes(data_dir)).shard_ids


def _is_variant(folder: Path) -> bool:
    """Whether a folder was made by prep: its name ends in the fingerprint of the recipe in it."""
    try:
        recipe = json.loads((folder / RECIPE_FILE).read_bytes())
        canonical = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:8]
        made_here = "schema" in recipe and folder.name.endswith(f"-{digest}")
    except (OSError, ValueError, TypeError):
        return False
    return made_here and not folder.is_symlink()


def _sorted_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a variant in the order in which they can be removed, and what is not the format's."""
    commits: list[Path] = []
    data: list[Path] = []
    recipe: list[Path] = []
    unknown: list[Path] = []
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        if path.name == COMMITS_FOLDER and is_folder:
            for record in sorted(path.iterdir()):
                if _TEMPORARY_FILE.fullmatch(record.name):
                    continue
                (commits if _COMMIT_FILE.fullmatch(record.name) and record.is_file() else unknown).append(record)
        elif (path.name == RUNNING_FOLDER and is_folder) or _TEMPORARY_FILE.fullmatch(path.name):
            continue
        elif path.name == BANK_FOLDER and is_folder:
            for block in sorted(path.iterdir()):
                if not _TEMPORARY_FILE.fullmatch(block.name):
                    (data if BLOCK_FILE.fullmatch(block.name) and block.is_file() else unknown).append(block)
        elif is_folder or path.is_symlink():
            unknown.append(path)
        elif path.name in (CONTENTS_FILE, RECIPE_FILE):
            # The list of commits goes before any of them, the recipe last.
            (commits if path.name == CONTENTS_FILE else recipe).insert(0, path)
        elif _SHARD_FILE.fullmatch(path.name) or _LIST_FILE.fullmatch(path.name) or path.name == FAILURES_FILE:
            data.append(path)
        else:
            unknown.append(path)
    return [*commits, *data, *recipe], unknown


def _uncommitted(folder: Path, known: list[Path]) -> Iterator[Item]:
    files = [commit.files for commit in Variant(folder).commits.values() if commit.files is not None]
    named = {name for file in files for name in (file.tar, file.energon_index, file.index)}
    for path in known:
        if _SHARD_FILE.fullmatch(path.name) and path.name not in named:
            yield Item(path, _size(path), "no commit names it")


def _temporaries(data_dir: Path) -> Iterator[Item]:
    """What killed commands left. The folder is held, so nobody is writing them."""
    folders = [data_dir, manifest_dir(data_dir), data_dir / "layout"]
    for column in COLUMNS:
        folders.append(data_dir / column)
        for name in list_variants(data_dir, column):
            folder = variant_dir(data_dir, column, name)
            folders += [folder, folder / COMMITS_FOLDER, folder / BANK_FOLDER]
            for path in sorted((folder / RUNNING_FOLDER).glob("*")):
                if _COMMIT_FILE.fullmatch(path.name):
                    yield Item(path, _size(path), _LEFT_BEHIND)
    for folder in folders:
        for path in sorted(folder.glob(f"{TEMPORARY_PREFIX}*")):
            if _TEMPORARY_FILE.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                yield Item(path, _size(path), _LEFT_BEHIND)


def _size(path: Path) -> int:
    return path.lstat().st_size
