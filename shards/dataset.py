"""The variants of each column, and `dataset.json`, which records the current and the unfinished variant of a column.

A variant is the set of shards that `prep` made for a column with certain settings.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_checked_json, read_checked_json
from clipmill.manifests.store import manifest_dir
from clipmill.shards.columns import COLUMNS, INDEXED, VIDEO, command_for, how_to_make
from clipmill.shards.format import DATASET_FILE, FORMAT_VERSION, RECIPE_FILE

_COMPRESSED = re.compile(r"\.(tgz|tar\.\w+)$")
_MAX_LISTED_TARS = 5  # maximum number of tars listed in a hint

# Variants that this process reads, even if other variants become current: data folder -> column -> name of the variant.
# None outside of `reading_variants`.
_read_variants: dict[Path, dict[str, str]] | None = None


class DamagedDataset(UserError):
    """dataset.json is damaged, so the current variants are unknown."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} is damaged: {reason}",
            hint=f"run the prep command of each column again to rewrite the file, first prep {command_for(VIDEO)} or "
            f"prep {command_for(VIDEO, INDEXED)}; if a command fails, remove the file and run the command again",
        )


def variant_dir(data_dir: Path, column: str, variant: str) -> Path:
    """Return the folder of a variant.

    Raises:
        UserError: `column` or `variant` is not a plain name.
    """
    for name in (column, variant):
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise UserError(f"{name!r} is not a valid column or variant name", hint="use a name that prep status shows")
    return data_dir / column / variant


def no_shards_error(data_dir: Path, column: str) -> UserError:
    """Return the error for a folder that has no current variant of a column, or is not even a data folder."""
    if not is_data_folder(data_dir):
        return data_folder_error(data_dir)
    variants, path = list_variants(data_dir, column), data_dir / DATASET_FILE
    if variants and not path.exists():
        return UserError(
            f"{path} is missing, so the current variant of {column} is unknown",
            hint=f"run {commands_of(data_dir, column)} again, with the settings of one of these variants: "
            f"{', '.join(variants)}",
        )
    return UserError(f"{data_dir} has no {column} shards", hint=f"run {how_to_make(column, data_dir)}")


def is_data_folder(path: Path) -> bool:
    """Return True if `path` contains a manifest, or shards of a column."""
    return manifest_dir(path).exists() or (path / DATASET_FILE).exists()


def data_folder_error(path: Path) -> UserError:
    """Return the error for an existing file or folder that is not a data folder, with a hint based on its content."""
    message = f"{path} is not a data folder: it has no video shards and no manifest"
    if not path.is_dir():
        message = f"{path} is a file, not a data folder"
    tars = sorted(tar.name for tar in path.glob("*.tar")) if path.is_dir() else []
    folder = path if path.is_dir() else path.parent
    if parent_folder := next((parent for parent in path.parents if is_data_folder(parent)), None):
        return UserError(message, hint=f"use {parent_folder}, the data folder that contains it")
    if child_folder := next(
        (child for child in sorted(folder.iterdir()) if child.is_dir() and is_data_folder(child)), None
    ):
        return UserError(message, hint=f"use a data folder, such as {child_folder}")
    if tars:
        pronoun = "them" if len(tars) > 1 else "it"
        hint = f"to train on its {count_noun(len(tars), 'tar')}, pass {pronoun} as '{_tar_pattern(path, tars)}'"
        return UserError(message, hint=hint)
    if _COMPRESSED.search(path.name):
        return UserError(message, hint="decompress it, and pass the tar: training reads only uncompressed tars")
    return UserError(
        message,
        hint=f"if {'it' if path.is_dir() else 'its folder'} contains videos, make a data folder from them: "
        f"prep manifest folder {shlex.quote(str(folder))} --data DATA; then {how_to_make(VIDEO, 'DATA')}",
    )


def _tar_pattern(folder: Path, names: list[str]) -> str:
    """Return a pattern of tars that `train --shards` accepts: a range of numbers if possible, else a list of names."""
    if len(names) == 1:
        return f"{folder}/{names[0]}"
    stems = [name.removesuffix(".tar") for name in names]
    prefix = stems[0].rstrip("0123456789")
    numbers = [stem.removeprefix(prefix) for stem in stems]
    are_numbers = all(number.isdecimal() and len(number) == len(numbers[0]) for number in numbers)
    if are_numbers and int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1:
        return f"{folder}/{prefix}{{{numbers[0]}..{numbers[-1]}}}.tar"
    listed_stems = [*stems[:_MAX_LISTED_TARS], *(["..."] if len(stems) > _MAX_LISTED_TARS else [])]
    return f"{folder}/{{{','.join(listed_stems)}}}.tar"


