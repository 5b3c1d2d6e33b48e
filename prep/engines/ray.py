"""The Ray engine: the one file that knows Ray. Core tasks, or actors for functions that hold a model; a bounded
window of them, kilobytes in and out.

Without an address the command starts an instance of its own on this machine and ends it; with one it joins a
cluster, whose nodes need the same clipmill, the same ffmpeg and the data folder under the same path. Each node that is
there is asked at once, and each worker before its first task. They get the check as source; function and tasks are
bytes to them until they have passed. A node that has not is left out from then on, and its task goes to another one.
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
from prep.engines import MAX_TRIES, TICK_S, Check, Engine, Outcome, R, Refused, T, admission
from prep.engines.apart import Apart
from prep.engines.ray_nodes import Nodes, first_line

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

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `prep.engines.Engine`."""
        ray = _import_ray()
        # Ray tells of lost workers on the standard output, which is for results; the last of it while it shuts down.
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
                    f"the Ray cluster {where} was lost: {first_line(error)}; what was finished is kept, "
                    "run the same command again to go on"
                ) from None
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

    def _run(
        self, ray: Any, nodes: Nodes, work: "_Work", waiting: Iterator[T]
    ) -> Iterator[Outcome[T, Any] | Refused | None]:
        # max_retries covers lost workers and nodes; what the function itself raises is a bug and is not tried again.
        options = {"name": work.name, "num_cpus": 1, "max_retries": MAX_TRIES - 1, "retry_exceptions": False}
        remote = ray.remote(work.as_function())
        again, pending = deque[T](), dict[Any, T]()
        while True:
            while len(pending) < self._window(ray):
                given = (again.popleft(),) if again else next(((task,) for task in waiting), None)
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
                    again.append(task)
                    yield from nodes.refuse(refusal)

    def _run_in_actors(
        self, ray: Any, nodes: Nodes, work: "_Work", waiting: Iterator[T]
    ) -> Iterator[Outcome[T, Any] | Refused | None]:
        actor = ray.remote(work.as_class())
        options = {"num_cpus": 0 if self._actor_gpus else 1, "num_gpus": self._actor_gpus}
        again = deque[tuple[T, int]]()
        # An actor gets a task when it has started, never before: its node may have gone, and others have room.
        starting, idle, busy = dict[Any, Any](), list[Any](), dict[Any, tuple[Any, T, int]]()
        while True:
            while idle and (given := again.popleft() if again else _first(waiting)) is not None:
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
                    # What keeps an actor from starting would keep the next one too.
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


def ray_apart(*, num_workers: int | None, address: str | None, actor_gpus: float | None = None) -> Engine:
    """A `RayEngine` in a process of its own, which is the one that Ray ends when it loses its cluster."""
    engine = RayEngine(num_workers=num_workers, address=address, actor_gpus=actor_gpus)
    return Apart(engine, name="Ray" if address is None else f'the connection to the Ray cluster at "{address}"')


class _Work:
    """The function and its check, in forms that need no clipmill on the node: nested, Ray sends them as source."""

    def __init__(self, ray: Any, function: Callable[[Any], Any], check: Check | None) -> None:
        ray.cloudpickle.register_pickle_by_value(admission)
        self._dumps, self._function, self._check = ray.cloudpickle.dumps, function, check
        self.name = getattr(function, "__name__", "task")

    def packed(self, task: Any) -> bytes:
        """A call of the function."""
        return bytes(self._dumps((self._function, task)))

    def as_function(self) -> Callable[[bytes], Any]:
        """A function of a packed call. It returns (None, result), or (node's id, why not) and None."""
        refusal, passed = self.refusal(), list[bool]()  # a worker loads the function once and keeps the list

        def work(packed: bytes) -> Any:
            if not passed and (refused := refusal()) is not None:
                return refused, None
            passed.append(True)
            import ray

            from prep.engines import die_with_parent

            # A worker whose node has ended, as it does with a killed driver, would go on with its task for a while.
            die_with_parent()
            function, task = ray.cloudpickle.loads(packed)
            return None, function(task)

        return work

    def as_class(self) -> type:
        """The class of an actor for packed calls; its `refusal` is asked first."""
        refusal_here = self.refusal()

        class _Actor:
            def refusal(self) -> tuple[str, str] | None:
                """(node's id, why not), or None; answers when the actor has started."""
                return refusal_here()

            def work(self, packed: bytes) -> Any:
                import ray

                from prep.engines import die_with_parent

                die_with_parent()
                function, task = ray.cloudpickle.loads(packed)
                return None, function(task)

        return _Actor

    def refusal(self) -> Callable[[], tuple[str, str] | None]:
        """A function that says of a worker (its node's id, why it must not work), or None."""
        check = self._check

        def refusal() -> tuple[str, str] | None:
            reason = check() if check is not None else None
            if reason is None:
                return None
            import ray

            return ray.get_runtime_context().get_node_id(), reason

        return refusal


def _first(waiting: Iterator[T]) -> tuple[T, int] | None:
    """The next task, for its first try."""
    return next(((task, 1) for task in waiting), None)


def _outcome(ray: Any, reference: Any, task: T) -> tuple[tuple[str, str] | None, Outcome[T, Any]]:
    """How a call ended: the refusal of its worker, or its outcome."""
    try:
        refusal, result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        _raise_cause(error)
    except ray.exceptions.RayError as error:
        return None, Outcome(task, None, lost=first_line(error))
    return refusal, Outcome(task, result)


def _raise_cause(error: Any) -> NoReturn:
    """Raises what the function itself raised, with the place where."""
    cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(first_line(error))
    cause.add_note(str(error))
    raise cause from None


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
