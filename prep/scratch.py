"""Scratch space of a worker, on the node's own disk (`$TMPDIR`), gone when the work is; also after a kill.

A worker holds a lock on its folder. The kernel lets go of it when the worker ends, however it ends, and then the
next worker on the node removes the folder.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "clipmill-"
_UNLOCKED_PREFIX = ".clipmill-"  # of a folder that is not locked yet, for the moment that it takes


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new folder and removes it at the end; first removes those that killed workers of this user left here."""
    # Asked for another place when this one is full, gettempdir() would give it without a word.
    root = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    _remove_abandoned(root)
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=root))
    lock = os.open(unlocked, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = unlocked.rename(root / f"{_PREFIX}{unlocked.name.removeprefix(_UNLOCKED_PREFIX)}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
