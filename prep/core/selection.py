"""`--where` of a column: which samples the current run wanted, in `<variant>/selection.json`.

It is a part of the request and not of the recipe: the bytes of a sample do not depend on it, so that another selection
keeps the variant and its samples, and makes only what is missing. It is a file of its own, because the checksum of
recipe.json is recorded at the end of a run, while status and plans must know the selection from the beginning.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipmill.manifests.checked_json import publish_checked_json, read_checked_json
from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import remove

if TYPE_CHECKING:
    from clipmill.shards.reader import Variant

SELECTION_FILE = "selection.json"
WHERE = "where"


def write_selection(folder: Path, where: str | None) -> None:
    """Record the selection of a run in its variant's folder; None, everything, needs no file."""
    path = folder / SELECTION_FILE
    if where is None:
        remove(path)
    elif not path.is_file() or _read(path) != where:
        publish_checked_json(path, {WHERE: where})


def read_selection(folder: Path) -> str | None:
    """Read the selection of the last run of a variant; None if it wanted everything.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / SELECTION_FILE
    if not path.exists():
        return None
    where = _read(path)
    if where is None:
        raise UserError(
            f"{path} is damaged", hint=f"run prep {folder.parent.name} again, with its --where, to rewrite it"
        )
    return where


def stored_request(variant: "Variant") -> dict[str, Any]:
    """Return the recipe of a variant and the selection of its last run, as `where`.

    Raises:
        UserError: one of them cannot be read.
    """
    where = read_selection(variant.directory)
    return variant.recipe if where is None else {**variant.recipe, WHERE: where}


def _read(path: Path) -> str | None:
    try:
        where = read_checked_json(path).get(WHERE)
    except (OSError, ValueError):
        return None
    return where if isinstance(where, str) else None
