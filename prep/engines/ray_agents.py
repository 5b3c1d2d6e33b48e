"""What a private Ray instance leaves behind: its agents and its folder, which a sweeper removes.

A raylet starts agents (of the dashboard, of runtime environments). When it ends, they try to report that to the head of
the instance, which has ended too, and give up only after a minute. Ray itself never removes the folder of an instance.
So a small process waits until the one that uses Ray is gone, however it ended, then kills the agents and removes the
folder.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_SWEEPER = """
import os, shutil, signal, sys, time
for process in sys.stdin.read().split():  # until the other end of the pipe is closed
    pid, began = process.split(":")
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == began:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
for _ in range(100):  # processes of the instance that are still ending write their logs there
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
_sweepers: "list[subprocess.Popen[str]]" = []  # whose pipes this process holds open


def start_sweeper(folder: Path) -> None:
    """Have `folder` removed, and the agents of `name_agents` killed, once this process has ended."""
    null = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _SWEEPER, os.fspath(folder)]
    sweeper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, text=True
    )
    _sweepers.append(sweeper)


def name_agents(ray: Any) -> None:
    """Tell the last sweeper the children of the raylet that this process has started."""
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
    pipe = _sweepers[-1].stdin
    assert pipe is not None
    pipe.write(" ".join(f"{pid}:{times}" for pid, parent, times in running_processes() if parent == raylet))
    pipe.flush()


def running_processes() -> "list[tuple[int, int, str]]":
    """Return PID, PID of the parent, and start time (in ticks) of all processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(folder.name)
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            found.append((pid, int(fields[1]), fields[19]))
    return found
