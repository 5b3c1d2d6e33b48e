"""What a command costs: CPU seconds of its whole process tree, wall time and peak memory."""

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
    """The cost of one command.

    Attributes:
        cpu_s: user and system seconds of the command and of all that it started.
        wall_s: seconds from its start to its end.
        peak_bytes: resident memory of its largest process, at the most (Linux counts shared pages in).
        stdout: what it printed.
    """

    cpu_s: float
    wall_s: float
    peak_bytes: int
    stdout: str


def run_measured(command: Sequence[str], *, folder: Path | None = None) -> Usage:
    """Runs a command to its end in `folder`.

    Raises:
        RuntimeError: it failed, or left processes behind that do not end.
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
            raise RuntimeError(f"{' '.join(command)} ended with {launched.returncode}:\n{launched.stderr[-2000:]}")
        usage = json.loads(Path(usage_file.name).read_bytes())
    if not usage.pop("is_whole"):
        raise RuntimeError(f"{' '.join(command)} left processes behind that do not end")
    return Usage(**usage, stdout=launched.stdout)


def prep_command(*arguments: str | Path) -> list[str]:
    """The command line of `prep`, run by this Python from this checkout."""
    return [sys.executable, "-m", "prep.cli", *map(str, arguments)]
