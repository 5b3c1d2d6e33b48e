"""Checks of the small records of a data folder and of each variant.

Those of the folder are manifest, probes, shots, layouts and dataset.json. Shards and their commits are checked in
clipmill.shards.verify. Each finding names the command that repairs the record.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.errors import UserError
from clipmill.manifests.schema import MANIFEST_FILE
from clipmill.manifests.store import TABLE_FILES, manifest_dir, open_captions, read_rejected_rows, read_videos
from clipmill.prep.core.column import ColumnSpec, Stored
from clipmill.prep.core.data_folder import PROBES_FILE, SHOTS_FILE
from clipmill.prep.core.layout import LAYOUT_FOLDER, DamagedLayout, owner_of_layout, read_layout, variants_of
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.selection import SELECTION_FILE, read_selection, stored_request
from clipmill.prep.core.table_file import read_table_file
from clipmill.prep.core.work import work_of
from clipmill.prep.registry import column_named, columns
from clipmill.prep.sources.shot_table import SHOTS
from clipmill.prep.sources.table import PROBES
from clipmill.prep.upkeep.own_names import late_files
from clipmill.shards.columns import VIDEO, command_for
from clipmill.shards.dataset import current_variant, list_variants, variant_dir
from clipmill.shards.format import DATASET_FILE, RECIPE_FILE
from clipmill.shards.lists import damaged_lists
from clipmill.shards.reader import Variant


@dataclass(frozen=True)
class RecordFinding:
    """A damaged or missing record, the reason, and the command that repairs it."""

    path: str
    message: str
    repair: str


def check_folder_records(data_dir: Path) -> list[RecordFinding]:
    """Read all records of the data folder as a whole, and verify the checksums of those that have one."""
    return [
        *_manifest(data_dir),
        *_probes(data_dir),
        *_shots(data_dir),
        *_dataset(data_dir),
        *_layouts(data_dir),
    ]


def check_variant_records(variant: Variant, *, column: ColumnSpec, data_dir: Path) -> list[RecordFinding]:
    """Check the records of one variant: its recipe, its list of commits, its lists of shards and its bank."""
    folder = variant.directory
    again = f"prep {column.command} with the settings of {folder.name}"
    found = []
    try:
        recipe = variant.recipe
    except UserError as error:
        found.append((folder / RECIPE_FILE, str(error)))
    else:
        if not folder.name.endswith(f"-{recipe_fingerprint(recipe)[:8]}"):
            found.append((folder / RECIPE_FILE, "the recipe does not match the fingerprint in the folder name"))
        else:
            with suppress(UserError):  # the recipe is of another version, so its command is unknown
                again = column.command_line(stored_request(variant), data_dir=data_dir)
    try:
        read_selection(folder)
    except UserError as error:
        found.append((folder / SELECTION_FILE, str(error)))
    if variant.contents_damage is not None:
        found.append((variant.contents_damage.path, str(variant.contents_damage)))
    found += [(damage.path, str(damage)) for damage in damaged_lists(folder, variant.commits)]
    for extra in work_of(column).extra_folders:
        for path in sorted((folder / extra.name).iterdir()) if (folder / extra.name).is_dir() else ():
            if extra.file_names.fullmatch(path.name) and not extra.is_whole(path):
                found.append((path, "its content does not match the hash in the file name"))
    for file in work_of(column).extra_files:
        if (problem := file.problem(variant)) is not None:
            found.append((folder / file.name, problem))
    return [RecordFinding(str(path), message, again) for path, message in found]


def _manifest(data_dir: Path) -> Iterator[RecordFinding]:
    folder = manifest_dir(data_dir)
    repair = "the same `prep manifest` commands as before, in the same order"
    if not (folder / MANIFEST_FILE).exists():
        if any((folder / name).exists() for name in TABLE_FILES):
            yield RecordFinding(str(folder / MANIFEST_FILE), "the file is missing, but its tables exist", repair)
        return
    messages = []
    for read in (read_videos, _read_captions, read_rejected_rows, lambda folder: open_stored_captions(folder).verify()):
        try:
            read(data_dir)
        except UserError as error:
            messages.append(str(error))
    yield from (RecordFinding(str(folder), message, repair) for message in dict.fromkeys(messages))


def _read_captions(data_dir: Path) -> None:
    with open_captions(data_dir) as file:
        try:
            for group in range(file.num_row_groups):
                file.read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"the captions cannot be read: {error}") from error


def _probes(data_dir: Path) -> Iterator[RecordFinding]:
    try:
        read_table_file(data_dir / PROBES_FILE, schema=PROBES)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        message = f"{error}; until it is repaired, all sources are probed again"
        yield RecordFinding(str(data_dir / PROBES_FILE), message, _with_data("prep plan", data_dir))


def _shots(data_dir: Path) -> Iterator[RecordFinding]:
    try:
        read_table_file(data_dir / SHOTS_FILE, schema=SHOTS)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        detecting = f"prep {command_for(VIDEO)} --cut shots"
        message = f"{error}; until it is repaired, shots are detected again by `{detecting}`"
        again = _command_of(data_dir, column_named(VIDEO), lambda stored: stored.get("cut") == "shots")
        repair = again or f"{detecting} with the same settings as before"
        yield RecordFinding(str(data_dir / SHOTS_FILE), message, repair)


def _dataset(data_dir: Path) -> Iterator[RecordFinding]:
    path = data_dir / DATASET_FILE
    with_variants = [column for column in columns() if list_variants(data_dir, column.name)]
    try:
        missing = [column for column in with_variants if current_variant(data_dir, column.name) is None]
    except UserError as error:
        yield RecordFinding(str(path), str(error), str(getattr(error, "hint", "")))
        return
    for column in with_variants:
        for name in list_variants(data_dir, column.name):
            folder = variant_dir(data_dir, column.name, name)
            if name != current_variant(data_dir, column.name) and late_files(folder, column.name):
                message = "commits of a late run, written after the variant had been removed"
                yield RecordFinding(str(folder), message, _with_data("prep gc", data_dir))
    if missing:
        commands = ", ".join(f"prep {column.command}" for column in missing)
        names = ", ".join(column.name for column in missing)
        lost = f"no variant is current, but there are variants of {names}"
        what = lost if path.exists() else "the file is missing, but variants exist"
        yield RecordFinding(str(path), what, f"{commands} with the same settings as before")


def _layouts(data_dir: Path) -> Iterator[RecordFinding]:
    for path in sorted((data_dir / LAYOUT_FOLDER).glob("*.parquet")):
        try:
            read_layout(path)
        except (DamagedLayout, OSError) as error:
            yield RecordFinding(str(path), str(error), _layout_repair(path, data_dir))
    for path in _needed_layouts(data_dir):
        if not path.exists():
            message = "the layout is missing, but shards depend on it"
            yield RecordFinding(str(path), message, _layout_repair(path, data_dir))


def _needed_layouts(data_dir: Path) -> set[Path]:
    """Return the layouts used by committed shards."""
    needed = set()
    for column in columns():
        for variant in variants_of(data_dir, column.name):
            # A damaged recipe has a finding of its own; otherwise it is of another version, or the column is unusable.
            with suppress(UserError):
                if (name := work_of(column).layout_file(variant.recipe)) is not None and variant.commits:
                    needed.add(data_dir / LAYOUT_FOLDER / name)
    return needed


def _layout_repair(path: Path, data_dir: Path) -> str:
    owner, again = owner_of_layout(path), None
    column = next((column for column in columns() if column.name == owner), None)
    if column is not None:
        name_of = work_of(column).layout_file
        again = _command_of(data_dir, column, lambda stored: name_of(stored) == path.name)
    return again or f"prep {command_for(owner)} with the same settings as before"


def _command_of(data_dir: Path, column: ColumnSpec, is_wanted: Callable[[Stored], bool]) -> str | None:
    """Return the command of a variant with a wanted recipe, of the current one if possible; None if there is none."""
    current = None
    with suppress(UserError):  # a damaged dataset.json has a finding of its own
        current = current_variant(data_dir, column.name)
    for name in sorted(list_variants(data_dir, column.name), key=lambda name: name != current):
        with suppress(UserError):  # its recipe is unreadable or of another version
            stored = stored_request(Variant(variant_dir(data_dir, column.name, name)))
            if is_wanted(stored):
                return column.command_line(stored, data_dir=data_dir)
    return None


def _with_data(command: str, data_dir: Path) -> str:
    return f"{command} --data {shlex.quote(str(data_dir))}"
