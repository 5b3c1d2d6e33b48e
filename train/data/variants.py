"""Choice of the variant to read for each column: a variant given by name, a recorded variant, or the current one.

A column contains one kind of data, such as `video` or `latents`. The variants of a column were made with different
settings.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.shards.columns import COLUMNS, how_to_make
from clipmill.shards.dataset import current_variant, reading_variants, variant_dir
from clipmill.shards.format import RECIPE_FILE
from clipmill.shards.reader import Variant
from clipmill.train.data.arguments import require_strings
from clipmill.train.data.data_folder import folder_path, open_data_folder

RecordedVariants = Mapping[str, Mapping[str, Any]]  # name and recipe of a variant, by column
VariantNames = str | Sequence[str] | None


@contextmanager
def use_variants(folders: Sequence[str], variant: VariantNames, *, cache: Path | None) -> Iterator[None]:
    """Context in which the given variants are read. For all other columns, the current variants are read.

    Args:
        folders: Addresses of the data.
        variant: Name of a variant, or a sequence of names; None for the current variants.

    Raises:
        UserError: A name is not a string, or does not belong to a variant in any of the folders.
    """
    names = () if variant is None else (variant,) if isinstance(variant, str) else tuple(variant)
    for name in names:
        require_strings(variant=name)
    with reading_variants(choose_variants(folders, names, cache=cache)):
        yield


def choose_variants(
    folders: Sequence[str],
    names: Collection[str] = (),
    *,
    recorded: Sequence[RecordedVariants] = (),
    subject: str = "the run",
    cache: Path | None = None,
    print_note: Callable[[str], object] | None = None,
) -> dict[Path, dict[str, str]]:
    """Choose the variant to read for each column: a variant given by name, or a variant that a run has recorded.

    A column without such a variant is missing from the result, and its current variant is read.

    Args:
        folders: Addresses of the data: data folders, or tars, which have no variants.
        names: Names of variants (`--variant`). Each name must exist in at least one folder.
        recorded: Name and recipe of the recorded variant of each column, for each folder (`VARIANTS_FACT` of run.json).
        subject: Noun phrase for what was made with the recorded variants, for messages.
        print_note: Function that prints a note if a recorded variant no longer exists and the current variant is read
            instead; None to raise an error in that case.

    Returns:
        chosen: Names of variants by column, for each data folder (`clipmill.shards.dataset.reading_variants`).

    Raises:
        UserError: A given name does not exist in any folder, a record lacks a name, or (without `print_note`) a
            recorded variant no longer exists.
    """
    chosen: dict[Path, dict[str, str]] = {}
    existing_names: set[str] = set()
    for index, address in enumerate(folders):
        variants = {column: name for column in COLUMNS for name in names if _has_variant(address, column, name)}
        existing_names.update(variants.values())
        for column, variant in recorded[index].items() if index < len(recorded) else ():
            if not isinstance(variant, dict) or "name" not in variant:
                raise UserError(
                    f"{subject} records its variant of {column} as {variant!r}, without a name and a recipe",
                    hint=f"make {subject} again with a different --out; the record is from an older clipmill",
                )
            if column in variants:
                continue
            if _has_variant(address, column, str(variant["name"])):
                variants[column] = str(variant["name"])
                continue
            message = f"{subject} was made with variant {variant['name']} of {column}, which {address} no longer has"
            path = open_data_folder(address, cache=cache, column=None).path
            current = current_variant(path, column)
            if current is not None and not _has_variant(address, column, current):
                current = None  # dataset.json still lists the variant, but its folder was deleted
            if print_note is None:
                command = _how_to_recreate(address, column, variant, current=current, cache=cache)
                raise UserError(
                    f"{message}; the current variant is {current or 'missing'}",
                    hint=f"make the variant again: {command}"
                    + ("; or train on the current variant in a new run, with a different --out" if current else ""),
                )
            if current is not None:  # otherwise, the code that opens the data reports the missing column
                print_note(f"note: {message}; the current variant {current} is used instead")
        if variants:
            chosen[folder_path(address, cache=cache)] = variants
    if unknown_names := [name for name in names if name not in existing_names]:
        raise UserError(
            f"--variant {unknown_names[0]}: there is no such variant in {', '.join(folders)}",
            hint="run prep status to see the variants of a data folder",
            flags=("--variant",),
        )
    return chosen


def _has_variant(address: str, column: str, variant: str) -> bool:
    """Return True if the data folder at a path or URL has a variant of a column.

    Raises:
        UserError: The bucket does not exist, or the storage rejects the credentials.
    """
    if not is_remote(address):
        return variant_dir(Path(address), column, variant).is_dir()
    from clipmill.manifests.storage.objects import open_objects

    try:
        return bool(open_objects(address).info(f"{column}/{variant}/{RECIPE_FILE}"))
    except FileNotFoundError:
        return False


def _how_to_recreate(
    address: str, column: str, variant: Mapping[str, Any], *, current: str | None, cache: Path | None
) -> str:
    """Return the command that recreates a variant, followed by the settings that differ from the current variant."""
    recipe, current_recipe = dict(variant.get("recipe", {})), {}
    make = how_to_make(column, address, str(variant["name"]))
    if current is not None:
        # For a bucket, opening the folder downloads the small files of the current variant, such as the recipe.
        current_recipe = _recipe(open_data_folder(address, cache=cache, column=column).path, column, current)
    names = [name for name in {**current_recipe, **recipe} if recipe.get(name) != current_recipe.get(name)]
    settings = ", ".join(
        f"{name} {_value_text(recipe.get(name))}"
        + (f" (now {_value_text(current_recipe.get(name))})" if current_recipe else "")
        for name in names
    )
    if not (recipe and settings):
        return f"{make}, with the original settings"
    prefix = "the settings of the current variant, except " if current_recipe else ""
    return f"{make}, with {prefix}{settings}"


def _value_text(value: object) -> str:
    return "not set" if value is None else str(value)


def _recipe(path: Path, column: str, variant: str) -> dict[str, Any]:
    """Return the recipe of a variant; {} if it cannot be read, because the recipe is only part of a message."""
    try:
        return Variant(variant_dir(path, column, variant)).recipe
    except UserError:
        return {}
