"""Run a command and record its cost. `benchmarks.measure` starts this program.

    python -I -S launch.py USAGE.json COMMAND [ARGUMENT ...]

On Linux, a child process starts with the peak memory of its parent, so a small process between the benchmark and the
command is necessary. This process adopts orphaned processes of the command (daemons and their workers), so that the CPU
time of the complete process tree is counted.
"""

import ctypes
import json
import os
import resource
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
ORPHANS_LIMIT_S = 20.0


def main() -> int:
    """Run the command, wait for all of its descendants, and return its exit status."""
    usage_path, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    begin_s = time.perf_counter()
    child = os.posix_spawnp(command[0], command, os.environ)
    _, status, own = os.wait4(child, 0)
    wall_s = time.perf_counter() - begin_s
    num_left = wait_for_orphans()
    tree = resource.getrusage(resource.RUSAGE_CHILDREN)
    usage = {
        "wall_s": wall_s,
        "cpu_s": tree.ru_utime + tree.ru_stime,
        "peak_bytes": own.ru_maxrss * 1024,
        "is_whole": num_left == 0,
    }
    with open(usage_path, "w") as file:  # noqa: PTH123 - pathlib would double the imports
        json.dump(usage, file)
    return os.waitstatus_to_exitcode(status)


def wait_for_orphans() -> int:
    """Wait until every adopted process has exited; return 1 if a process is still running at the time limit."""
    deadline_s = time.monotonic() + ORPHANS_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        except ChildProcessError:
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(abs(main()))