def list_variants(data_dir: Path, column: str) -> list[str]:
    """Return the sorted names of all variants of a column on disk, whether current or not."""
    folder = data_dir / column
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def commands_of(data_dir: Path, column: str) -> str:
    """Return the commands that made, or could make, the variants of a column, such as "prep chunk or prep index"."""
    names = list_variants(data_dir, column) or ["", INDEXED]
    return " or ".join(sorted({f"prep {command_for(column, name)}" for name in names}))


@contextmanager
def reading_variants(variants: Mapping[Path, Mapping[str, str]]) -> Iterator[None]:
    """Read the same variants throughout the block, in all threads of this process.

    Args:
        variants: Names of variants by data folder and column. For each other column, the variant that is current when
            the column is first read is used throughout.
    """
    from clipmill.shards.marks import keep_marks

    global _read_variants
    previous_variants = _read_variants
    _read_variants = {folder: dict(names) for folder, names in (previous_variants or {}).items()}
    _read_variants.update({folder.resolve(): dict(names) for folder, names in variants.items()})
    try:
        with keep_marks():
            yield
    finally:
        _read_variants = previous_variants


def current_variant(data_dir: Path, column: str) -> str | None:
    """Return the name of the current variant of a column; None if the column has no current variant.

    Within `reading_variants`, return the variant that this process reads instead.

    Raises:
        UserError: dataset.json is damaged, or has a different version of the format.
    """
    variants = None if _read_variants is None else _read_variants.setdefault(data_dir.resolve(), {})
    if variants and column in variants:
        return variants[column]
    variant = _read(data_dir)["columns"].get(column, {}).get("current")
    if variant is None:
        return None
    if variants is not None:
        variants[column] = str(variant)
    return str(variant)


def unfinished_variant(data_dir: Path, column: str) -> str | None:
    """Return the variant that the last run of a column did not finish; None if there is none, or if it is current.

    Raises:
        UserError: dataset.json is damaged, or has a different version of the format.
    """
    variant = _read(data_dir)["columns"].get(column, {}).get("making")
    return str(variant) if variant is not None else None


def set_current_variant(data_dir: Path, column: str, variant: str, *, keeps_unfinished: bool = False) -> None:
    """Make `variant` the current variant of a column. Other columns are unchanged.

    Args:
        keeps_unfinished: True to keep the record of another variant that is unfinished.

    Raises:
        UserError: dataset.json has a different version of the format, or is damaged and cannot be rebuilt because
            another column has several variants.
    """
    making = _entry(data_dir, column).get("making", variant) if keeps_unfinished else variant
    _record(data_dir, column, {"current": variant, **({} if making == variant else {"making": making})})


def begin_variant(data_dir: Path, column: str, variant: str) -> None:
    """Record that a run makes `variant`. The variant becomes current if none is, or if dataset.json is damaged.

    Raises:
        UserError: See `set_current_variant`.
    """
    entry = _entry(data_dir, column)
    current = entry.get("current") or variant
    new_entry = {"current": current} if current == variant else {"current": current, "making": variant}
    if entry != new_entry:
        _record(data_dir, column, new_entry)


def _entry(data_dir: Path, column: str) -> dict[str, str]:
    """Return the entry of a column in dataset.json; {} if there is none, or if the file is damaged."""
    try:
        return dict(_read(data_dir)["columns"].get(column, {}))
    except DamagedDataset:
        return {}


def _record(data_dir: Path, column: str, entry: dict[str, str]) -> None:
    with folder_lock(data_dir):  # commands for different columns must not overwrite each other's entries
        try:
            dataset = _read(data_dir)
        except DamagedDataset:
            # Rebuild dataset.json from the folders, which is possible if no other column has several variants.
            dataset = {"clipmill_format": FORMAT_VERSION, "columns": {}}
            plugin_columns = (path.parent.parent.name for path in data_dir.glob(f"*/*/{RECIPE_FILE}"))
            for other_column in dict.fromkeys([*COLUMNS, *sorted(plugin_columns)]):
                variants = list_variants(data_dir, other_column) if other_column != column else []
                if len(variants) > 1:
                    raise
                if variants:
                    dataset["columns"][other_column] = {"current": variants[0]}
        if dataset["columns"].get(column) != entry:
            dataset["columns"][column] = entry
            publish_checked_json(data_dir / DATASET_FILE, dataset)


def _read(data_dir: Path) -> dict[str, Any]:
    path = data_dir / DATASET_FILE
    try:
        dataset = read_checked_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"clipmill_format": FORMAT_VERSION, "columns": {}}
    except ValueError as error:
        raise DamagedDataset(path, str(error)) from error
    columns = dataset.get("columns")
    if not isinstance(columns, dict) or not all(isinstance(entry, dict) for entry in columns.values()):
        raise DamagedDataset(path, "its entry `columns` is missing or invalid")
    if (version := dataset.get("clipmill_format")) != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version!r}, but this version of clipmill reads format {FORMAT_VERSION}",
            hint="use the version of clipmill that wrote the data",
        )
    return dataset
