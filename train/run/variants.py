"""Choose the variant of each column that a command reads: from --variant, from a training run, or the current one.

A column holds one kind of data, such as video or latents, and each of its variants was made with different settings. A
run always reads the same variants, even after it is resumed. Commands that use the weights of a run with the data of
the run read these variants too. run.json lists the variants with their recipes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.shards.dataset import current_variant, reading_variants, variant_dir
from clipmill.shards.format import RECIPE_FILE
from clipmill.shards.reader import Variant
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import read_values
from clipmill.train.config.shards import folders_of, kind_of, local_folder, normalise_address
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.data_folder import folder_path
from clipmill.train.data.variants import RecordedVariants, choose_variants
from clipmill.train.run.folder import RunFolder, is_run

# Entries of run.json with the name and recipe of the variant of each column. The first entry is a list with an item for
# each data folder of the run. The second is keyed by the addresses of the data folders in --evaluate.shards.
VARIANTS_FACT, EVALUATED_FACT = "variants", "evaluated_variants"


def evaluated_data(settings: ClipSettings) -> list[str]:
    """Return the addresses of the data that a run evaluates on but does not train on."""
    addresses = (
        [data.shards for data in settings.evaluated_data() if data.shards is not None]
        if settings.evaluate.every
        else []
    )
    run_folders = set(map(normalise_address, settings.folders))
    return [address for address in dict.fromkeys(addresses) if normalise_address(address) not in run_folders]


def variants_facts(settings: ClipSettings, *, columns: Sequence[str]) -> dict[str, Any]:
    """Return the entries of run.json about the variants that a run reads for training and for evaluations."""
    evaluated_addresses = evaluated_data(settings)
    evaluated_variants = _variants_of(
        evaluated_addresses, settings.evaluate.where, columns=columns, cache=settings.cache
    )
    return {
        VARIANTS_FACT: _variants_of(settings.folders, settings.selection, columns=columns, cache=settings.cache),
        **(
            {EVALUATED_FACT: dict(zip(map(normalise_address, evaluated_addresses), evaluated_variants, strict=True))}
            if evaluated_addresses
            else {}
        ),
    }


def _variants_of(
    folders: Sequence[str], where: str | None, *, columns: Sequence[str], cache: Path | None
) -> list[RecordedVariants]:
    """Return the current variants of the columns that samples are read from, for each data folder; {} for tars."""
    names = [*columns]
    if where is not None:
        from clipmill.shards.where import parse_where

        names += parse_where(where).stored_in
    paths = [folder_path(folder, cache=cache) if kind_of(folder).has_manifest else None for folder in folders]
    return [
        {
            name: {"name": variant, "recipe": Variant(directory).recipe if (directory / RECIPE_FILE).exists() else {}}
            for name in names
            if path is not None
            and (variant := current_variant(path, name)) is not None
            and (directory := variant_dir(path, name, variant))
        }
        for path in paths
    ]


def recorded_variants(facts: Mapping[str, Any], settings: ClipSettings) -> dict[Path, dict[str, str]]:
    """Return the names of the variants in run.json, keyed by data folder, then by column."""
    folders = dict(zip(settings.folders, facts[VARIANTS_FACT], strict=True)) | dict(facts.get(EVALUATED_FACT, {}))
    return {
        folder_path(address, cache=settings.cache): {column: str(record["name"]) for column, record in variants.items()}
        for address, variants in folders.items()
        if variants
    }


@contextmanager
def reading_variants_of_run(
    weights: str | Path, shards: str | None, names: Collection[str] = (), *, say: Callable[[str], object]
) -> Iterator[None]:
    """Read the variants in `names` within the block. Other columns use the variants that the run was trained with.

    Args:
        weights: Run folder, or weights from another source. Such weights do not record any data.
        shards: Data folder to read instead of the data of the run. Unless the run was trained on this folder, the
            current variants are read for columns that have no variant in `names`.
        names: Names of variants (`--variant`).
        say: Function that prints a note if a variant used in training no longer exists and the current variant is read
            instead.

    Raises:
        UserError: No data folder has a variant with a name in `names`, or run.json is missing or damaged.
    """
    run = RunFolder(local_folder(weights))
    try:
        values = read_values(run.settings) if is_run(run.path) else {}
    except UserError:
        values = {}  # the code that opens the run next reports what is wrong with its settings
    shards_of_run, cache = values.get("shards", TrainingSettings.shards), values.get("cache")
    folders = folders_of(shards_of_run if isinstance(shards_of_run, str) else tuple(map(str, shards_of_run)))
    # Without run.json, the variants that the weights were trained on are unknown.
    is_trained = bool(values) and run.latest_checkpoint() is not None
    pairs = [
        (folder, variants)
        for folder, variants in zip(
            folders, run.require_facts("task", VARIANTS_FACT)[VARIANTS_FACT] if is_trained else (), strict=False
        )
        if shards is None or normalise_address(folder) == normalise_address(shards)
    ]
    chosen_variants = choose_variants(
        [folder for folder, _ in pairs] or ([shards] if names and shards is not None else []),
        names,
        recorded=[variants for _, variants in pairs],
        cache=None if cache is None else Path(str(cache)),
        subject=str(weights),
        print_note=say,
    )
    with reading_variants(chosen_variants):
        yield
