"""Engine without Ray: run tasks in worker processes on this machine.

A worker has one task at a time, so the death of a worker affects only one task. Workers are reused, because a new
process for each task would import everything again.
"""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

from clipmill.prep.engines import (
    CRASH_SIGNALS,
    MAX_TRIES,
    TICK_S,
    Check,
    Outcome,
    R,
    RefusedNode,
    T,
    die_with_driver,
    exit_reason,
    no_nodes_error,
)

# A forked child would inherit the locks that the caller's threads hold; a spawned child does not.
_CONTEXT = multiprocessing.get_context("spawn")
_EXIT_LIMIT_S = 10.0  # time limit for an idle worker to exit


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    task: Any = None
    num_tries: int = 0

    def send(self, task: object, *, num_tries: int) -> None:
        self.task, self.num_tries = task, num_tries
        # If the worker died while it was idle, the run detects the closed pipe when it reads the result.
        with suppress(BrokenPipeError):
            self.pipe.send(task)


class ProcessEngine:
    """Engine that runs up to `num_workers` tasks at a time, each in a separate process.

    Args:
        gpus: CUDA indices of the GPUs; each worker sees one GPU. If empty, workers see the same GPUs as the driver.
    """

    def __init__(self, *, num_workers: int, gpus: Sequence[str] = ()) -> None:
        self._num_workers, self._gpus = num_workers, gpus
        self._num_started = 0

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
    ) -> Iterator[Outcome[T, R] | RefusedNode | None]:
        """See `clipmill.prep.engines.Engine`."""
        new_tasks, retries = iter(tasks), deque[tuple[T, int]]()
        busy_workers: list[_Worker] = []
        idle_workers: list[_Worker] = []
        try:
            while True:
                while len(busy_workers) < self._num_workers:
                    task, num_tries = retries.popleft() if retries else (next(new_tasks, None), 0)
                    if task is None:
                        break
                    busy_workers.append(idle_workers.pop() if idle_workers else self._start(function, check))
                    busy_workers[-1].send(task, num_tries=num_tries + 1)
                if not busy_workers:
                    return
                ready_pipes = wait([worker.pipe for worker in busy_workers], timeout=TICK_S)
                if not ready_pipes:
                    yield None
                for worker in [worker for worker in busy_workers if worker.pipe in ready_pipes]:
                    try:
                        error, result = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        busy_workers.remove(worker)
                        worker.process.join()
                        if worker.num_tries < MAX_TRIES:
                            retries.append((worker.task, worker.num_tries))
                        else:
                            code = worker.process.exitcode
                            reason = f"its worker ended {MAX_TRIES} times, most recently with {exit_reason(code)}"
                            yield Outcome(worker.task, None, reason, crashed=-(code or 0) in CRASH_SIGNALS)
                        continue
                    if error is not None:
                        raise error
                    busy_workers.remove(worker)
                    idle_workers.append(worker)
                    yield Outcome(worker.task, result)
        finally:
            for worker in busy_workers:
                worker.process.kill()
            # Let idle workers exit normally, so that the libraries they have imported remove their temporary files.
            for worker in idle_workers:
                worker.send(None, num_tries=0)
            for worker in (*busy_workers, *idle_workers):
                worker.process.join(_EXIT_LIMIT_S)
                worker.process.kill()
                worker.process.join()

    def _start(self, function: Callable[[Any], Any], check: Check | None) -> _Worker:
        gpu = self._gpus[self._num_started % len(self._gpus)] if self._gpus else None
        self._num_started += 1
        driver_pipe, worker_pipe = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_work, args=(function, check, worker_pipe, gpu), daemon=True)
        # Hide the main module. Otherwise, `multiprocessing` would import the command-line program in the new process.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        worker_pipe.close()  # so that the pipe is closed when the worker ends
        return _Worker(process, driver_pipe)


def _work(function: Callable[[Any], Any], check: Check | None, pipe: Connection, gpu: str | None) -> None:
    die_with_driver()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # torch reads the variable later, when it first uses a GPU
    # Ctrl-C reaches all processes of the group, but the driver decides what happens to its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reason = check() if check is not None else None
    if reason is not None:  # this engine has no other node
        pipe.send((no_nodes_error([RefusedNode("this machine", reason)]), None))
        return
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionResetError):  # the driver has exited
            return
        if task is None:
            return
        try:
            pipe.send((None, function(task)))
        except Exception as error:  # noqa: BLE001 - the driver raises it
            error.add_note(f"raised in a worker process by task {task!r:.500}")
            with suppress(BrokenPipeError):  # the driver has exited
                pipe.send((error, None))
