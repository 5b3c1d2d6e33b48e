"""What of a data folder nothing needs any more, and removing it.

Only files whose names and places are the format's are ever removed; everything else is left and named. When it is
not certain that the current variant is whole, all of the variants are kept.
"""

import errno
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from manifests.json_text import parse_json
from manifests.publish import target_of, temporary_path
from manifests.store import manifest_dir
from prep.core.column import ColumnSpec, recipe_fingerprint
from prep.core.data_folder import ROOT_FILES, RUNNING_FILE, half_made_variants
from prep.core.heartbeat import RUNNING_FOLDER
from prep.core.layout import LAYOUT_FOLDER
from prep.core.plan import problems_of
from prep.core.run import FAILURES_FILE
from prep.registry import columns
from shards.dataset import current_variant, list_variants, variant_dir
from shards.format import COMMITS_FOLDER, CONTENTS_FILE, RECIPE_FILE
from shards.reader import Variant

_SHARD_FILE = re.compile(r"\d{6,}-[0-9a-f]{8}\.(tar|tar\.idx|index\.arrow)")
_COMMIT_FILE = re.compile(r"\d{6,}\.json")
_LIST_FILE = re.compile(r"shards(-[A-Za-z0-9_-]+)?\.txt")
_DATA_FILES = (_SHARD_FILE, _LIST_FILE, re.compile(re.escape(FAILURES_FILE)))
_LEFT_BEHIND = "left by a command that was killed"


@dataclass(frozen=True)
class Item:
    """One file that can go."""

    path: Path
    size_bytes: int
    reason: str
    variant: str | None = None  # set where the whole variant goes

    @property
    def is_recipe(self) -> bool:
        """Whether it is the file that tells a variant."""
        return self.variant is not None and self.path.name == RECIPE_FILE


@dataclass(frozen=True)
class Garbage:
    """What can go, and what stays although it is nobody's.

    Attributes:
        items: in the order in which they have to be removed: a variant's commits before its tars, its recipe last.
        folders: that go when they are empty then, those inside others first; a variant's own is not among them.
        unknown: files and folders that are not of the format.
        kept_because: column -> why all of its variants and shards are kept, where they are.
    """

    items: list[Item]
    unknown: list[Path]
    kept_because: dict[str, str]
    folders: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Removed:
    """What a removal did; `failed` are (path, why)."""

    num_files: int
    num_bytes: int
    failed: list[tuple[Path, str]]


def find_garbage(data_dir: Path) -> Garbage:
    """Looks for garbage; call it while holding every column, and the data folder itself (`folder_lock`).

    Raises:
        UserError: a record cannot be read, or is of another version.
    """
    garbage = Garbage([], [], {})
    _look_for_temporaries(data_dir, garbage)
    for column in columns():
        if list_variants(data_dir, column.name):
            _look_at_column(data_dir, column, garbage)
    return garbage


def _look_at_column(data_dir: Path, column: ColumnSpec, garbage: Garbage) -> None:
    """Adds what there is of one column to `garbage`."""
    current = current_variant(data_dir, column.name)
    reason = _why_keep_all(data_dir, column, current)
    if reason is not None:
        garbage.kept_because[column.name] = reason
        return
    for entry in sorted((data_dir / column.name).iterdir()):
        if target_of(entry.name) is None and (entry.name.startswith(".") or not entry.is_dir()):
            garbage.unknown.append(entry)
    for name in list_variants(data_dir, column.name):
        folder = variant_dir(data_dir, column.name, name)
        if name != current and not _is_variant(folder):
            garbage.unknown.append(folder)
            continue
        known, strange = _sorted_files(folder)
        garbage.unknown.extend(strange)
        if name == current:
            garbage.items.extend(_uncommitted(folder, known))
        else:
            why = "not the current variant"
            garbage.items.extend(Item(path, _size(path), why, variant=f"{column.name}/{name}") for path in known)
            garbage.folders.extend(folder / part for part in _parts())


def _parts() -> dict[str, tuple[str, re.Pattern[str]]]:
    """The folders that a variant's folder may have: what their files are, and how they are called."""
    extra = {part.name: ("data", part.file_names) for column in columns() for part in column.extra_folders}
    return {COMMITS_FOLDER: ("commit", _COMMIT_FILE), **extra}


def remove(garbage: Garbage) -> Removed:
    """Removes the items, and the folders that are empty then. Killed anywhere, it is finished by the next call."""
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

    for item in items:
        attempt(item, partial(item.path.unlink, missing_ok=True))
    for folder in garbage.folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # what is in it is unknown
                failed.append((folder, error.strerror or str(error)))
    for item in recipes:
        folder = item.path.parent
        if any(folder in path.parents for path, _ in failed):
            continue  # it stays a variant, for the next time
        is_alone = set(folder.iterdir()) == {item.path}
        attempt(item, partial(_remove_variant, folder) if is_alone else item.path.unlink)
    return Removed(num_files, num_bytes, failed)


