"""Where the variants of each column lie, and which of them is current (`dataset.json`)."""

from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import folder_lock, naming, publish_json
from shards.format import DATASET_FILE, FORMAT_VERSION


def variant_dir(data_dir: Path, column: str, variant: str) -> Path:
    """Folder of a variant.

    Raises:
        UserError: `column` or `variant` is not a plain name.
    """
    for name in (column, variant):
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise UserError(f"{name!r} is not the name of a column or variant", hint="name a folder of the data set")
    return data_dir / column / variant


def list_variants(data_dir: Path, column: str) -> list[str]:
    """Names of all variants of `column` on the disk, current or not, sorted."""
    folder = data_dir / column
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def current_variant(data_dir: Path, column: str) -> str | None:
    """Name of the current variant of `column`, or None where there is none.

    Raises:
        UserError: dataset.json is damaged or of another format.
    """
    variant = _read(data_dir)["columns"].get(column, {}).get("current")
    return str(variant) if variant is not None else None


def set_current_variant(data_dir: Path, column: str, variant: str) -> None:
    """Makes `variant` the current one of `column`; other columns keep theirs."""
    with folder_lock(data_dir):  # commands that write different columns must not lose each other's entry
        dataset = _read(data_dir)
        entry = dataset["columns"].setdefault(column, {})
        if entry.get("current") == variant:
            return
        entry["current"] = variant
        publish_json(data_dir / DATASET_FILE, dataset)


def _read(data_dir: Path) -> dict[str, Any]:
    path = data_dir / DATASET_FILE
    try:
        with naming(path):
            dataset: dict[str, Any] = parse_json(path.read_bytes())
    except FileNotFoundError:
        return {"clipmill_format": FORMAT_VERSION, "columns": {}}
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", hint="remove it and run prep chunk again") from error
    columns = dataset.get("columns") if isinstance(dataset, dict) else None
    if not isinstance(columns, dict) or not all(isinstance(entry, dict) for entry in columns.values()):
        raise UserError(f"{path} is damaged: no columns in it", hint="remove it and run prep chunk again")
    if (version := dataset.get("clipmill_format")) != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version!r}, this program reads format {FORMAT_VERSION}",
            hint="use the version of clipmill that made the data",
        )
    return dataset
