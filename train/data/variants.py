"""Choice of the variant to read of each column: a named variant, a recorded variant, or the current variant."""

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
from clipmill.train.data.arguments import require_texts
from clipmill.train.data.data_folder import folder_path, open_data_folder

Recorded = Mapping[str, Mapping[str, Any]]  # name and recipe of a variant, by column
VariantNames = str | Sequence[str] | None


@contextmanager
def reading_named(folders: Sequence[str], variant: VariantNames, *, cache: Path | None) -> Iterator[None]:
    """Read the variants in `variant` within this context, and the current variants of other columns.

    Args:
        variant: Name of a variant, or several names; None for the current variants.

    Raises:
        UserError: A named variant does not exist in any folder.
    """
    names = () if variant is None else (variant,) if isinstance(variant, str) else tuple(variant)
    for name in names:
        require_texts(variant=name)
    with reading_variants(choose_variants(folders, names, cache=cache)):
        yield


def choose_variants(
    folders: Sequence[str],
    named: Collection[str] = (),
    *,
    recorded: Sequence[Recorded] = (),
    made: str = "the run",
    cache: Path | None = None,
    say: Callable[[str], object] | None = None,
) -> dict[Path, dict[str, str]]:
    """Choose the variant to read of each column: a named variant, or a variant that a run has recorded.

    Columns without either are missing from the result; their current variants are read.

    Args:
        folders: Data folders, or tars, which have no variants.
        named: Names of variants (`--variant`). At least one folder must have each of them.
        recorded: `name` and `recipe` of a variant by column, for each folder (`VARIANTS_FACT` of run.json).
        made: Noun phrase for the result that was made with the recorded variants, for messages.
        say: Function that prints a note if a recorded variant no longer exists and the current variant is read instead;
            None to raise an error in that case.

    Returns:
        chosen: Names of variants by column, for each data folder (`clipmill.shards.dataset.reading_variants`).

    Raises:
        UserError: A named variant does not exist in any folder, or a recorded variant no longer exists.
    """
    chosen: dict[Path, dict[str, str]] = {}
    known: set[str] = set()
    for number, address in enumerate(folders):
        variants = {column: name for column in COLUMNS for name in named if _has_variant(address, column, name)}
        known.update(variants.values())
        for column, variant in recorded[number].items() if number < len(recorded) else ():
            if not isinstance(variant, dict) or "name" not in variant:
                raise UserError(
                    f"{made} records its variant of {column} as {variant!r}, without name and recipe",
                    hint="an earlier version of clipmill made it: make it again with another --out",
                )
            if column in variants:
                continue
            if _has_variant(address, column, str(variant["name"])):
                variants[column] = str(variant["name"])
                continue
            gone = f"{made} was made with variant {variant['name']} of {column}, which {address} no longer has"
            path = open_data_folder(address, cache=cache, column=None).path
            current = current_variant(path, column)
            if current is not None and not _has_variant(address, column, current):
                current = None  # dataset.json still lists the variant, but its folder was deleted
            if say is None:
                command = _how_to_make_again(address, column, variant, current=current, cache=cache)
                raise UserError(
                    f"{gone}; the current one is {current or 'missing'}",
                    hint=f"make it again: {command}"
                    + ("; or train on the current variant in a new run, with another --out" if current else ""),
                )
            if current is not None:  # otherwise, opening the data says that the column is missing
                say(f"note: {gone}; the current variant {current} is used instead")
        if variants:
            chosen[folder_path(address, cache=cache)] = variants
    if unknown := [name for name in named if name not in known]:
        raise UserError(
            f"--variant {unknown[0]}: there is no such variant in {', '.join(folders)}",
            hint="prep status shows the variants of a data folder",
            flags=("--variant",),
        )
    return chosen


def _has_variant(address: str, column: str, variant: str) -> bool:
    """Return True if the data folder at a path or URL has a variant of a column.

    Raises:
        UserError: The storage does not exist, or refuses the credentials.
    """
    if not is_remote(address):
        return variant_dir(Path(address), column, variant).is_dir()
    from clipmill.manifests.storage.objects import open_objects

    try:
        return bool(open_objects(address).info(f"{column}/{variant}/{RECIPE_FILE}"))
    except FileNotFoundError:
        return False


def _how_to_make_again(
    address: str, column: str, variant: Mapping[str, Any], *, current: str | None, cache: Path | None
) -> str:
    """Return the command that recreates a variant, and the settings that differ from the current variant."""
    recipe, current_recipe = dict(variant.get("recipe", {})), {}
    make = how_to_make(column, address, str(variant["name"]))
    if current is not None:
        # Opening the folder copies the small files of a bucket's current variant.
        current_recipe = _recipe(open_data_folder(address, cache=cache, column=column).path, column, current)
    names = [name for name in {**current_recipe, **recipe} if recipe.get(name) != current_recipe.get(name)]
    settings = ", ".join(
        f"{name} {_value_text(recipe.get(name))}"
        + (f" (now {_value_text(current_recipe.get(name))})" if current_recipe else "")
        for name in names
    )
    if not (recipe and settings):
        return f"{make} with its settings"
    prefix = "the settings of the current variant, but for " if current_recipe else ""
    return f"{make} with {prefix}{settings}"


def _value_text(value: object) -> str:
    return "not set" if value is None else str(value)


def _recipe(path: Path, column: str, variant: str) -> dict[str, Any]:
    """Return the recipe of a variant, for a message; {} if it cannot be read."""
    try:
        return Variant(variant_dir(path, column, variant)).recipe
    except UserError:
        return {}
