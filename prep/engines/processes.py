"""The engine without Ray: one process a task on this machine, so that a worker's death costs its own task only."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from prep.engines import MAX_TRIES, TICK_S, Outcome, R, T
from prep.ffmpeg import die_with_parent

# A forked child would inherit the locks of the caller's threads; a spawned one starts clean.
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass
class _Worker:
    process: SpawnProcess
    results: Connection
    task: Any
    tries: int


class ProcessEngine:
    """Runs up to `num_workers` tasks at a time, each in a process of its own."""

    def __init__(self, *, num_workers: int) -> None:
        self._num_workers = num_workers

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[Outcome[T, R] | None]:
        """See `prep.engines.Engine`."""
        waiting, again = iter(tasks), deque[tuple[T, int]]()
        workers: list[_Worker] = []
        try:
            while True:
                while len(workers) < self._num_workers:
                    task, tries = again.popleft() if again else (next(waiting, None), 0)
                    if task is None:
                        break
                    workers.append(_start(function, task, tries=tries + 1))
                if not workers:
                    return
                ready = wait([worker.results for worker in workers], timeout=TICK_S)
                if not ready:
                    yield None
                for worker in [worker for worker in workers if worker.results in ready]:
                    workers.remove(worker)
                    try:
                        error, result = worker.results.recv()
                    except EOFError:
                        worker.process.join()
                        if worker.tries < MAX_TRIES:
                            again.append((worker.task, worker.tries))
                        else:
                            yield Outcome(worker.task, None, lost=_how_it_died(worker.process.exitcode))
                        continue
                    worker.process.join()
                    if error is not None:
                        raise error
                    yield Outcome(worker.task, result)
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join()


def _start(function: Callable[[Any], Any], task: object, *, tries: int) -> _Worker:
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_work, args=(function, task, sending), daemon=True)
    process.start()
    sending.close()  # ours; the end of the child's is how its death is seen
    return _Worker(process, receiving, task, tries)


def _work(function: Callable[[Any], Any], task: object, results: Connection) -> None:
    die_with_parent()
    # Ctrl-C goes to the whole group; the driver decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        results.send((None, function(task)))
    except Exception as error:  # noqa: BLE001 - raised again by the driver
        error.add_note(f"in a worker process, on task {task!r:.500}")
        results.send((error, None))


def _how_it_died(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the worker was killed by signal {-exit_code} {MAX_TRIES} times"
    return f"the worker ended with exit code {exit_code} {MAX_TRIES} times"
