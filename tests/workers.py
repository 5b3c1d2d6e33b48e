"""Processes of `multiprocessing`, forked off one that has imported what they need.

The imports of a rank or of a worker cost more than all that it does in a test. There are two such processes: one
without torch, because a fork of one with torch takes a tenth of a second.
"""

import ctypes
import multiprocessing
import os
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from clipmill.prep.engines.admission import Ticket

_CONTEXT = multiprocessing.get_context("forkserver")
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
LIGHT, HEAVY = "light", "heavy"  # without and with torch: the argument of this module as a program
# Columns whose workers compute with torch, or import much else.
_HEAVY_COLUMNS = ("captions", "latents", "text")


class _Server(Protocol):
    """What starts the process that all others are forked off; see `tests.forks.Forks`."""

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        descriptors: tuple[int, int, int],
        limit_s: float,
    ) -> socket.socket: ...


@dataclass
class _Forks:
    """The process that workers are forked off, which starts with the first of them.

    Attributes:
        answer: Connection to the server that started it; None until it is asked for.
        address: Socket on which it takes requests.
        alive: Descriptor that keeps it running.
    """

    kind: str
    answer: socket.socket | None = None
    address: str = ""
    alive: int = -1

    def start(self, server: _Server) -> None:
        if self.answer is not None and not select.select([self.answer], [], [], 0)[0]:
            return  # no word of its end
        resource_tracker.ensure_running()
        self.address = f"\0clipmill-workers-{os.getpid()}-{secrets.token_hex(4)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            alive, self.alive = os.pipe()
            self.answer = server.start(
                __name__,
                [self.kind],
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
                folder=Path.cwd(),
                descriptors=(listener.fileno(), alive, 2),
                limit_s=240,  # the first process imports torch, on a machine that may do much else
            )
            os.close(alive)
        while (character := self.answer.recv(1)) != b"\n":  # its process ID
            if not character:
                raise RuntimeError("the process that workers are forked from did not start")


class _Process(ForkServerProcess):
    """A process that is forked off the one with torch."""

    forked_from = HEAVY
    starting = threading.RLock()  # held from the choice of a process to the fork
    chosen = HEAVY

    def start(self) -> None:
        with _Process.starting:
            _Process.chosen = self.forked_from
            super().start()


class _LightProcess(_Process):
    forked_from = LIGHT


def fork_from(server: _Server) -> None:
    """From now on, fork processes off forks of `server`."""
    forks = {kind: _Forks(kind) for kind in (LIGHT, HEAVY)}
    known: Any = forkserver._forkserver

    def ensure_running() -> None:
        chosen = forks[_Process.chosen]
        chosen.start(server)
        known._forkserver_address, known._forkserver_alive_fd = chosen.address, chosen.alive

    known.ensure_running = ensure_running


def process(
    *, target: Callable[..., object], args: tuple[Any, ...] = (), daemon: bool | None = None, **environment: str
) -> BaseProcess:
    """Return a process, to be started, with the environment that this one has now and `environment`."""
    return _Process(target=_run, args=(target, args, {**os.environ, **environment}), daemon=daemon)


def fsync_at_once(descriptor: int) -> None:
    """`os.fsync` without the disk: a process that tests kill loses nothing that was written; only a machine would."""
    os.fstat(descriptor)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it has ended already
        os._exit(1)


def _run(target: Callable[..., object], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    os.fsync = fsync_at_once  # type: ignore[assignment]
    target(*args)


class ForkedContext:
    """What `clipmill.prep.engines` use of a context of `multiprocessing`."""

    def Pipe(self) -> tuple[Connection, Connection]:
        return _CONTEXT.Pipe()

    def Process(self, *, target: Callable[..., object], args: tuple[Any, ...], daemon: bool = False) -> BaseProcess:
        # A worker of a column is to be admitted to the folder of its variant.
        folders = [argument.token_file.parent for argument in args if isinstance(argument, Ticket)]
        is_heavy = any(folder.parent.name in _HEAVY_COLUMNS for folder in folders)
        kind = _Process if is_heavy else _LightProcess
        return kind(target=_run, args=(target, args, {**os.environ}), daemon=daemon)


def serve() -> None:
    """Be the server of a context of `multiprocessing`: standard input listens, and output ends with who asks."""
    listening, alive = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    forkserver.main(listening, alive, [])  # type: ignore[attr-defined]


if __name__ == "__main__":
    assert sys.argv[1] in (LIGHT, HEAVY)
    serve()
