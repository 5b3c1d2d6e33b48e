"""A fork server that has imported the modules of the commands, and forks for each requested command.

`prep` and `train` spend seconds on importing torch and little time on the data of a case. A command still has its own
process, environment, folder and output, and its workers are forked too. Only imports are not repeated.
"""

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing.util import _exit_function  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = (
    *("prep.cli", "prep.engines.processes", "prep.latents.worker", "prep.latents.vae", "prep.video.worker"),
    *("prep.latents.plan", "prep.text.run", "prep.text.tower", "prep.text.plan"),
    *("prep.video.planning", "prep.video.report", "prep.video.check", "prep.latents.sample", "prep.text.check"),
    *("prep.core.run", "prep.upkeep.garbage", "prep.upkeep.status", "prep.upkeep.texts", "prep.synthetic.make"),
    *("manifests.adapters.folder", "manifests.store"),
    *(
        "train.cli",
        "train.commands.launch",
        "train.engine.loop",
        "train.report.results",
        "torch.distributed.checkpoint",
    ),
    *("diffusers.models.autoencoders.autoencoder_tiny", "open_clip", "torch.utils.flop_counter"),
)


def serve(address: str) -> None:
    """Listen at an abstract Unix socket; a request is a connection with one line of JSON, answered by lines.

    The first line is the command's process ID, the second its exit status, negative for a signal.
    """
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # keeps memory shared with the forks
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen()
    waking, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(waking, selectors.EVENT_READ)
    asking: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is waking:
                waking.recv(4096)
                _answer(asking)
            else:
                connection, _ = listening.accept()
                request = json.loads(connection.makefile().readline())
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for other in (listening, waking, woken, connection, *asking.values()):
                        other.close()
                    selector.close()
                    _become(request)
                asking[pid] = connection
                connection.sendall(f"{pid}\n".encode())


def _answer(asking: dict[int, socket.socket]) -> None:
    for pid in list(asking):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError), asking.pop(pid) as connection:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request: dict[str, Any]) -> NoReturn:
    """Run the command in this fork, and exit."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for path, descriptor in ((os.devnull, 0), (request["stdout"], 1), (request["stderr"], 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        program = importlib.import_module(f"{request['program']}.cli")
        sys.argv = [str(program.__file__), *request["arguments"]]
        sys.modules["__main__"] = program
        processes: Any = importlib.import_module("prep.engines.processes")
        processes._CONTEXT = multiprocessing.get_context("fork")
        if "CLIPMILL_TORTURE_WATCH" in os.environ:
            from tests.torture.interposer.calls import install

            install()
        program.main()
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
    sys.path[0] = str(Path(__file__).parents[2])
    serve(sys.argv[1])
