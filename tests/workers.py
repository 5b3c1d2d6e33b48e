"""Processes of `multiprocessing`, forked off one that has imported what they need.

The imports of a rank or of a worker cost more than all that it does in a test.
"""

import multiprocessing
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

_CONTEXT = multiprocessing.get_context("forkserver")


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


def fork_from(server: _Server) -> None:
    """From now on, fork processes off a fork of `server`."""
    started: list[socket.socket] = []
    lock = threading.Lock()

    def ensure_running() -> None:
        with lock:
            if started and not select.select(started, [], [], 0)[0]:
                return  # no word of its end
            started.clear()
            resource_tracker.ensure_running()
            address = f"\0clipmill-workers-{os.getpid()}-{secrets.token_hex(4)}"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                alive, known._forkserver_alive_fd = os.pipe()
                answer = server.start(
                    __name__,
                    [],
                    environment={**os.environ, "OMP_NUM_THREADS": "1"},
                    folder=Path.cwd(),
                    descriptors=(listener.fileno(), alive, 2),
                    limit_s=240,  # the first process imports torch, on a machine that may do much else
                )
                os.close(alive)
            while (character := answer.recv(1)) != b"\n":  # its process ID
                if not character:
                    raise RuntimeError("the process that workers are forked from did not start")
            started.append(answer)
            known._forkserver_address = address

    known: Any = forkserver._forkserver
    known.ensure_running = ensure_running


def process(
    *, target: Callable[..., object], args: tuple[Any, ...] = (), daemon: bool | None = None, **environment: str
) -> BaseProcess:
    """Return a process, to be started, with the environment that this one has now and `environment`."""
    return _CONTEXT.Process(target=_run, args=(target, args, {**os.environ, **environment}), daemon=daemon)


def fsync_at_once(descriptor: int) -> None:
    """`os.fsync` without the disk: a process that tests kill loses nothing that was written; only a machine would."""
    os.fstat(descriptor)


def _run(target: Callable[..., object], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.fsync = fsync_at_once  # type: ignore[assignment]
    target(*args)


class ForkedContext:
    """What `clipmill.prep.engines` use of a context of `multiprocessing`."""

    def Pipe(self) -> tuple[Connection, Connection]:
        return _CONTEXT.Pipe()

    def Process(self, *, target: Callable[..., object], args: tuple[Any, ...], daemon: bool = False) -> BaseProcess:
        return process(target=target, args=args, daemon=daemon)


def serve() -> None:
    """Be the server of a context of `multiprocessing`: standard input listens, and output ends with who asks."""
    listening, alive = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    forkserver.main(listening, alive, [])  # type: ignore[attr-defined]


if __name__ == "__main__":
    serve()
