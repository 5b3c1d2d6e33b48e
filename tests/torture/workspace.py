"""What the cases of one campaign share: the commands, and folders that are made once and copied for each case."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from tests.torture.commands import Commands


class Workspace:
    """A folder for everything that a campaign makes; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = Commands(folder / "commands")
        self._lock = threading.Lock()
        self._making: dict[str, threading.Lock] = {}

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder `name`, which `make` fills the first time that it is asked for. Nobody may change it: see `copy`.

        Threads that ask for the same folder wait for each other; a `make` may ask for other folders.
        """
        with self._lock:
            making = self._making.setdefault(name, threading.Lock())
        path = self.folder / "made" / name
        with making:
            if not path.exists():
                # Made in its last place, since tables name paths; a `make` that fails leaves nothing.
                path.mkdir(parents=True)
                try:
                    make(path)
                except BaseException:
                    shutil.rmtree(path)
                    raise
        return path

    def close(self) -> None:
        """Ends what runs still; the folder stays."""
        self.commands.close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copy(source: Path, target: Path) -> None:
    """Real copies of all files below `source`, with their times; a case may damage them."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
