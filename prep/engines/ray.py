"""The Ray engine: the one file that knows Ray. Core tasks, or actors for functions that hold a model; a bounded
window of them, kilobytes in and out.

Without an address the command starts an instance of its own on this machine and ends it; with one it joins a
cluster, whose nodes need the same clipmill, the same ffmpeg and the data folder under the same path.
"""

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from itertools import islice
from typing import Any

from manifests.errors import UserError
from prep.engines import MAX_TRIES, TICK_S, Outcome, R, T
from prep.ffmpeg import die_with_parent

_MAX_PENDING_PER_CPU = 2  # enough that no core waits; few enough that a lost driver leaves little behind
_ANSWER_LIMIT_S = 10.0


class RayEngine:
    """Runs tasks as Ray tasks of one CPU each, or in actors, which live on and keep what the function has loaded.

    Args:
        num_workers: CPUs of the private instance, or most tasks at a time on a cluster; None takes all there are.
        address: of an existing cluster (`auto`, or host:port); None starts a private instance.
        actor_gpus: makes it actors, of so many GPUs each (0 for one CPU each); None for plain tasks.
    """

    def __init__(self, *, num_workers: int | None, address: str | None, actor_gpus: float | None = None) -> None:
        self._num_workers, self._address, self._actor_gpus = num_workers, address, actor_gpus

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[Outcome[T, R] | None]:
        """See `prep.engines.Engine`."""
        ray = _import_ray()
        # Ray tells of lost workers on the standard output, which is for results; the last of it while it shuts down.
        with redirect_stdout(sys.stderr):
            self._init(ray)
            try:
                run = self._run if self._actor_gpus is None else self._run_in_actors
                yield from run(ray, function, tasks)
            finally:
                ray.shutdown()

    def _init(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
        if self._address is None:
            # A private instance on this machine needs no token file in the user's home folder.
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            try:
                # Actors with GPUs are as many as the GPUs allow, whatever the number of CPUs.
                num_cpus = None if self._actor_gpus else self._num_workers
                ray.init(address="local", num_cpus=num_cpus, **quiet)
            except OSError as error:  # for one, its sockets take a path of at most 107 bytes
                raise UserError(
                    f"Ray cannot start on this machine: {error}",
                    hint="set RAY_TMPDIR to a writable folder with a short path, or use --engine processes",
                ) from None
            return
        quiet.pop("include_dashboard")
        try:
            _require_answer(self._address)
            ray.init(address=self._address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f'no Ray cluster answers at "{self._address}": {reason}',
                hint="start one with `ray start --head`, or leave --address out to use this machine",
            ) from None

    def _run(self, ray: Any, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[Outcome[T, R] | None]:
        # max_retries covers lost workers and nodes; what the function itself raises is a bug and is not tried again.
        options = {"num_cpus": 1, "max_retries": MAX_TRIES - 1, "retry_exceptions": False}
        remote = ray.remote(_work).options(name=getattr(function, "__name__", "task"), **options)
        waiting, pending = iter(tasks), dict[Any, T]()
        while True:
            for task in islice(waiting, max(0, self._window(ray) - len(pending))):
                pending[remote.remote(function, task)] = task
            if not pending:
                return
            ready, _ = ray.wait(list(pending), timeout=TICK_S)
            if not ready:
                yield None
            for reference in ready:
                yield _outcome(ray, reference, pending.pop(reference))

    def _run_in_actors(
        self, ray: Any, function: Callable[[T], R], tasks: Iterable[T]
    ) -> Iterator[Outcome[T, R] | None]:
        actor = ray.remote(_Actor).options(num_cpus=0 if self._actor_gpus else 1, num_gpus=self._actor_gpus)
        waiting, again = iter(tasks), deque[tuple[T, int]]()
        # An actor gets a task when it has started, never before: its node may have gone, and others have room.
        starting, idle, busy = dict[Any, Any](), list[Any](), dict[Any, tuple[Any, T, int]]()
        while True:
            while idle and (given := again.popleft() if again else _first(waiting)) is not None:
                worker = idle.pop()
                busy[worker.work.remote(given[0])] = worker, *given
            if idle and not busy:
                return
            while not idle and len(starting) + len(busy) < self._num_actors(ray):
                worker = actor.remote(function)
                starting[worker.answer.remote()] = worker
            ready, _ = ray.wait([*starting, *busy], timeout=TICK_S)
            if not ready:
                yield None
            for reference in ready:
                if reference in starting:
                    worker = starting.pop(reference)
                    ray.get(reference)  # what keeps an actor from starting would keep the next one too
                    idle.append(worker)
                    continue
                worker, task, tries = busy.pop(reference)
                outcome = _outcome(ray, reference, task)
                if outcome.lost is None:
                    idle.append(worker)
                elif tries < MAX_TRIES:
                    again.append((task, tries + 1))
                    continue
                yield outcome

    def _num_actors(self, ray: Any) -> int:
        there = ray.cluster_resources()
        if not self._actor_gpus:
            return self._num_workers or max(1, int(there.get("CPU", 1)))
        room = int(there.get("GPU", 0) / self._actor_gpus)
        if not room:
            raise UserError(
                f"Ray finds {there.get('GPU', 0):g} GPUs, a worker needs {self._actor_gpus:g}",
                hint="use --num-gpus 0 for the CPU, or a smaller share such as 0.5",
            )
        return min(room, self._num_workers or room)

    def _window(self, ray: Any) -> int:
        if self._address is not None and self._num_workers is not None:
            return self._num_workers
        return _MAX_PENDING_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))


def _require_answer(address: str) -> None:
    """Raises OSError when nothing listens at `host:port`: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()


class _Actor:
    """A worker that lives until the run ends."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        die_with_parent()
        self._function = function

    def answer(self) -> None:
        """Returns when the actor has started."""

    def work(self, task: Any) -> Any:
        return self._function(task)


def _first(waiting: Iterator[T]) -> tuple[T, int] | None:
    """The next task, for its first try."""
    return next(((task, 1) for task in waiting), None)


def _outcome(ray: Any, reference: Any, task: T) -> Outcome[T, Any]:
    try:
        return Outcome(task, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except ray.exceptions.RayError as error:
        return Outcome(task, None, lost=_first_line(error))


def _work(function: Callable[[T], R], task: T) -> R:
    # A worker whose node has ended, as it does with a killed driver, would go on with its task for a while.
    die_with_parent()
    return function(task)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _import_ray() -> Any:
    # Read when Ray is imported: no usage statistics, no accelerator warnings.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UserError("Ray is not installed", hint="install clipmill[prep], or use --engine processes") from None
    return ray
