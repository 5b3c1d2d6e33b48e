"""The Ray engine; no other file imports Ray. Its workers are actors, which take one task after another.

The number of tasks in flight is bounded, and only kilobytes are sent and returned for each. Without an address, the
command starts a Ray instance on this machine and stops it at the end. With an address, it joins a cluster, whose nodes
need the same clipmill, the same ffmpeg and the data folder under the same path. Every worker is checked before its
first task. The check is sent as source code; until a worker has passed it, function and task remain unpickled bytes. A
node that fails the check is excluded from then on.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from math import ceil
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.manifests.progress import Activity
from clipmill.prep.engines import Check, Engine, Outcome, R, Refused, T
from clipmill.prep.engines.execution import Execution, Need
from clipmill.prep.engines.isolated import IsolatedEngine, call_isolated
from clipmill.prep.engines.ray_actors import ActorRun
from clipmill.prep.engines.ray_connection import (
    START_LIMIT_S,
    connect,
    make_private,
    name_of_cluster,
    starting_text,
)
from clipmill.prep.engines.ray_nodes import Nodes, Notify

_GROWTH = 2  # workers to ask for, by what the nodes have room for, where an autoscaler does not tell its limit
_LATE_LIMIT_S = 10.0  # for workers that are still starting, whose nodes are to be named if they are refused


class RayEngine:
    """Runs tasks in Ray actors, which keep what the function has loaded.

    Args:
        num_workers: maximum number of workers; None for all that fit.
        address: address of an existing cluster (`auto`, or host:port); None starts a private instance.
        need: what a worker takes.
    """

    def __init__(
        self,
        *,
        num_workers: int | None,
        address: str | None,
        need: Need = Need(cpus=1, gpus=0, memory_bytes=0),  # noqa: B008 - frozen
        execution: Execution = Execution(),  # noqa: B008 - frozen
    ) -> None:
        self._num_workers, self._address = num_workers, address
        self._need, self._execution = need, execution

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
        notify: Notify = lambda line: None,
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `clipmill.prep.engines.Engine`.

        Args:
            notify: called with lines for the user, for example while the engine waits for nodes.
        """
        if self._address is None:
            make_private()
        ray = import_ray()
        no_name = getattr(function, "__name__", "task")
        given = ((task, name(task) if name is not None else no_name) for task in tasks)
        where = name_of_cluster(self._address)
        # Ray reports lost workers on standard output, which is reserved for results, even during its shutdown.
        with redirect_stdout(sys.stderr):
            # The number of actors with GPUs is limited by the GPUs, not by the CPUs.
            num_cpus = None if self._need.gpus or not self._num_workers else ceil(self._num_workers * self._need.cpus)
            wait_s = self._execution.wait_for_nodes if self._address is not None else 0.0
            try:
                connect(ray, self._address, num_cpus=num_cpus)
                nodes = Nodes(ray, self._need, where=where, wait_s=wait_s, notify=notify)
                nodes.require_one(at_once=True)
                run = ActorRun(
                    ray,
                    nodes,
                    function,
                    check,
                    task_retries=self._execution.task_retries,
                    num_actors=lambda: self._num_actors(nodes),
                )
                yield from run.outcomes(given)
                if check is not None and self._address is not None:
                    yield from run.late_refusals(limit_s=_LATE_LIMIT_S)
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
            return max(1, min(room, self._num_workers or room))
        return self._num_workers or max(1, room, nodes.largest_capacity() or _GROWTH * room)


def isolated_ray_engine(*, num_workers: int | None, address: str | None, need: Need, execution: Execution) -> Engine:
    """Return a `RayEngine` in a separate process, since Ray ends its process when it loses the cluster."""
    engine = RayEngine(num_workers=num_workers, address=address, need=need, execution=execution)
    # On a cluster it waits for nodes for as long as it was told.
    limit_s = START_LIMIT_S if address is None else None
    return IsolatedEngine(engine, name=name_of_cluster(address), starting=starting_text(address), start_limit_s=limit_s)


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
    # The head notices the loss of a node after 15 s. A call whose worker does not answer waits until it is known which
    # of the two was lost; Ray's default is one second.
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "60000")
    try:
        import ray
        import ray.exceptions
        import ray.experimental.internal_kv
    except ImportError:
        raise UserError("Ray is not installed", hint="install clipmill[prep], or use --engine processes") from None
    return ray
