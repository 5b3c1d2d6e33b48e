"""The data folder of a command: its layout on disk, and the locks that allow one writer per column."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import FileLock, folder_lock, holder_of, this_process
from clipmill.manifests.publish import remove_temporaries, target_of
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.store import manifest_dir, resolved_folder
from clipmill.prep.core.layout import LAYOUT_FOLDER, owner_of_layout
from clipmill.prep.core.shard_result import RUNNING_FOLDER
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import list_variants, variant_dir
from clipmill.shards.format import COMMITS_FOLDER, DATASET_FILE, RECIPE_FILE, folders_in

PROBES_FILE = "probes.parquet"
SHOTS_FILE = "shots.parquet"
# Written by every command, under the lock of the data folder.
ROOT_FILES = frozenset({DATASET_FILE, PROBES_FILE, SHOTS_FILE})
RUNNING_FILE = re.compile(r"\d{6,}\.json")


def require_data_folder(data_dir: Path) -> Path:
    """Return the absolute path of an existing data folder, or of the working copy of one in a bucket.

    Raises:
        UserError: the path does not exist, is not a folder, or is not accessible.
    """
    mirror = mirror_of(data_dir)
    if mirror is not None and mirror.is_empty:
        raise UserError(
            f"there is no data folder at {mirror.address}",
            hint=f"create one: prep manifest folder VIDEOS --data {mirror.address}",
        )
    if not resolved_folder(data_dir).exists():
        raise UserError(
            f"the data folder {data_dir} does not exist",
            hint=f"create one: prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        )
    if not data_dir.is_dir():
        raise UserError(f"{data_dir} is not a folder", hint="give a folder created by `prep manifest` with --data")
    return data_dir.resolve()


@contextmanager
def writing(data_dir: Path, *, column: str = VIDEO) -> Iterator[None]:
    """Lock a column for a writing command and remove what killed commands left in it.

    Raises:
        UserError: see `column_lock`.
        OSError: leftover files cannot be removed.
    """
    with column_lock(data_dir, column=column):
        remove_leftovers(data_dir, column=column)
        yield


@contextmanager
def column_lock(data_dir: Path, *, column: str = VIDEO) -> Iterator[None]:
    """Hold the lock of one column. The kernel releases the lock when the process ends, even if it is killed.

    Other columns can be written at the same time. The lock of a column also covers its layouts, and the lock of `video`
    covers the manifest.

    Raises:
        UserError: another command holds the lock, or the data folder is not writable.
    """
    path = lock_path(data_dir, column)
    if (mirror := mirror_of(data_dir)) is not None:
        with mirror.column_lock(path.name, unless=part_lock_names(column)):
            yield
        return
    lock = FileLock.take(path)
    if lock is None:
        parts = [holder_of(part).partition("\n")[0] for part in sorted(data_dir.glob(f".{column}.part-*.lock"))]
        holder = holder_of(path) or next((f"--part, {part}" for part in parts if part), "unknown")
        raise UserError(
            f"another command is writing to {data_dir} ({holder})",
            hint=f"it holds the lock of column {column}: wait until it finishes, or stop it",
        )
    try:
        lock.note(f"{this_process()}\n")
        yield
        lock.note("")
    finally:
        lock.release()


def lock_path(data_dir: Path, column: str) -> Path:
    """Return the path of the lock of a column."""
    return data_dir / (".lock" if column == VIDEO else f".{column}.lock")


def part_lock_names(column: str) -> re.Pattern[str]:
    """Return the pattern of the names of the locks of a column's parts (`part_locks`): number and count."""
    return re.compile(rf"\.{re.escape(column)}\.part-(\d+)-of-(\d+)\.lock", re.ASCII)


def remove_leftovers(data_dir: Path, *, column: str) -> None:
    """Remove the temporary files of killed commands that were writing `column`; call it only inside `column_lock`.

    Temporary files of other columns are kept, because another command may be writing them.
    """
    with folder_lock(data_dir):
        remove_temporaries(data_dir, of=ROOT_FILES.__contains__)
    layouts = data_dir / LAYOUT_FOLDER
    remove_temporaries(layouts, of=lambda target: owner_of_layout(layouts / target) == column)
    if column == VIDEO:
        remove_temporaries(manifest_dir(data_dir))
    for folder in incomplete_variants(data_dir, column):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    for name in list_variants(data_dir, column):
        folder = variant_dir(data_dir, column, name)
        if (folder / RECIPE_FILE).is_file():  # otherwise clipmill did not make the folder
            remove_variant_temporaries(folder)


def remove_variant_temporaries(folder: Path) -> None:
    """Remove leftovers of killed or lost writers from a variant's folder; call it only with the lock of its column."""
    for part in (folder, *folders_in(folder), folder / COMMITS_FOLDER, *folders_in(folder / COMMITS_FOLDER)):
        remove_temporaries(part)
    running = folder / RUNNING_FOLDER
    if running.is_dir() and not running.is_symlink():
        for path in running.iterdir():
            if RUNNING_FILE.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder holds files that are not ours
            running.rmdir()


def incomplete_variants(data_dir: Path, column: str) -> list[Path]:
    """Return variant folders under a temporary name, left by a killed command; they hold at most a recipe."""
    column_dir = data_dir / column
    return [
        path
        for path in (sorted(column_dir.iterdir()) if column_dir.is_dir() else ())
        if target_of(path.name) is not None
        and path.is_dir()
        and not path.is_symlink()
        and all((target_of(entry.name) or entry.name) == RECIPE_FILE for entry in path.iterdir())
    ]
