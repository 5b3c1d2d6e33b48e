"""The process that `tests.forks` starts, which has imported the modules of the commands and forks for each of them.

It is two processes: one without torch, which takes the requests, and one with it, which the first hands on to.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.util import _exit_function  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

from tests.environment import leave_wandb_out_of_timm
from tests.workers import LIGHT, end_with_parent, fsync_at_once

ROOT = Path(__file__).parent.parent
# Of `prep`: a hundred megabytes.
_LIGHT = (
    *(
        "clipmill.prep.cli",
        "clipmill.prep.engines.processes",
        "clipmill.prep.latents.worker",
        "clipmill.prep.latents.vae",
        "clipmill.prep.video.worker",
    ),
    *(
        "clipmill.prep.latents.run",
        "clipmill.prep.latents.run",
        "clipmill.prep.text.work",
        "clipmill.prep.text.tower",
        "clipmill.prep.text.plan",
    ),
    *(
        "clipmill.prep.video.plan_inputs",
        "clipmill.prep.video.plan_report",
        "clipmill.prep.video.inspection",
        "clipmill.prep.latents.worker",
        "clipmill.prep.text.captions",
    ),
    *(
        "clipmill.prep.core.run",
        "clipmill.prep.upkeep.garbage",
        "clipmill.prep.upkeep.status",
        "clipmill.prep.synthetic",
    ),
    *("clipmill.manifests.adapters.folder", "clipmill.manifests.store"),
    *("clipmill.prep.video.work", "clipmill.prep.video.page.write", "clipmill.prep.engines.ray"),
    *(
        "clipmill.prep.core.chunk_column",
        "clipmill.prep.scores.score",
        "clipmill.prep.scores.work",
        "clipmill.prep.scores.page",
    ),
    *("clipmill.prep.latents.work", "clipmill.prep.text.work", "clipmill.prep.text.t5", "clipmill.prep.captions.work"),
    *("clipmill.manifests.write", "clipmill.manifests.adapters.reading", "scenedetect"),
    *(
        f"clipmill.prep.commands.{name}"
        for name in ("columns", "export", "manifest", "manifest_text", "retry", "upkeep")
    ),
    "clipmill.prep.sources.probe",
    *("cyclopts.config", "pyarrow.dataset", "pyarrow.json"),
)
# Of all others, with torch: a gigabyte, whose page tables cost a tenth of a second to copy and to free.
_HEAVY = (
    # Of the processes of `tests.workers`. `torch._dynamo` is what a first step imports by itself.
    *("tests.train.distributed.runs", "tests.train.distributed.stage_runs", "tests.train.killed", "torch._dynamo"),
    *("tests.train.losses.runs", "tests.train.optim.sharded_steps"),
    *(f"clipmill.train.tasks.{task}.task" for task in ("caption", "classify", "dual_encoder", "mae")),
    *(f"clipmill.train.tasks.{task}.evaluation" for task in ("caption", "classify", "dual_encoder", "mae")),
    *(
        "clipmill.train.cli",
        "clipmill.train.commands.launch",
        "clipmill.train.engine.loop",
        "clipmill.train.report.results",
    ),
    *(
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "torch.distributed.run",
        "torch.utils.flop_counter",
    ),
    # Of workers that ask a server for captions: its client takes a second to import.
    *("clipmill.prep.captions.worker", "openai.resources.chat", "aiohttp"),
    *("diffusers.models.autoencoders.autoencoder_tiny", "open_clip"),
)


class Server:
    """Forks for each request.

    A request is a connection with a byte that carries three descriptors, and a line of JSON. It is answered by a line
    with the command's process ID, and one with its exit status, negative for a signal. A command whose connection is
    closed is killed. A connection that carries none keeps the server, which ends with the last of them.

    Args:
        listening: where connections come from, or those that were handed on.
        heavy: where requests that need torch are handed on to; None where they are served.
    """

    def __init__(self, listening: socket.socket, heavy: socket.socket | None) -> None:
        self._listening, self._heavy = listening, heavy
        self._selector = selectors.DefaultSelector()
        self._asking: dict[int, socket.socket] = {}
        self._keepers: set[socket.socket] = set()
        self._waking, self._woken = socket.socketpair()
        self._woken.setblocking(False)

    def serve(self) -> NoReturn:
        """Answer until there is nobody to keep it."""
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._waking, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waking:
                    self._waking.recv(4096)
                    self._answer()
                elif key.fileobj is self._listening:
                    (self._take_over if self._heavy is None else self._accept)()
                elif key.fileobj in self._keepers:
                    self._selector.unregister(key.fileobj)
                    self._keepers = {other for other in self._keepers if other is not key.fileobj}
                    if not self._keepers:
                        self._end()
                else:
                    self._selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        if not descriptors:
            self._keepers.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            return
        line = connection.makefile("rb").readline()
        request = json.loads(line)
        if _is_light(request):
            self._fork(connection, descriptors, request)
        else:
            assert self._heavy is not None
            socket.send_fds(self._heavy, [line], [connection.fileno(), *descriptors])
            connection.close()
            _close(descriptors)

    def _take_over(self) -> None:
        line, descriptors, _, _ = socket.recv_fds(self._listening, 1 << 20, 4)
        if not line:  # the other process has ended
            self._end()
        self._fork(socket.socket(fileno=descriptors.pop(0)), descriptors, json.loads(line))

    def _fork(self, connection: socket.socket, descriptors: list[int], request: dict[str, Any]) -> None:
        if pid := os.fork():
            self._asking[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, pid)
            connection.sendall(f"{pid}\n".encode())
            _close(descriptors)
            return
        signal.set_wakeup_fd(-1)
        sockets = (self._listening, self._heavy, self._waking, self._woken, connection)
        for other in (*sockets, *self._keepers, *self._asking.values()):
            if other is not None:
                other.close()
        self._selector.close()
        _become(request, descriptors)

    def _answer(self) -> None:
        for pid in list(self._asking):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._asking[pid])
                with contextlib.suppress(OSError), self._asking.pop(pid) as connection:
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _end(self) -> NoReturn:
        """Kill what was forked, and what that has started: ranks of a test that was killed would train for ever."""
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def servers(address: str) -> Server:
    """Import everything, and go on as two processes of their own when there is an abstract Unix socket."""
    gc.disable()
    leave_wandb_out_of_timm()
    _import(_LIGHT)
    _hash_sources()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen()
    if os.fork():
        os._exit(0)  # tells who started it that it listens
    os.setsid()
    handed_on, heavy = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    is_light = bool(os.fork())
    (handed_on if is_light else heavy).close()
    if not is_light:
        listening.close()
        if not handed_on.recv(1, socket.MSG_PEEK):  # nobody has asked for torch
            os._exit(0)
        _import(_HEAVY)
        importlib.import_module("tests.small_tiny").shrink()
        importlib.import_module("tests.torch_work").omit_torch_work()
        logging.disable(logging.DEBUG)  # torch writes hundreds of records for each checkpoint
    _forget_ends_of_imports()
    gc.freeze()  # keeps memory shared with the forks
    gc.enable()
    return Server(listening, heavy) if is_light else Server(handed_on, None)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    below, todo = list[int](), [process]
    while todo:
        more = children.get(todo.pop(), [])
        below += more
        todo += more
    return below


def _import(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _forget_ends_of_imports() -> None:
    """Leave out what imports have left to the end of a process: torch takes its 225 libraries of operators apart."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Of what a command itself opens.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def _hash_sources() -> None:
    """Compute here what each command and each of its workers would compute: the hash of the packages."""
    admission: Any = importlib.import_module("clipmill.prep.engines.admission")
    parts: Any = importlib.import_module("clipmill.prep.core.parts")
    admission.source_sha256 = parts.source_sha256 = importlib.import_module("tests.hashes").hash_once
    admission.source_sha256("clipmill.prep")


