"""A fork server that has imported the modules of the commands, and forks for each `python -m MODULE` asked of it.

`prep`, `train` and the benchmarks spend seconds on importing torch and little time on the data of a test. A command
still has its own process, session, environment, folder and output, and its workers are forked too. Only imports are not
repeated.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_STARTING_S = 280.0  # on a machine that does much else; pytest gives a test 300
# The program that `Forks.python` writes. It hands over its descriptors, and ends as the command does.
_LAUNCHER = """#!{python} -IS
import array, json, os, signal, socket, sys

words = sys.argv[1:]
while words[:1] in (["-u"], ["-P"]):
    del words[0]
if words[:1] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect("\\0{address}")
    request = {{"module": words[1], "arguments": words[2:]}}
    request |= {{"environment": dict(os.environ), "folder": os.getcwd()}}
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([b"-"], rights)
    lines = server.makefile("rw")
    print(json.dumps(request), file=lines, flush=True)
    pid = int(lines.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(lines.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


class Forks:
    """The server, which starts with the first request and ends when all that asked for it are closed, or have ended.

    Args:
        folder: for its log and `python`.
        address: of a server that may be another process's, which has the same `folder`; of its own by default.
    """

    def __init__(self, folder: Path, *, address: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = folder, threading.Lock()
        self.address = address or f"clipmill-forks-{os.getpid()}-{id(self)}"
        self._keeper: socket.socket | None = None

    def python(self) -> Path:
        """Return a Python interpreter whose `-m MODULE` is forked; for other arguments it is the real one."""
        path = self.folder / f"python-{os.getpid()}"
        if not path.exists():
            self._keep()
            path.write_text(_LAUNCHER.format(python=sys.executable, address=self.address))
            path.chmod(0o755)
        return path

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        descriptors: tuple[int, int, int],
        limit_s: float,
    ) -> socket.socket:
        """Start a module as a program; return a connection with a line of its process ID, and one of its exit status.

        Args:
            descriptors: standard input, output and errors.
            limit_s: how long to wait for a line.
        """
        self._keep()
        connection = self._connected()
        connection.settimeout(limit_s)
        request = {"module": module, "arguments": arguments, "environment": {**environment}, "folder": str(folder)}
        socket.send_fds(connection, [b"-"], descriptors)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def _keep(self) -> None:
        """Connect once, so that the server goes on; start it if there is none."""
        with self._lock, (self.folder / "lock").open("w") as file:
            if self._keeper is not None:
                return
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self._keeper = self._connected()
            except ConnectionRefusedError:
                self._start()
                self._keeper = self._connected()
            self._keeper.sendall(b"+")

    def _start(self) -> None:
        # Without the marks by which a test finds its own processes, and ends them.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CLIPMILL_")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        words = [sys.executable, "-m", "tests.fork_server", self.address]
        log = self.folder / "forks.log"
        with log.open("wb") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            done = subprocess.run(words, cwd=ROOT, env=environment, timeout=_STARTING_S, **streams)
        if done.returncode:
            end = log.read_text("utf-8", "replace")
            raise RuntimeError(f"the process that commands are forked from did not start\n{end}")

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{self.address}")
        except ConnectionRefusedError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Let the server end."""
        if self._keeper is not None:
            self._keeper.close()
