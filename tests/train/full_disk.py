"""Small file system that tests fill or make read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SIZE = "512k"


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of `_SIZE` in memory; skip the test if mounting is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Fill the disk completely."""
    try:
        with (disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def make_read_only(disk: Path) -> None:
    """Make the disk reject all writes."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
