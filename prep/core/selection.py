"""What a column's current run was asked for besides its recipe, in `<variant>/selection.json`.

It holds `--where`, `--endpoint`, the path of local weights, and `--engine` or `--address` unless the default engine was
used, so that the commands that continue the run (`prep retry`, the `next` lines) use the same.

It is a part of the request and not of the recipe: the bytes of a sample do not depend on it, so that another selection
keeps the variant and its samples, and makes only what is missing. It is a file of its own, because the checksum of
recipe.json is recorded at the end of a run, while status and plans must know the selection from the beginning.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import (
    parse_json,
    publish_checked_json,
    publish_json,
    read_checked_json,
    read_record,
    remove,
    rename,
    temporary_path,
)
from clipmill.prep.core.column import WEIGHTS, ColumnSpec
from clipmill.prep.core.recipe import Recipe
from clipmill.shards.format import COMMITS_FOLDER, RECIPE_FILE

if TYPE_CHECKING:
    from clipmill.shards.reader import Variant

SELECTION_FILE = "selection.json"
WHERE = "where"
Value = str | int | float  # of a flag


def write_selection(folder: Path, where: str | None, further: Mapping[str, Value | None] | None = None) -> None:
    """Record the selection of a run in its variant's folder; None, everything, needs no file.

    Args:
        further: Other values of the request by the names of their flags; None for what was not given.
    """
    path = folder / SELECTION_FILE
    asked = {name: value for name, value in {WHERE: where, **(further or {})}.items() if value is not None}
    if not asked:
        remove(path)
    elif not path.is_file() or _read(path) != asked:
        publish_checked_json(path, asked)


def read_selection(folder: Path) -> dict[str, Any]:
    """Read what the last run of a variant was asked for; without `where` it wanted everything.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / SELECTION_FILE
    if not path.exists():
        return {}
    asked = _read(path)
    if asked is None:
        raise UserError(
            f"{path} is damaged", hint=f"run prep {folder.parent.name} again, with its --where, to rewrite it"
        )
    return asked


def stored_request(variant: "Variant") -> dict[str, Any]:
    """Return the recipe of a variant and what its last run was asked for, such as `where`.

    Raises:
        UserError: one of them cannot be read.
    """
    return {**variant.recipe, **read_selection(variant.directory)}


def stored_recipe(column: ColumnSpec, variant: "Variant") -> Recipe[Any]:
    """Return the recipe of a variant, with the settings of its last run.

    Raises:
        UserError: it cannot be read, or another version has written it.
    """
    stored = stored_request(variant)
    settings = column.stored_settings(stored, stored.get(WEIGHTS))
    return Recipe(settings, variant.recipe, variant.directory.name.rpartition("-")[0])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        asked = read_checked_json(path)
    except (OSError, ValueError):
        return None
    return asked if asked and all(isinstance(value, Value) for value in asked.values()) else None


def make_variant(folder: Path, recipe: dict[str, Any]) -> None:
    """Create a variant's folder with its recipe, or update the recipe of an existing folder.

    The folder is renamed into place once it holds the recipe, so that no other command sees a folder without one.
    """
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        temporary = temporary_path(folder)
        temporary.mkdir()
        write_recipe(temporary, recipe)
        rename(temporary, folder)
    write_recipe(folder, recipe)
    (folder / COMMITS_FOLDER).mkdir(exist_ok=True)


def write_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Publish recipe.json unless the file already has this content: a run without work modifies no file."""
    try:
        is_recorded = parse_json(read_record(folder / RECIPE_FILE)) == recipe
    except (OSError, ValueError):
        is_recorded = False
    if not is_recorded:
        publish_json(folder / RECIPE_FILE, recipe)
