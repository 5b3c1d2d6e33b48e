"""Which commands write a column now, as far as others can tell: by notes in lock files, processes, and leases."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from clipmill.manifests.locks import holder_of, lock
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.data_folder import lock_path, part_lock_names

_SILENT_S = 5.0  # a running part touches its file every second


def has_stopped(data_dir: Path, *, column: str) -> bool:
    """Return True if no process writes a column of a local data folder any more, whatever its heartbeats show.

    It reads what commands and parts have noted in their lock files. For this machine, it looks for the process that is
    named there. A part on another node, which touches its file, has stopped if the file is untouched and its lock free;
    a command without `--part` on another node is known by its heartbeats alone.
    """
    if mirror_of(data_dir) is not None:
        return False
    parts = [path for path in data_dir.glob(f".{column}.part-*.lock") if part_lock_names(column).fullmatch(path.name)]
    return not _may_run(lock_path(data_dir, column), is_free=lambda _: False) and not any(
        _may_run(path, is_free=_is_silent) for path in parts
    )


def _may_run(path: Path, *, is_free: Callable[[Path], bool]) -> bool:
    """Return whether the process that has noted itself in a lock file may run; `is_free` is asked on other nodes."""
    words = holder_of(path).partition("\n")[0].split()
    if not words:
        return False  # the lock is free, or its holder has ended
    if len(words) != 4 or not words[1].isdecimal() or words[3] != os.uname().nodename:
        return not is_free(path)
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it belongs to another user
    return True


def _is_silent(path: Path) -> bool:
    """Return True if a part has not touched its file and its lock is free.

    The lock is tried only then, and shared, so that a part which begins at that moment is not refused.
    """
    try:
        with path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < _SILENT_S:
                return False
            return lock(file.fileno(), is_shared=True, waits=False)
    except FileNotFoundError:
        return True  # it has just ended
    except OSError:
        return False


def writer_of(data_dir: Path, *, column: str) -> str | None:
    """Return which command writes a column of a data folder in a bucket, on any machine, and since when.

    Return None if none does, or if the data folder is local: its heartbeats tell more
    (`clipmill.prep.core.shard_result`).
    """
    mirror = mirror_of(data_dir)
    if mirror is None:
        return None
    if (holder := mirror.holder_of(lock_path(data_dir, column).name)) is not None:
        return holder
    matches = filter(None, map(part_lock_names(column).fullmatch, sorted(mirror.lock_names())))
    parts = [f"part {match[1]}/{match[2]}, {holder}" for match in matches if (holder := mirror.holder_of(match[0]))]
    return "; ".join(parts) or None
