"""The Ray engine; no other file imports Ray. It runs tasks, or actors for functions that keep a model loaded.

The number of tasks in flight is bounded, and only kilobytes are sent and returned for each. Without an address, the
command starts a Ray instance on this machine and stops it at the end. With an address, it joins a cluster, whose nodes
need the same clipmill, the same ffmpeg and the data folder under the same path. Every living node is checked at the
start, and every worker before its first task. The check is sent as source code; until a worker has passed it, function
and task remain unpickled bytes. A node that fails the check is excluded from then on, and its task goes to another
node.
"""

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from typing import Any, NoReturn

from manifests.errors import FailedWork, UserError
from manifests.quoting import counted
from prep.engines import MAX_TRIES, TICK_S, Check, Engine, Outcome, R, Refused, T, admission
from prep.engines.isolated import IsolatedEngine
from prep.engines.ray_nodes import Nodes, first_line

_MAX_PENDING_PER_CPU = 2  # enough to keep every core busy; few enough that a lost driver leaves little behind
_ANSWER_LIMIT_S = 10.0


class RayEngine:
    """Runs tasks as Ray tasks with one CPU each, or in actors, which stay alive and keep what the function has loaded.

    Args:
        num_workers: CPUs of the private instance, or maximum number of concurrent tasks on a cluster; None for all
            CPUs.
        address: address of an existing cluster (`auto`, or host:port); None starts a private instance.
        actor_gpus: GPUs per actor (0 for one CPU per actor); None for plain tasks.
    """

    def __init__(self, *, num_workers: int | None, address: str | None, actor_gpus: float | None = None) -> None:
        self._num_workers, self._address, self._actor_gpus = num_workers, address, actor_gpus

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `prep.engines.Engine`."""
        ray = _import_ray()
        # Ray reports lost workers on standard output, which is reserved for results, even during its shutdown.
        with redirect_stdout(sys.stderr):
            self._init(ray)
            try:
                nodes = Nodes(ray, "GPU" if self._actor_gpus else "CPU")
                work = _Work(ray, function, check)
                if check is not None and self._address is not None:
                    nodes.ask(work.refusal())
                run = self._run if self._actor_gpus is None else self._run_in_actors
                yield from run(ray, nodes, work, iter(tasks))
                yield from nodes.answers(limit_s=_ANSWER_LIMIT_S)
            except (ray.exceptions.RayError, ConnectionError) as error:
                where = "on this machine" if self._address is None else f'at "{self._address}"'
                raise FailedWork(
                    f"lost connection to the Ray cluster {where}: {first_line(error)}; finished work is kept; "
                    "run the same command again to resume"
                ) from None
            finally:
                ray.shutdown()

    def _init(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
        if self._address is None:
            # A private instance on this machine needs no token file in the user's home directory.
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
            try:
                # The number of actors with GPUs is limited by the GPUs, not by the CPUs.
                num_cpus = None if self._actor_gpus else self._num_workers
                ray.init(address="local", num_cpus=num_cpus, **quiet)
            except OSError as error:  # for example, socket paths are limited to 107 bytes
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
                f'cannot connect to a Ray cluster at "{self._address}": {reason}',
                hint="start one with `ray start --head`, or omit --address to start Ray on this machine",
            ) from None

    def _run(
        self, ray: Any, nodes: Nodes, work: "_Work", waiting: Iterator[T]
    ) -> Iterator[Outcome[T, Any] | Refused | None]:
        # max_retries covers lost workers and nodes. An exception raised by the function itself is a bug and is not
        # retried.
        options = {"name": work.name, "num_cpus": 1, "max_retries": MAX_TRIES - 1, "retry_exceptions": False}
        remote = ray.remote(work.as_function())
        retries, pending = deque[T](), dict[Any, T]()
        while True:
            while len(pending) < self._window(ray):
                given = (retries.popleft(),) if retries else next(((task,) for task in waiting), None)
                if given is None:
                    break
                pending[remote.options(**options, **nodes.options()).remote(work.packed(given[0]))] = given[0]
            if not pending:
                return
            ready, _ = ray.wait(list(pending), timeout=TICK_S)
            if not ready:
                nodes.require_one()
                yield None
            yield from nodes.answers()
            for reference in ready:
                task = pending.pop(reference)
                refusal, outcome = _outcome(ray, reference, task)
                if refusal is None:
                    yield outcome
                else:
                    retries.append(task)
                    yield from nodes.refuse(refusal)

    def _run_in_actors(
        self, ray: Any, nodes: Nodes, work: "_Work", waiting: Iterator[T]
    ) -> Iterator[Outcome[T, Any] | Refused | None]:
        actor = ray.remote(work.as_class())
        options = {"num_cpus": 0 if self._actor_gpus else 1, "num_gpus": self._actor_gpus}
        retries = deque[tuple[T, int]]()
        # An actor gets a task only after it has started: its node may have disappeared while other nodes are available.
        starting, idle, busy = dict[Any, Any](), list[Any](), dict[Any, tuple[Any, T, int]]()
        while True:
            while idle and (given := retries.popleft() if retries else _first(waiting)) is not None:
                worker = idle.pop()
                busy[worker.work.remote(work.packed(given[0]))] = worker, *given
            if idle and not busy:
                return
            while not idle and len(starting) + len(busy) < self._num_actors(ray):
                worker = actor.options(**options, **nodes.options()).remote()
                starting[worker.refusal.remote()] = worker
            ready, _ = ray.wait([*starting, *busy], timeout=TICK_S)
            if not ready:
                nodes.require_one()
                yield None
            yield from nodes.answers()
            for reference in ready:
                if reference in starting:
                    worker = starting.pop(reference)
                    # An error that keeps one actor from starting would affect the next one as well.
                    refusal = ray.get(reference)
                    if refusal is None:
                        idle.append(worker)
                    else:
                        yield from nodes.refuse(refusal)
                    continue
                worker, task, tries = busy.pop(reference)
                _, outcome = _outcome(ray, reference, task)
                if outcome.lost is None:
                    idle.append(worker)
                elif tries < MAX_TRIES:
                    retries.append((task, tries + 1))
                    continue
                yield outcome

    def _num_actors(self, ray: Any) -> int:
        resources = ray.cluster_resources()
        if not self._actor_gpus:
            return self._num_workers or max(1, int(resources.get("CPU", 1)))
        max_actors = int(resources.get("GPU", 0) / self._actor_gpus)
        if not max_actors:
            raise UserError(
                f"Ray reports {counted(int(resources.get('GPU', 0)), 'GPU')}, but a worker requires "
                f"{self._actor_gpus:g}",
                hint="give a smaller --num-gpus such as 0.5, or 0 for the CPU",
            )
        return min(max_actors, self._num_workers or max_actors)

    def _window(self, ray: Any) -> int:
        if self._address is not None and self._num_workers is not None:
            return self._num_workers
        return _MAX_PENDING_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))


def _require_answer(address: str) -> None:
    """Raise OSError if nothing listens at `host:port`; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()