def _remove_variant(folder: Path) -> None:
    """Removes a variant's folder that holds its recipe alone.

    It loses its name first. A folder with a temporary name and nothing but a recipe is known to be nobody's
    (`half_made_variants`), one without a recipe would not be.
    """
    leaving = folder.rename(temporary_path(folder))
    (leaving / RECIPE_FILE).unlink()
    leaving.rmdir()


def _why_keep_all(data_dir: Path, column: ColumnSpec, current: str | None) -> str | None:
    """Why nothing of any variant may go, or None."""
    if current is None:
        return "no variant is current"
    folder = variant_dir(data_dir, column.name, current)
    if not folder.is_dir():
        return f"the current variant {current} is missing"
    variant = Variant(folder)
    if problems := problems_of(variant):
        shard_id, (state, why) = next(iter(problems.items()))
        return f"the current variant is damaged: shard {shard_id:06d} is {state} ({why}), one of {len(problems)}"
    if not variant.shards():
        return "the current variant has no shards yet"
    pending = column.pending(data_dir, variant)
    if pending.stale_because is not None:
        return f"the current variant is stale: {pending.stale_because}"
    if pending.wanted_shards is None:
        return "it cannot be told whether the current variant is whole"
    missing = pending.wanted_shards - variant.commits.keys()
    if missing:
        return f"the current variant is not whole: shards not made yet: {len(missing)}"
    return None


def _is_variant(folder: Path) -> bool:
    """Whether a folder was made by prep: its name ends in the fingerprint of the recipe in it."""
    try:
        recipe = parse_json((folder / RECIPE_FILE).read_bytes())
        made_here = "schema" in recipe and folder.name.endswith(f"-{recipe_fingerprint(recipe)[:8]}")
    except (OSError, ValueError, TypeError):
        return False
    return made_here and not folder.is_symlink()


def _sorted_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a variant in the order in which they can be removed, and what is not the format's."""
    known: dict[str, list[Path]] = {"commit": [], "data": [], "recipe": []}
    unknown: list[Path] = []
    parts = _parts()
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder and path.name in parts:
            kind, names = parts[path.name]
            for entry in sorted(path.iterdir()):
                if not _is_temporary(entry):
                    (known[kind] if names.fullmatch(entry.name) and entry.is_file() else unknown).append(entry)
        elif is_folder and path.name == RUNNING_FOLDER:
            unknown.extend(sign for sign in sorted(path.iterdir()) if not RUNNING_FILE.fullmatch(sign.name))
        elif is_folder or path.is_symlink():
            unknown.append(path)
        elif path.name == CONTENTS_FILE:
            known["commit"].insert(0, path)  # the list of commits goes before any of them
        elif path.name == RECIPE_FILE:
            known["recipe"].append(path)
        elif any(names.fullmatch(path.name) for names in _DATA_FILES):
            known["data"].append(path)
        elif not _is_temporary(path):
            unknown.append(path)
    return [*known["commit"], *known["data"], *known["recipe"]], unknown


def _uncommitted(folder: Path, known: list[Path]) -> Iterator[Item]:
    files = [commit.files for commit in Variant(folder).commits.values() if commit.files is not None]
    named = {name for file in files for name in (file.tar, file.energon_index, file.index)}
    for path in known:
        if _SHARD_FILE.fullmatch(path.name) and path.name not in named:
            yield Item(path, _size(path), "no commit names it")


def _look_for_temporaries(data_dir: Path, garbage: Garbage) -> None:
    """Adds what killed commands left. All that they hold is held, so nobody is writing it."""
    _add_temporaries(data_dir, garbage, of=ROOT_FILES.__contains__)
    _add_temporaries(manifest_dir(data_dir), garbage)
    _add_temporaries(data_dir / LAYOUT_FOLDER, garbage)
    for column in columns():
        for folder in half_made_variants(data_dir, column.name):
            garbage.items.extend(Item(path, _size(path), _LEFT_BEHIND) for path in sorted(folder.iterdir()))
            garbage.folders.append(folder)
        for name in list_variants(data_dir, column.name):
            folder = variant_dir(data_dir, column.name, name)
            if not (folder / RECIPE_FILE).is_file():
                continue  # somebody's
            for part in (folder, *(folder / part for part in _parts())):
                _add_temporaries(part, garbage)
            for path in sorted((folder / RUNNING_FOLDER).glob("*")):
                if RUNNING_FILE.fullmatch(path.name):
                    garbage.items.append(Item(path, _size(path), _LEFT_BEHIND))
            garbage.folders.append(folder / RUNNING_FOLDER)


def _add_temporaries(folder: Path, garbage: Garbage, *, of: Callable[[str], bool] = lambda target: True) -> None:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _is_temporary(path) and of(target_of(path.name) or ""):
            garbage.items.append(Item(path, _size(path), _LEFT_BEHIND))


def _is_temporary(path: Path) -> bool:
    return target_of(path.name) is not None and path.is_file() and not path.is_symlink()


def _size(path: Path) -> int:
    return path.lstat().st_size
