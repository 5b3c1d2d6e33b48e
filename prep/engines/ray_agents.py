"""The agents of a private Ray instance, which are ended with the process that started it.

A raylet starts agents (of the dashboard, of runtime environments). When it ends, they try to report that to the head of
the instance, which has ended too, and give up only after a minute. So a small process waits until the one that uses
Ray is gone, however it ended, and then kills them.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_SWEEPER = """
import os, signal, sys
sys.stdin.buffer.read()  # until the other end of the pipe is closed
for process in sys.argv[1:]:
    pid, began = process.split(":")
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == began:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""
_sweepers: "list[subprocess.Popen[bytes]]" = []  # whose pipes this process holds open


def end_agents_with_this_process(ray: Any) -> None:
    """Have the children of the raylet that this process has started killed once this process has ended."""
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    began = [f"{pid}:{times}" for pid, parent, times in running_processes() if parent == raylet]
    null = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _SWEEPER, *began]
    _sweepers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True))


def running_processes() -> "list[tuple[int, int, str]]":
    """Return PID, PID of the parent, and start time (in ticks) of all processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(folder.name)
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            found.append((pid, int(fields[1]), fields[19]))
    return found