def isolated_ray_engine(*, num_workers: int | None, address: str | None, actor_gpus: float | None = None) -> Engine:
    """Return a `RayEngine` in a separate process, since Ray ends its process when it loses the cluster."""
    engine = RayEngine(num_workers=num_workers, address=address, actor_gpus=actor_gpus)
    return IsolatedEngine(
        engine, name="Ray" if address is None else f'the connection to the Ray cluster at "{address}"'
    )


class _Work:
    """The function and its check, in forms that need no clipmill on the node: Ray sends nested functions by value."""

    def __init__(self, ray: Any, function: Callable[[Any], Any], check: Check | None) -> None:
        ray.cloudpickle.register_pickle_by_value(admission)
        self._dumps, self._function, self._check = ray.cloudpickle.dumps, function, check
        self.name = getattr(function, "__name__", "task")

    def packed(self, task: Any) -> bytes:
        """Serialise a call of the function."""
        return bytes(self._dumps((self._function, task)))

    def as_function(self) -> Callable[[bytes], Any]:
        """Return a function that runs a serialised call.

        It returns (None, result) or, if the worker was refused, ((node id, reason), None).
        """
        refusal, passed = self.refusal(), list[bool]()  # a worker loads the function once and keeps this list

        def work(packed: bytes) -> Any:
            if not passed and (refused := refusal()) is not None:
                return refused, None
            passed.append(True)
            import ray

            from prep.engines import die_with_parent

            # A worker whose node has exited, as happens when a driver is killed, would otherwise continue its task for
            # a while.
            die_with_parent()
            function, task = ray.cloudpickle.loads(packed)
            return None, function(task)

        return work

    def as_class(self) -> type:
        """Return an actor class that runs serialised calls; its `refusal` must be called first."""
        refusal_here = self.refusal()

        class _Actor:
            def refusal(self) -> tuple[str, str] | None:
                """Return (node id, reason) if the actor must not work, otherwise None.

                The call returns once the actor has started.
                """
                return refusal_here()

            def work(self, packed: bytes) -> Any:
                import ray

                from prep.engines import die_with_parent

                die_with_parent()
                function, task = ray.cloudpickle.loads(packed)
                return None, function(task)

        return _Actor

    def refusal(self) -> Callable[[], tuple[str, str] | None]:
        """Return a function that checks a worker and returns (node id, reason) if it must not work, otherwise None."""
        check = self._check

        def refusal() -> tuple[str, str] | None:
            reason = check() if check is not None else None
            if reason is None:
                return None
            import ray

            return ray.get_runtime_context().get_node_id(), reason

        return refusal


def _first(waiting: Iterator[T]) -> tuple[T, int] | None:
    """Return the next task with its attempt number, 1."""
    return next(((task, 1) for task in waiting), None)


def _outcome(ray: Any, reference: Any, task: T) -> tuple[tuple[str, str] | None, Outcome[T, Any]]:
    """Return the refusal of a call's worker, or the outcome of the call."""
    try:
        refusal, result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        _raise_cause(error)
    except ray.exceptions.RayError as error:
        return None, Outcome(task, None, lost=first_line(error))
    return refusal, Outcome(task, result)


def _raise_cause(error: Any) -> NoReturn:
    """Raise the exception that the function itself raised, with its traceback."""
    cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(first_line(error))
    cause.add_note(str(error))
    raise cause from None


def _import_ray() -> Any:
    # Read when Ray is imported: disable usage statistics and accelerator warnings.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UserError("Ray is not installed", hint="install clipmill[prep], or use --engine processes") from None
    return ray
