"""The folder of a variant and its recipe."""

from pathlib import Path
from typing import Any

from clipmill.manifests.checked_json import parse_json
from clipmill.manifests.publish import publish_json, read_record, rename, temporary_path
from clipmill.shards.format import COMMITS_FOLDER, RECIPE_FILE


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
