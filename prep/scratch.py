"""Scratch space of a worker, on the node's own disk (`$TMPDIR`), gone when the work is; also after a kill."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "clipmill-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new folder and removes it at the end; first removes those that killed workers of this user left here."""
    root = Path(tempfile.gettempdir())
    _remove_abandoned(root)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}[0-9]*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            # Another user's folder cannot be removed, and need not be.
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
