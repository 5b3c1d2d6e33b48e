"""Folder of a variant: its recipe, the request of its last run, and the rule for replacing the current variant.

`<variant>/selection.json` contains the values of the request that commands need to continue the run (`prep retry`, the
`next` lines of reports): `--where`, `--endpoint`, the path of local weights, and `--engine` or `--address` unless the
default engine was used.

This selection is not part of the recipe, because the bytes of a sample do not depend on it: a run with a different
selection keeps the variant and its samples, and makes only missing samples. The selection has its own file because the
checksum of recipe.json is recorded at the end of a run, but `prep status` and plans need the selection from the start.

A new variant may replace the current variant unless temporary failures, such as rejected credentials, a full disk or a
lost worker, are the reason why it lacks samples that the current variant has. `prep retry`, or the same command, can
still make these samples. A permanently damaged source does not prevent the replacement. Runs, `prep status` and
`prep gc` follow this rule (`lost_samples`).
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import split_key
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
from clipmill.prep.core.failure_list import FAILURES_FILE, read_failures, shard_name
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT, FailureCode
from clipmill.prep.core.recipe import Recipe
from clipmill.shards.columns import command_for
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import variant_dir
from clipmill.shards.format import COMMITS_FOLDER, RECIPE_FILE
from clipmill.shards.index import open_index
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

SELECTION_FILE = "selection.json"
WHERE = "where"
Value = str | int | float  # value of a flag


def write_selection(folder: Path, where: str | None, values: Mapping[str, Value | None] | None = None) -> None:
    """Record the selection of a run in the folder of its variant. If the selection is empty, remove the file.

    Args:
        where: Condition that selects samples; None for all samples.
        values: Other values of the request, keyed by flag name; None for a flag that was not passed.
    """
    path = folder / SELECTION_FILE
    selection = {name: value for name, value in {WHERE: where, **(values or {})}.items() if value is not None}
    if not selection:
        remove(path)
    elif not path.is_file() or _read(path) != selection:
        publish_checked_json(path, selection)


def read_selection(folder: Path) -> dict[str, Any]:
    """Read the selection of the last run of a variant. Without `where`, the run selected all samples.

    Raises:
        UserError: The file is damaged.
    """
    path = folder / SELECTION_FILE
    if not path.exists():
        return {}
    selection = _read(path)
    if selection is None:
        raise UserError(
            f"{path} is damaged",
            hint=f"run prep {command_for(folder.parent.name, folder.name)} again with the same flags, such as --where, "
            "to rewrite the file",
        )
    return selection


def stored_request(variant: Variant) -> dict[str, Any]:
    """Return the recipe of a variant, merged with the request of its last run, such as `where`.

    Raises:
        UserError: A file cannot be read.
    """
    return {**variant.recipe, **read_selection(variant.directory)}


def stored_recipe(column: ColumnSpec, variant: Variant) -> Recipe[Any]:
    """Return the recipe of a variant, with the settings of its last run.

    Raises:
        UserError: The recipe cannot be read, or was written by a different version.
    """
    stored = stored_request(variant)
    settings = column.stored_settings(stored, stored.get(WEIGHTS))
    return Recipe(settings, variant.recipe, variant.directory.name.rpartition("-")[0])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        selection = read_checked_json(path)
    except (OSError, ValueError):
        return None
    return selection if selection and all(isinstance(value, Value) for value in selection.values()) else None


def make_variant(folder: Path, recipe: dict[str, Any]) -> None:
    """Create the folder of a variant with its recipe, or update the recipe in an existing folder.

    A new folder gets its name only when it contains the recipe, so other commands never see a folder without a recipe.
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
    """Publish recipe.json unless the file already has this content, so that a run without work changes no file."""
    try:
        is_recorded = parse_json(read_record(folder / RECIPE_FILE)) == recipe
    except (OSError, ValueError):
        is_recorded = False
    if not is_recorded:
        publish_json(folder / RECIPE_FILE, recipe)


# Codes of failures that a retry may repair. ENCODE_FAILED is included, because the new settings may be the cause.
_RETRYABLE = TRANSIENT | SOURCE_AWAY | {FailureCode.ENCODE_FAILED}


def lost_samples(data_dir: Path, column: str, *, variant: str, former_variant: str | None) -> list[Failure]:
    """Return the failures that a retry may repair, if they cost a variant samples that a former variant has.

    Args:
        variant: Name of the new variant.
        former_variant: Name of the variant to replace; None if there is none.
    """
    if former_variant is None or former_variant == variant:
        return []
    new_variant = Variant(variant_dir(data_dir, column, variant))
    # The list also contains the failures of sources that are not in a shard.
    listed_failures = read_failures(new_variant.directory / FAILURES_FILE)
    failures = [*(failure for commit in new_variant.commits.values() for failure in commit.failures), *listed_failures]
    failures = [failure for failure in dict.fromkeys(failures) if failure.code in _RETRYABLE]
    folder = variant_dir(data_dir, column, former_variant)
    if not failures or not folder.is_dir():
        return []
    old_variant = Variant(folder)
    shard_names = {shard_name(shard.shard_id) for shard in old_variant.shards()}
    shard_names -= {shard_name(shard.shard_id) for shard in new_variant.shards()}
    try:
        video_ids = {failure.video_id for failure in failures}
        latest_ms: dict[str, int] = {}  # latest start of the samples that only the former variant has, by video ID
        for video_id, start_ms in _starts(old_variant, video_ids) - _starts(new_variant, video_ids):
            latest_ms[video_id] = max(start_ms, latest_ms.get(video_id, 0))
    except (Damaged, OSError):
        return failures  # it is unknown which samples the variants have
    return [
        failure
        for failure in failures
        # If a failure has a key, it is the key of the first sample that failed; later samples may have failed too.
        if failure.video_id in shard_names
        or latest_ms.get(failure.video_id, -1) >= (0 if failure.key is None else _video_and_start(failure.key)[1])
    ]


def _starts(variant: Variant, video_ids: Collection[str]) -> set[tuple[str, int]]:
    """Return the video ID and the start in ms of each sample of the given videos."""
    starts = set()
    for shard in variant.shards():
        for key in open_index(shard.index_path, columns=["key"])["key"].to_pylist():
            if key in video_ids:  # the sample covers the complete video
                starts.add((key, 0))
            elif (start := _video_and_start(key))[0] in video_ids:
                starts.add(start)
    return starts


def _video_and_start(key: str) -> tuple[str, int]:
    """Return the video ID and the start in ms from the key of a chunk; return (key, 0) for other samples."""
    try:
        return split_key(key)
    except ValueError:
        return key, 0
