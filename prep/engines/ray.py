"""The Ray engine; no other file imports Ray. It runs tasks, or actors for functions that keep a model loaded.

The number of tasks in flight is bounded, and only kilobytes are sent and returned for each. Without an address, the
command starts a Ray instance on this machine and stops it at the end. With an address, it joins a cluster, whose nodes
need the same clipmill, the same ffmpeg and the data folder under the same path. Every living node is checked at the
start, and every worker before its first task. The check is sent as source code; until a worker has passed it, function
and task remain unpickled bytes. A node that fails the check is excluded from then on, and its task goes to another
node.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from math import ceil
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.manifests.progress import Activity
from clipmill.prep.engines import Check, Engine, Label, Outcome, R, Refused, T
from clipmill.prep.engines.execution import Execution, Need
from clipmill.prep.engines.isolated import IsolatedEngine, call_isolated
from clipmill.prep.engines.ray_actors import ActorRun
from clipmill.prep.engines.ray_connection import connect, name_of_cluster, starting_text
from clipmill.prep.engines.ray_flights import Session
from clipmill.prep.engines.ray_nodes import Nodes, Notify
from clipmill.prep.engines.ray_tasks import TaskRun
from clipmill.prep.engines.ray_work import Board, Work

_MAX_PENDING_PER_WORKER = 2  # enough to keep every core busy; few enough that a lost driver leaves little behind
_ANSWER_LIMIT_S = 10.0


class RayEngine:
    """Runs tasks as Ray tasks, or in actors, which stay alive and keep what the function has loaded.

    Args:
        num_workers: CPUs of the private instance, or maximum number of concurrent tasks on a cluster; None for all
            that fit.
        address: address of an existing cluster (`auto`, or host:port); None starts a private instance.
        actor_gpus: GPUs per actor (0 for none); None for plain tasks.
        need: what a worker takes; by default one CPU, or the GPUs of an actor.
    """

    def __init__(
        self,
        *,
        num_workers: int | None,
        address: str | None,
        actor_gpus: float | None = None,
        need: Need | None = None,
        execution: Execution = Execution(),  # noqa: B008 - frozen
    ) -> None:
        self._num_workers, self._address, self._is_actor = num_workers, address, actor_gpus is not None
        self._need = need or Need(0.0 if actor_gpus else 1.0, actor_gpus or 0.0, 0)
        self._execution = execution

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        label: Callable[[T], Label] | None = None,
        notify: Notify = lambda line: None,
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `clipmill.prep.engines.Engine`.

        Args:
            notify: called with lines for the user, for example while the engine waits for nodes.
        """
        ray = import_ray()
        no_name = Label(getattr(function, "__name__", "task"))
        given = ((task, label(task) if label is not None else no_name) for task in tasks)
        where = name_of_cluster(self._address)
        # Ray reports lost workers on standard output, which is reserved for results, even during its shutdown.
        with redirect_stdout(sys.stderr):
            # The number of actors with GPUs is limited by the GPUs, not by the CPUs.
            num_cpus = None if self._need.gpus or not self._num_workers else ceil(self._num_workers * self._need.cpus)
            wait_s = self._execution.wait_for_nodes if self._address is not None else 0.0
            is_compared = self._execution.straggler_factor and self._address is not None and not self._is_actor
            try:
                connect(ray, self._address, num_cpus=num_cpus)
                nodes = Nodes(ray, self._need, where=where, wait_s=wait_s, notify=notify)
                board = Board(ray) if is_compared else None
                nodes.require_one(at_once=True)
                work = Work(ray, function, check, need=self._need, board=board)
                if check is not None and self._address is not None:
                    nodes.ask(work.refusal())
                session = Session(ray, nodes, work, board, self._execution, self._need.options())
                if self._is_actor:
                    yield from ActorRun(session, num_actors=lambda: self._num_actors(nodes)).outcomes(given)
                else:
                    yield from TaskRun(session, window=lambda: self._window(nodes)).outcomes(given)
                yield from nodes.answers(limit_s=_ANSWER_LIMIT_S)
                if board is not None:
                    board.clear()
            except (ray.exceptions.RayError, ConnectionError) as error:
                raise FailedWork(
                    f"{where} is lost: {first_line(error)}; finished work is kept; run the same command again to resume"
                ) from None
            finally:
                ray.shutdown()

    def _num_actors(self, nodes: Nodes) -> int:
        """Return how many actors to ask for; those that a cluster has no room for make an autoscaler start nodes."""
        room = nodes.capacity()
        if self._address is None:
            return min(room, self._num_workers or room)
        return self._num_workers or max(1, room, nodes.largest_capacity())

    def _window(self, nodes: Nodes) -> int:
        if self._address is not None and self._num_workers is not None:
            return self._num_workers
        return _MAX_PENDING_PER_WORKER * max(1, nodes.capacity())


def isolated_ray_engine(
    *, num_workers: int | None, address: str | None, actor_gpus: float | None, need: Need, execution: Execution
) -> Engine:
    """Return a `RayEngine` in a separate process, since Ray ends its process when it loses the cluster."""
    engine = RayEngine(num_workers=num_workers, address=address, actor_gpus=actor_gpus, need=need, execution=execution)
    return IsolatedEngine(engine, name=name_of_cluster(address), starting=starting_text(address))


def count_cluster_gpus(address: str) -> float:
    """Return the number of GPUs of a cluster, or the number that its autoscaler may start if that is larger.

    Raises:
        UserError: there is no such cluster.
    """
    with Activity(starting_text(address)):
        found: float = call_isolated(_count_gpus, address, name=name_of_cluster(address))
    return found


def _count_gpus(address: str) -> float:
    ray = import_ray()
    connect(ray, address)
    try:
        largest = ray._private.state.state.get_max_resources_from_cluster_config() or {}
        return max(ray.cluster_resources().get("GPU", 0.0), largest.get("GPU", 0.0))
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Import Ray with settings that it reads from the environment when it is imported.

    Raises:
        UserError: Ray is not installed.
    """
    # Disable usage statistics and accelerator warnings.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The head counts as lost after this time; Ray's default is 60.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    try:
        import ray
        import ray.exceptions
        import ray.experimental.internal_kv
    except ImportError:
        raise UserError("Ray is not installed", hint="install clipmill[prep], or use --engine processes") from None
    return ray
