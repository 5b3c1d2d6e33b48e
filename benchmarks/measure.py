"""Measure the cost of a command: CPU time of its process tree, wall time and peak memory."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import REPOSITORY

LAUNCH = Path(__file__).with_name("launch.py")


@dataclass(frozen=True)
class Usage:
    """Cost of a command.

    Attributes:
        cpu_s: User and system time of the command and all of its descendants, in seconds.
        wall_s: Wall time in seconds.
        peak_bytes: Peak resident memory of the largest process in bytes (including shared pages on Linux).
        stdout: Standard output of the command.
    """

    cpu_s: float
    wall_s: float
    peak_bytes: int
    stdout: str


def run_measured(command: Sequence[str], *, folder: Path | None = None) -> Usage:
    """Run a command to completion in `folder`.

    Raises:
        RuntimeError: The command failed, or left processes that do not exit.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as usage_file:
        launched = subprocess.run(
            [sys.executable, "-I", "-S", os.fspath(LAUNCH), usage_file.name, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        if launched.returncode:
            raise RuntimeError(f"{' '.join(command)} exited with {launched.returncode}:\n{launched.stderr[-2000:]}")
        usage = json.loads(Path(usage_file.name).read_bytes())
    if not usage.pop("is_whole"):
        raise RuntimeError(f"{' '.join(command)} left processes that do not exit")
    return Usage(**usage, stdout=launched.stdout)


def prep_command(*arguments: str | Path) -> list[str]:
    """Return a command line of `prep`, for this Python interpreter and this checkout."""
    return [sys.executable, "-m", "clipmill.prep.cli", *map(str, arguments)]
