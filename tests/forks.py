"""A fork server that has imported the modules of the commands, and forks for each `python -m MODULE` asked of it.

`prep`, `train` and the benchmarks spend seconds on importing torch and little time on the data of a test. A command
still has its own process, session, environment, folder and output, and its workers are forked too. Only imports are not
repeated.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.util import _exit_function  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

from tests.workers import fsync_at_once

ROOT = Path(__file__).parent.parent
_STARTING_S = 280.0  # on a machine that does much else; pytest gives a test 300
_IMPORTED = (
    *("prep.cli", "prep.engines.processes", "prep.latents.worker", "prep.latents.vae", "prep.video.worker"),
    *("prep.latents.plan", "prep.text.run", "prep.text.tower", "prep.text.plan"),
    *("prep.video.planning", "prep.video.report", "prep.video.check", "prep.latents.sample", "prep.text.check"),
    *("prep.core.run", "prep.upkeep.garbage", "prep.upkeep.status", "prep.upkeep.texts", "prep.synthetic.make"),
    *("manifests.adapters.folder", "manifests.store"),
    # Of the processes of `tests.workers`. `torch._dynamo` is what a first step imports by itself.
    *("tests.train.distributed.runs", "tests.train.distributed.stage_runs", "tests.train.killed", "torch._dynamo"),
    *("tests.train.losses.runs", "tests.train.optim.sharded_steps", "train.tasks.mae.evaluation"),
    *(
        "train.cli",
        "train.commands.launch",
        "train.engine.loop",
        "train.report.results",
        "torch.distributed.checkpoint",
    ),
    *("diffusers.models.autoencoders.autoencoder_tiny", "open_clip", "torch.utils.flop_counter"),
)
# Packages of the checkout. A command that has another checkout on its PYTHONPATH imports them from there.
_OWN = ("benchmarks", "manifests", "prep", "scripts", "shards", "tests", "train")
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
    request = {{"module": words[1], "arguments": words[2:], "is_of_other_checkout": {is_of_other_checkout}}}
    request |= {{"environment": dict(os.environ), "folder": os.getcwd(), "python": sys.argv[0]}}
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
        self._folder, self._lock = folder, threading.Lock()
        self._address = address or f"clipmill-forks-{os.getpid()}-{id(self)}"
        self._keeper: socket.socket | None = None

    def python(self, *, is_of_other_checkout: bool = False) -> Path:
        """Return a Python interpreter whose `-m MODULE` is forked; for other arguments it is the real one.

        Args:
            is_of_other_checkout: import this project from PYTHONPATH, in processes of the program too; only what it
                stands on is there already.
        """
        path = self._folder / f"python-{os.getpid()}{'-of-other-checkout' * is_of_other_checkout}"
        if not path.exists():
            self._keep()
            program = _LAUNCHER.format(
                python=sys.executable, address=self._address, is_of_other_checkout=is_of_other_checkout
            )
            path.write_text(program)
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
        with self._lock, (self._folder / "lock").open("w") as file:
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
        environment = {**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}
        words = [sys.executable, "-m", "tests.forks", self._address]
        log = self._folder / "forks.log"
        with log.open("wb") as file:
            said: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            done = subprocess.run(words, cwd=ROOT, env=environment, timeout=_STARTING_S, **said)
        if done.returncode:
            end = log.read_text("utf-8", "replace")
            raise RuntimeError(f"the process that commands are forked from did not start\n{end}")

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{self._address}")
        except ConnectionRefusedError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Let the server end."""
        if self._keeper is not None:
            self._keeper.close()


def serve(address: str) -> None:
    """Listen at an abstract Unix socket.

    A request is a connection with a byte that carries three descriptors, and a line of JSON. It is answered by a line
    with the command's process ID, and one with its exit status, negative for a signal. A command whose connection is
    closed is killed. A connection that carries none keeps the server, which ends with the last of them.
    """
    listening = _listening(address)
    waking, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(waking, selectors.EVENT_READ)
    asking: dict[int, socket.socket] = {}
    keepers: set[socket.socket] = set()
    while True:
        for key, _ in selector.select():
            if key.fileobj is waking:
                waking.recv(4096)
                _answer(asking, selector)
            elif key.fileobj is listening:
                connection, _ = listening.accept()
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
                if not descriptors:
                    keepers.add(connection)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                line = connection.makefile().readline()
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for other in (listening, waking, woken, connection, *keepers, *asking.values()):
                        other.close()
                    selector.close()
                    _become(json.loads(line), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                asking[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
                connection.sendall(f"{pid}\n".encode())
            elif key.fileobj in keepers:
                selector.unregister(key.fileobj)
                keepers = {other for other in keepers if other is not key.fileobj}
                if not keepers:
                    for pid in asking:
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
            else:
                selector.unregister(key.fileobj)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)


def _listening(address: str) -> socket.socket:
    """Import everything, and go on as a process of its own when the socket is there."""
    gc.disable()
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # keeps memory shared with the forks
    gc.enable()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen()
    if os.fork():
        os._exit(0)  # tells who started it that it listens
    os.setsid()
    return listening


def _answer(asking: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    for pid in list(asking):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(KeyError):
                selector.unregister(asking[pid])
            with contextlib.suppress(OSError), asking.pop(pid) as connection:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the module in this fork, and exit."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
        tempfile.tempdir = None
        if request.get("is_of_other_checkout"):
            for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
                del sys.modules[name]
            sys.path[:] = [path for path in sys.path if path != str(ROOT)]
            sys.path[:0] = request["environment"]["PYTHONPATH"].split(os.pathsep)
            sys.path_importer_cache.clear()
            sys.executable = request["python"]
        processes: Any = importlib.import_module("prep.engines.processes")
        processes._CONTEXT = multiprocessing.get_context("fork")
        os.fsync = fsync_at_once  # type: ignore[assignment]
        if "CLIPMILL_TORTURE_WATCH" in os.environ:
            from tests.torture.interposer.calls import install

            install()
        sys.argv = [request["module"], *request["arguments"]]
        sys.modules.pop(request["module"], None)  # it becomes __main__, as in an interpreter of its own
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        traceback.print_exc()
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        _exit_function()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(sys.argv[1])
