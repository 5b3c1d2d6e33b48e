"""The data folder of a command: its layout on disk, and the locks that allow one writer per column."""

import fcntl
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manifests.errors import UserError
from manifests.publish import folder_lock, naming, remove_temporaries, target_of
from manifests.store import manifest_dir
from prep.core.column import VIDEO
from prep.core.heartbeat import RUNNING_FOLDER
from prep.core.layout import LAYOUT_FOLDER, owner_of_layout
from shards.dataset import list_variants, variant_dir
from shards.format import COMMITS_FOLDER, DATASET_FILE, RECIPE_FILE, folders_in

PROBES_FILE = "probes.parquet"
SHOTS_FILE = "shots.parquet"
# Written by every command, under the lock of the data folder.
ROOT_FILES = frozenset({DATASET_FILE, PROBES_FILE, SHOTS_FILE})
RUNNING_FILE = re.compile(r"\d{6,}\.json")


def require_data_folder(data_dir: Path) -> Path:
    """Return the absolute path of an existing data folder.

    Raises:
        UserError: the path does not exist or is not a folder.
    """
    if not data_dir.exists():
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
    path = _lock_path(data_dir, column)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{data_dir} is not writable: {error.strerror}",
            hint="grant write permission, or give another folder with --data",
        ) from None
    try:
        with naming(path):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "unknown"
                raise UserError(
                    f"another command is writing to {data_dir} ({holder})",
                    hint=f"it holds the lock of column {column}: wait until it finishes, or stop it",
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
        with naming(path):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def was_killed(data_dir: Path, *, column: str) -> bool:
    """Return True if the last command that wrote a column was killed on this machine, and so nobody writes it now.

    It reads what the command noted in the lock file. Trying the lock itself could refuse a command that starts at that
    moment.
    """
    try:
        words = _lock_path(data_dir, column).read_text().split()
    except (OSError, ValueError):
        return False
    if len(words) != 4 or not words[1].isdecimal() or words[3] != os.uname().nodename:
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # it belongs to another user
    return False


def _lock_path(data_dir: Path, column: str) -> Path:
    return data_dir / (".lock" if column == VIDEO else f".{column}.lock")


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
