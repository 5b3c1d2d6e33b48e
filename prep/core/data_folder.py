"""Data folder: the lock of each column, the removal of files that killed writers left behind, and waiting for files."""

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.locks import FileLock, folder_lock, holder_of, lock, process_label
from clipmill.manifests.publish import remove_temporaries, target_of
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.store import manifest_dir, resolve_folder
from clipmill.prep.core.shard_result import RUNNING_FOLDER
from clipmill.prep.core.tables import LAYOUT_FOLDER, owner_of_layout
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import commit_path, read_commit
from clipmill.shards.dataset import list_variants, variant_dir
from clipmill.shards.format import COMMITS_FOLDER, DATASET_FILE, RECIPE_FILE, folders_in
from clipmill.shards.opening import Damaged

PROBES_FILE = "probes.parquet"
SHOTS_FILE = "shots.parquet"
# Files that a command for any column may write while it holds the lock of the data folder.
ROOT_FILES = frozenset({DATASET_FILE, PROBES_FILE, SHOTS_FILE})
RUNNING_FILE = re.compile(r"\d{6,}\.json")


def require_data_folder(data_dir: Path) -> Path:
    """Return the absolute path of an existing data folder, or of the local copy of a data folder in a bucket.

    Raises:
        UserError: The path does not exist, is not a folder, or is not accessible.
    """
    mirror = mirror_of(data_dir)
    if mirror is not None and mirror.is_empty:
        raise UserError(
            f"there is no data folder at {mirror.url}",
            hint=f"create a data folder with prep manifest folder VIDEOS --data {mirror.url}",
        )
    if not resolve_folder(data_dir).exists():
        raise UserError(
            f"the data folder {data_dir} does not exist",
            hint=f"create a data folder with prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        )
    if not data_dir.is_dir():
        raise UserError(f"{data_dir} is not a folder", hint="use --data with a folder created by `prep manifest`")
    return data_dir.resolve()


@contextmanager
def lock_for_writing(data_dir: Path, *, column: str = VIDEO) -> Iterator[None]:
    """Lock a column for writing during the block, and first remove the files that killed commands left behind.

    Raises:
        UserError: See `column_lock`.
        OSError: Leftover files cannot be removed.
    """
    with column_lock(data_dir, column=column):
        remove_leftovers(data_dir, column=column)
        yield


@contextmanager
def column_lock(data_dir: Path, *, column: str = VIDEO) -> Iterator[None]:
    """Hold the lock of a column.

    If the process is killed, the kernel releases the lock. In a bucket, the lock is a lease, which expires. Other
    commands can write other columns at the same time. The lock of a column also covers its layouts; the lock of `video`
    also covers the manifest.

    Raises:
        UserError: Another command holds the lock, or the data folder is not writable.
    """
    path = lock_path(data_dir, column)
    if (mirror := mirror_of(data_dir)) is not None:
        with mirror.column_lock(path.name, conflicting_locks=part_lock_names(column)):
            yield
        return
    file_lock = FileLock.take(path)
    if file_lock is None:
        parts = [holder_of(part).partition("\n")[0] for part in sorted(data_dir.glob(f".{column}.part-*.lock"))]
        holder = holder_of(path) or next((f"--part, {part}" for part in parts if part), "unknown process")
        raise UserError(
            f"another command is writing to {data_dir} ({holder})",
            hint=f"the command holds the lock of column {column}; wait until it has finished, or stop it",
        )
    try:
        file_lock.note(f"{process_label()}\n")
        yield
        file_lock.note("")
    finally:
        file_lock.release()


def lock_path(data_dir: Path, column: str) -> Path:
    """Return the path of the lock of a column."""
    return data_dir / (".lock" if column == VIDEO else f".{column}.lock")


def part_lock_names(column: str) -> re.Pattern[str]:
    """Return a pattern that matches the names of part locks (`parts.py`), with groups for part number and count."""
    return re.compile(rf"\.{re.escape(column)}\.part-(\d+)-of-(\d+)\.lock", re.ASCII)


def remove_leftovers(data_dir: Path, *, column: str) -> None:
    """Remove the temporary files that killed writers of a column left behind. The caller must hold `column_lock`.

    Temporary files of other columns are kept, because a command may be writing them.
    """
    with folder_lock(data_dir):
        remove_temporaries(data_dir, matches=ROOT_FILES.__contains__)
    layouts = data_dir / LAYOUT_FOLDER
    remove_temporaries(layouts, matches=lambda target: owner_of_layout(layouts / target) == column)
    if column == VIDEO:
        remove_temporaries(manifest_dir(data_dir))
    for folder in incomplete_variants(data_dir, column):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    for name in list_variants(data_dir, column):
        folder = variant_dir(data_dir, column, name)
        if (folder / RECIPE_FILE).is_file():  # without a recipe, the folder does not belong to clipmill
            remove_variant_temporaries(folder)


def remove_variant_temporaries(folder: Path) -> None:
    """Remove leftovers of killed or lost writers from a variant's folder. The caller must hold `column_lock`."""
    for part in (folder, *folders_in(folder), folder / COMMITS_FOLDER, *folders_in(folder / COMMITS_FOLDER)):
        remove_temporaries(part)
    running = folder / RUNNING_FOLDER
    if running.is_dir() and not running.is_symlink():
        for path in running.iterdir():
            if RUNNING_FILE.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder contains other files
            running.rmdir()


def incomplete_variants(data_dir: Path, column: str) -> list[Path]:
    """Return the temporary variant folders that killed commands left behind. They contain at most a recipe."""
    column_dir = data_dir / column
    return [
        path
        for path in (sorted(column_dir.iterdir()) if column_dir.is_dir() else ())
        if target_of(path.name) is not None
        and path.is_dir()
        and not path.is_symlink()
        and all((target_of(entry.name) or entry.name) == RECIPE_FILE for entry in path.iterdir())
    ]


VISIBILITY_LIMIT_S = 60.0
_INTERVAL_S = 0.5


def wait_until_seen(what: str, is_seen: Callable[[], bool], *, limit_s: float = VISIBILITY_LIMIT_S) -> bool:
    """Wait for files from other machines, which may become visible late.

    An NFS client caches the attributes and entries of a folder for up to a minute.

    Args:
        what: Noun phrase for the files, for a line on standard error if the function has to wait.
        is_seen: Function that returns True if all files are visible.
        limit_s: Timeout in seconds.

    Returns:
        True if the files became visible before the timeout.
    """
    if is_seen():
        return True
    sys.stderr.write(f"waiting up to {limit_s:g} s for {what}, made on other nodes, to become visible on this node\n")
    sys.stderr.flush()
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        time.sleep(_INTERVAL_S)
        if is_seen():
            return True
    return False


def is_committed(folder: Path, fingerprints: Iterable[tuple[int, str]]) -> bool:
    """Return True if the commits and files of all given shards are visible.

    Args:
        folder: Folder of the variant.
        fingerprints: (shard ID, plan fingerprint) of each shard.
    """
    for shard_id, fingerprint in fingerprints:
        path = commit_path(folder, shard_id)
        with suppress(OSError):  # opening a folder makes an NFS client revalidate the entries that it has cached
            os.close(os.open(path.parent, os.O_RDONLY))
        try:
            commit = read_commit(path)
        except (FileNotFoundError, Damaged, UserError):
            return False
        files = [] if commit.files is None else [commit.files.tar, commit.files.index]
        if commit.plan_fingerprint != fingerprint or not all((folder / name).exists() for name in files):
            return False
    return True


_STALE_S = 5.0  # age at which the lock file of a part is stale; a running part touches its file every second


def has_stopped(data_dir: Path, *, column: str) -> bool:
    """Return True if no process is writing a column of a local data folder, even if there are recent heartbeats.

    The note in a lock file contains the process ID and the node of the holder. If the holder is on this machine, the
    function checks whether the process exists. A part (`--part K/N`) on a different node has stopped if its file is
    stale and its lock is free. A command without `--part` on a different node is assumed to be running.
    """
    if mirror_of(data_dir) is not None:
        return False
    names = part_lock_names(column)
    parts = [path for path in data_dir.glob(f".{column}.part-*.lock") if names.fullmatch(path.name)]
    return not any(_may_run(path, is_part=path in parts) for path in (lock_path(data_dir, column), *parts))


def _may_run(path: Path, *, is_part: bool) -> bool:
    """Return True if the process that wrote the note in a lock file may still be running."""
    fields = holder_of(path).partition("\n")[0].split()
    if not fields:
        return False  # the lock is free, or the holder has ended
    if len(fields) == 4 and fields[1].isdecimal() and fields[3] == os.uname().nodename:
        try:
            os.kill(int(fields[1]), 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            pass  # the process belongs to a different user
        return True
    if not is_part:
        return True
    try:
        with path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < _STALE_S:
                return True
            # Try the lock last, and in shared mode, so that a part that is starting is not refused.
            return not lock(file.fileno(), is_shared=True, waits=False)
    except FileNotFoundError:
        return False  # the part has just ended, and removed the file
    except OSError:
        return True


def writer_of(data_dir: Path, *, column: str) -> str | None:
    """Return the command that is writing a column of a data folder in a bucket, with its machine and start time.

    Return None if there is no such command, or if the data folder is local, where heartbeats
    (`clipmill.prep.core.shard_result`) provide more information.
    """
    mirror = mirror_of(data_dir)
    if mirror is None:
        return None
    if (holder := mirror.holder_of(lock_path(data_dir, column).name)) is not None:
        return holder
    matches = filter(None, map(part_lock_names(column).fullmatch, sorted(mirror.lock_names())))
    parts = [f"part {match[1]}/{match[2]}, {holder}" for match in matches if (holder := mirror.holder_of(match[0]))]
    return "; ".join(parts) or None