def _is_light(request: Mapping[str, Any]) -> bool:
    module, first = request["module"], request["arguments"][:1]
    if module == "tests.workers":
        return bool(first == [LIGHT])
    return module == "clipmill.prep.cli" and first not in (["captions"], ["latents"], ["text"])


def _drop_rights_to_read() -> None:
    """Read as others than root do: without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, here and in what is executed."""
    library, drop_from_bounding_set = ctypes.CDLL(None), 24
    for number in (1, 2):
        library.prctl(drop_from_bounding_set, number, 0, 0, 0)
    version_3, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    library.capget(version_3, sets)
    for word in range(3):  # effective, permitted and inheritable
        sets[word] &= ~0b110
    library.capset(version_3, sets)


def _become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the module in this fork, and exit."""
    code = 1
    try:
        end_with_parent()
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
        processes: Any = importlib.import_module("clipmill.prep.engines.processes")
        if "AWS_ENDPOINT_URL" not in os.environ:  # object storage does not survive a fork: those workers are spawned
            processes._CONTEXT = multiprocessing.get_context("fork")
        os.fsync = fsync_at_once  # type: ignore[assignment]
        if "CLIPMILL_READS_AS_OTHERS" in os.environ:
            _drop_rights_to_read()
        if "CLIPMILL_TORTURE_WATCH" in os.environ:
            from tests.torture.interposer.calls import install

            install()
        if "CLIPMILL_SHORT_LEASES" in os.environ:
            importlib.import_module("tests.torture.short_leases.sitecustomize").shorten()
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
    servers(sys.argv[1]).serve()
