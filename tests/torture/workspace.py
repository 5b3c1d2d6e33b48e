"""Resources shared by the cases of a campaign: the commands, and folders that are created once and copied per case."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from tests.forks import Forks
from tests.torture.commands import Commands


class Workspace:
    """Folder for all files of a campaign; a context manager.

    `forks` is a server that is already running.
    """

    def __init__(self, folder: Path, forks: Forks | None = None) -> None:
        self.folder = folder
        self.commands = Commands(folder / "commands", forks)
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the folder `name`, created by `make` on first use. Do not modify it: see `copy`.

        Threads that request the same folder wait for each other; a `make` may request other folders.
        """
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        path = self.folder / "made" / name
        with making:
            if not path.exists():
                # Create the folder at its final path, because tables contain paths; if `make` fails, nothing is left.
                path.mkdir(parents=True)
                try:
                    make(path)
                except BaseException:
                    shutil.rmtree(path)
                    raise
        return path

    def close(self) -> None:
        """Terminate running processes; the folder remains."""
        self.commands.close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copy(source: Path, target: Path) -> None:
    """Copy all files below `source`, with their times and without links, so that a case may modify them."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
