"""Monitor the processes of a running command: their memory, and their CPU time including daemons."""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import REPOSITORY

INTERVAL_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """Process, as it was last observed before its exit.

    Attributes:
        command: Arguments of the process.
        cpu_s: User and system time of the process in seconds, without its children.
        peak_bytes: Peak resident memory of the process in bytes, including shared pages.
    """

    command: tuple[str, ...]
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Watched:
    """Finished command with all of its processes."""

    wall_s: float
    processes: list[Process]

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes in seconds, up to the last observation of each."""
        return sum(process.cpu_s for process in self.processes)


def run_watched(command: Sequence[str]) -> Watched:
    """Run a command to completion, sampling its process tree ten times a second.

    Raises:
        RuntimeError: The command failed.
    """
    seen: dict[tuple[int, str], Process] = {}
    begin_s = time.perf_counter()
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        known = {running.pid}
        while running.poll() is None:
            for pid, stat in _descendants(known).items():
                process = _observe(pid, stat)
                if process is not None:
                    seen[pid, stat[19]] = process
            time.sleep(INTERVAL_S)
        wall_s = time.perf_counter() - begin_s
        message = running.stderr.read() if running.stderr else ""
    if running.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {running.returncode}:\n{message[-2000:]}")
    return Watched(wall_s, list(seen.values()))


def _descendants(known: set[int]) -> dict[int, list[str]]:
    """Return the fields of `/proc/PID/stat` from the third on, by PID, for processes in `known` and their descendants.

    A process is tracked even after its parent has exited, because daemons detach themselves.
    """
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
    grown = True
    while grown:
        below = {pid for pid, stat in stats.items() if int(stat[1]) in known}
        grown = not below <= known
        known |= below
    return {pid: stats[pid] for pid in known if pid in stats}


def _observe(pid: int, stat: list[str]) -> Process | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    peaks = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    if not peaks:  # a zombie
        return None
    return Process(tuple(command), (int(stat[11]) + int(stat[12])) / _TICKS_PER_S, peaks[0] * 1024)
