"""Run a function in Ray actors: workers that take one task after another, and keep what the function has loaded.

A worker is checked when it starts, and gets its first task once it has passed the check. A worker ends and frees its
resources when no task is left for it.

Actor restarts and call retries in Ray are disabled, because Ray does not distinguish the death of a worker, which its
task may have caused, from the loss of a node, which a task rarely causes. The engine counts both for each task, and
replaces a lost worker with a new worker.

Ray sends nested classes by value, so a node does not need clipmill to load the actor class. The function and the task
stay serialised until the worker has passed the check.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError, first_line
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.prep.engines import (
    THREADS_VARIABLE,
    TICK_S,
    Check,
    MachineFault,
    Outcome,
    RefusedNode,
    admission,
    no_nodes_error,
)
from clipmill.prep.engines.execution import Need

Notify = Callable[[str], None]  # shows a message to the user

_NODE_LABEL = "ray.io/node-id"
_CHECK_INTERVAL_S = 2.0
_REPORT_INTERVAL_S = 60.0
_MAX_REQUESTED = 1000  # maximum number of workers to request from an autoscaler


class Nodes:
    """The nodes of a Ray instance: the nodes that can run workers, and the nodes that get no tasks.

    Args:
        need: Resources of a worker. A node with fewer resources never gets a task.
        instance_name: Name of the Ray instance, used in messages.
        wait_s: Time, in seconds, to wait for a node that can run a worker.
        notify: Function that shows a message to the user.
    """

    def __init__(self, ray: Any, need: Need, *, instance_name: str, wait_s: float, notify: Notify) -> None:
        self._ray, self.need = ray, need
        self._instance_name, self._wait_s, self._notify = instance_name, wait_s, notify
        self._refused_nodes: dict[str, RefusedNode] = {}
        self._lost_ids = set[str]()
        self._last_check_s = time.monotonic()
        self._waiting_since_s: float | None = None
        self._last_report_s = 0.0
        self._has_had_node = False
        self._last_count_s, self._capacities = float("-inf"), (0, 0)

    def options(self, *, avoided_ids: Collection[str] = ()) -> dict[str, Any]:
        """Return the options of an actor: its resources, and a selector that excludes refused and avoided nodes."""
        excluded_ids = [*self._refused_nodes, *avoided_ids]
        return {
            **self.need.options(),
            **({"label_selector": {_NODE_LABEL: f"!in({','.join(excluded_ids)})"}} if excluded_ids else {}),
        }

    def refuse(self, node_id: str, reason: str) -> Iterator[RefusedNode]:
        """Exclude a node for the rest of the run, and yield it unless it was excluded already.

        Raises:
            UserError: No node is left.
        """
        if node_id in self._refused_nodes:
            return
        refused_node = RefusedNode(self._name_node(node_id), reason)
        self._refused_nodes[node_id] = refused_node
        self.require_node(forces_check=True)
        yield refused_node

    def lose(self, node_id: str) -> Iterator[RefusedNode]:
        """Yield a lost node, unless it was yielded already."""
        if node_id not in self._lost_ids | self._refused_nodes.keys():
            self._lost_ids.add(node_id)
            yield RefusedNode(self._name_node(node_id), "it was lost; its tasks run on other nodes")

    def is_refused(self, node_id: str) -> bool:
        """Return True if a node gets no tasks."""
        return node_id in self._refused_nodes

    def has_other_node(self, node_ids: Collection[str]) -> bool:
        """Return True if a node other than `node_ids` can run a worker."""
        excluded_ids = {*node_ids, *self._refused_nodes}
        return any(node["NodeID"] not in excluded_ids for node in self._suitable_nodes())

    def _name_node(self, node_id: str) -> str:
        """Return the name of a node, for use in messages."""
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        return f"node {node_id[:8]} on {names.get(node_id, 'an unknown host')}"

    def is_alive(self, node_id: str) -> bool:
        """Return True if a node is alive."""
        return any(node["NodeID"] == node_id and node["Alive"] for node in self._ray.nodes())

    def starting_nodes(self) -> dict[str, str]:
        """Return {actor ID: ID of the node on which the actor is starting} for the workers of this run."""
        job = self._ray.JobID.from_hex(self._ray.get_runtime_context().get_job_id())
        actors = self._ray._private.state.actors(job_id=job, actor_state_name="PENDING_CREATION")
        return {actor_id: actor["Address"]["NodeID"] for actor_id, actor in actors.items()}

    def capacities(self) -> tuple[int, int]:
        """Return the number of workers that fit on the current nodes, and on all nodes that an autoscaler may start.

        The numbers may be a few seconds old. The second number is 0 if the limit of the autoscaler is unknown.
        """
        if time.monotonic() - self._last_count_s > _CHECK_INTERVAL_S:
            self._last_count_s = time.monotonic()
            nodes = [node["Resources"] for node in self._suitable_nodes() if node["NodeID"] not in self._refused_nodes]
            largest_cluster = self._ray._private.state.state.get_max_resources_from_cluster_config() or {}
            # An autoscaler may not know the memory of its node types.
            room = replace(self.need, memory_bytes=0).room(largest_cluster)
            self._capacities = sum(map(self.need.room, nodes)), min(room, _MAX_REQUESTED)
        return self._capacities

    def require_node(self, *, forces_check: bool = False) -> None:
        """Check that a node can run a worker. While there is no such node, report that the run is waiting for a node.

        Args:
            forces_check: True to check even if the last check was less than `_CHECK_INTERVAL_S` seconds ago.

        Raises:
            UserError: All nodes were refused, or no node has joined within the time limit.
            FailedWork: The last node was lost, and no other node has joined within the time limit.
        """
        # The run calls this method at every tick, but a query to Ray takes milliseconds.
        now_s = time.monotonic()
        if now_s - self._last_check_s < _CHECK_INTERVAL_S and not forces_check:
            return
        self._last_check_s = now_s
        if any(node["NodeID"] not in self._refused_nodes for node in self._suitable_nodes()):
            self._has_had_node = True
            if self._waiting_since_s is not None:
                self._notify(f"a node with {self.need} joined after {now_s - self._waiting_since_s:.0f} s")
            self._waiting_since_s = None
            return
        if self._refused_nodes:
            raise no_nodes_error(self._refused_nodes.values())
        if self._waiting_since_s is None:
            self._waiting_since_s, self._last_report_s = now_s, float("-inf")
        waited_s = now_s - self._waiting_since_s
        if waited_s >= self._wait_s and self._has_had_node:
            raise FailedWork(
                f"{self._instance_name} has lost its last node with {self.need}, and no such node has joined for "
                f"{self._wait_s:g} s; finished work is kept; run the same command again to resume"
            )
        if waited_s >= self._wait_s:
            wait_text = f", and no such node has joined for {self._wait_s:g} s" if self._wait_s else ""
            raise UserError(
                f"{self._instance_name} has {self._resources_text()}, but a worker requires {self.need} on one node"
                f"{wait_text}",
                hint="start such nodes, wait longer with --wait-for-nodes, or use a smaller --num-gpus (0 for CPUs), "
                "--task-cpus or --task-memory",
            )
        if now_s - self._last_report_s >= _REPORT_INTERVAL_S:
            self._last_report_s = now_s
            remaining_s = self._wait_s - waited_s
            resources = f"{self._instance_name} has {self._resources_text()}"
            self._notify(f"waiting up to {remaining_s:.0f} s for a node with {self.need}; {resources}")

    def _resources_text(self) -> str:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        totals = (
            count_noun(int(sum(node.get(resource, 0) for node in nodes)), resource) for resource in ("CPU", "GPU")
        )
        memory_gb = max((node.get("memory", 0) for node in nodes), default=0) / 1e9
        return (
            f"{count_noun(len(nodes), 'node')} with {' and '.join(totals)}, "
            f"and at most {memory_gb:.1f} GB of memory each"
        )

    def _suitable_nodes(self) -> list[Any]:
        """Return the nodes that are alive and can run workers, including refused nodes."""
        return [node for node in self._ray.nodes() if node["Alive"] and self.need.fits(node["Resources"])]


_TASKS_PER_ACTOR = 2  # the running task and the next task, so that an actor does not wait for the command
_START_LIMIT_S = 300.0  # time limit for a node's first worker to start; Ray may have to set up a runtime environment
_NUM_START_CHECKS = 10  # number of checks within _START_LIMIT_S
_MAX_FAILED_STARTS = 3  # maximum number of consecutive failed starts per actor
_MAX_LOST_NODES = 10  # maximum number of lost nodes per task, because a task may bring down its nodes
_MAX_FAULTS = 2  # a node is refused after it fails this number of consecutive tasks that other nodes complete
_MAX_DOUBTFUL_NODES = 3  # maximum number of nodes that try a task whose inputs may have caused its failure

Events = Iterator[Outcome[Any, Any] | RefusedNode | None]


@dataclass(eq=False)
class _Attempt:
    """A task, and its failed attempts.

    Attributes:
        name: Name of the task in Ray's lists.
        num_deaths: Number of times that the worker of the task died but its node survived.
        num_lost_nodes: Number of times that the node of the worker was lost.
        failed_nodes: Reason for each failure that the machine may have caused, by node ID.
    """

    task: Any
    name: str
    num_deaths: int = 0
    num_lost_nodes: int = 0
    failed_nodes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Actor:
    """An actor that has started, and its node."""

    handle: Any
    node_id: str


class ActorRun:
    """A run that applies a function to tasks in Ray actors.

    Args:
        task_retries: Number of times to retry a task whose worker died.
        num_actors: Function that returns the desired number of actors, 1 or more.
    """

    def __init__(
        self,
        ray: Any,
        nodes: Nodes,
        function: Callable[[Any], Any],
        check: Check | None,
        *,
        task_retries: int,
        num_actors: Callable[[], int],
    ) -> None:
        self._ray, self._nodes, self._function = ray, nodes, function
        self._task_retries, self._num_actors = task_retries, num_actors
        self._actor_class = ray.remote(worker_class(ray, check, nodes.need))
        self._waiting_attempts = deque[_Attempt]()
        # An actor gets a task only after it has started, because its node may disappear while it starts.
        self._starting_actors = dict[Any, Any]()  # call that returns once the actor has started -> actor
        # Call that returns the result of the task -> actor and task.
        self._busy_actors = dict[Any, tuple[_Actor, _Attempt]]()
        self._num_failed_starts = 0
        self._proven_ids = set[str]()  # nodes on which a worker has started
        self._first_start_s = dict[str, float]()  # node ID -> time at which its first worker began to start
        self._last_start_check_s = time.monotonic()
        self._num_faults = Counter[str]()  # node ID -> number of faults since the last task without a fault

    def outcomes(self, named_tasks: Iterator[tuple[Any, str]]) -> Events:
        """Run tasks, given as pairs (task, name), and yield their outcomes, as `clipmill.prep.engines.Engine` does."""
        while True:
            num_actors = self._num_actors()
            while len(self._waiting_attempts) + len(self._busy_actors) < _TASKS_PER_ACTOR * num_actors:
                named_task = next(named_tasks, None)
                if named_task is None:
                    break
                self._waiting_attempts.append(_Attempt(*named_task))
            if not self._waiting_attempts and not self._busy_actors:
                return
            # If the nodes have no room for an actor, an autoscaler may start a node for it.
            while len(self._starting_actors) < min(len(self._waiting_attempts), num_actors - len(self._busy_actors)):
                avoided_ids = set.intersection(*(set(attempt.failed_nodes) for attempt in self._waiting_attempts))
                options = self._nodes.options(avoided_ids=avoided_ids)
                handle = self._actor_class.options(max_restarts=0, max_task_retries=0, **options).remote()
                self._starting_actors[handle.arrive.remote()] = handle
            # Cancel actors for which there is no task or no room; they would start needlessly at the end of the run.
            while len(self._starting_actors) > max(
                len(self._waiting_attempts), self._nodes.capacities()[0] - len(self._busy_actors)
            ):
                self._ray.kill(self._starting_actors.popitem()[1])
            yield from self._refuse_unresponsive_nodes()
            ready_calls, _ = self._ray.wait([*self._starting_actors, *self._busy_actors], timeout=TICK_S)
            if not ready_calls:
                self._nodes.require_node()
                for attempt in self._waiting_attempts:
                    # If all other nodes have been lost, the nodes that failed the task may try it again.
                    if attempt.failed_nodes and not self._nodes.has_other_node(attempt.failed_nodes):
                        attempt.failed_nodes.clear()
                yield None
            for call in ready_calls:
                yield from self._finish_start(call) if call in self._starting_actors else self._finish_task(call)

    def check_late_workers(self, *, limit_s: float) -> Events:
        """Wait at most `limit_s` seconds for workers that are starting, and yield the nodes that fail the check."""
        if not self._starting_actors:
            return
        ready_calls, _ = self._ray.wait(
            [*self._starting_actors], num_returns=len(self._starting_actors), timeout=limit_s
        )
        for call in ready_calls:
            yield from self._finish_start(call)

    def _finish_start(self, call: Any) -> Events:
        """Handle the start of an actor: send it a task, or refuse its node if the check has failed."""
        handle = self._starting_actors.pop(call)
        error, arrival = self._get_result(call)
        if error is not None:  # the node was lost, or the cause may affect the next actor as well
            self._num_failed_starts += 1
            if self._num_failed_starts >= _MAX_FAILED_STARTS * self._num_actors():
                raise error
            return
        self._num_failed_starts = 0
        node_id, reason = arrival
        self._proven_ids.add(node_id)
        if reason is None:
            self._send_task(_Actor(handle, node_id))
        else:
            yield from self._nodes.refuse(node_id, reason)

    def _refuse_unresponsive_nodes(self) -> Events:
        """Refuse nodes on which no worker has started in time, for example because their Python is damaged.

        Ray itself has no time limit for the start of an actor.
        """
        now_s = time.monotonic()
        if not self._starting_actors or now_s - self._last_start_check_s < _START_LIMIT_S / _NUM_START_CHECKS:
            return
        self._last_start_check_s = now_s
        actor_nodes = {
            actor_id: node_id
            for actor_id, node_id in self._nodes.starting_nodes().items()
            if node_id not in self._proven_ids
        }
        self._first_start_s = {node_id: self._first_start_s.get(node_id, now_s) for node_id in actor_nodes.values()}
        for node_id, start_s in self._first_start_s.items():
            if node_id and now_s - start_s >= _START_LIMIT_S:
                for call, handle in [*self._starting_actors.items()]:
                    if actor_nodes.get(handle._actor_id.hex()) == node_id:
                        self._ray.kill(self._starting_actors.pop(call))
                reason = (
                    f"no worker started within {_START_LIMIT_S:g} s; the Ray logs of the node may contain the cause"
                )
                yield from self._nodes.refuse(node_id, reason)

    def _send_task(self, actor: _Actor) -> None:
        """Send an actor the next task that its node may try.

        If no such task is left, the actor ends, because nothing refers to it any longer.
        """
        if self._nodes.is_refused(actor.node_id):
            return
        attempt = next(
            (attempt for attempt in self._waiting_attempts if actor.node_id not in attempt.failed_nodes), None
        )
        if attempt is not None:
            self._waiting_attempts.remove(attempt)
            payload = bytes(self._ray.cloudpickle.dumps((self._function, attempt.task)))
            call = actor.handle.work.options(name=attempt.name).remote(payload)
            self._busy_actors[call] = actor, attempt

    def _finish_task(self, call: Any) -> Events:
        """Handle the end of a task: yield its outcome, or let other nodes try the task if this node may be faulty.

        The node is considered faulty if another node completes the task, but not if all nodes fail the task.
        """
        actor, attempt = self._busy_actors.pop(call)
        error, result = self._get_result(call)
        if error is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)  # the actor may still be running, although Ray reports its loss
            if not self._nodes.is_alive(actor.node_id):
                yield from self._nodes.lose(actor.node_id)
                attempt.num_lost_nodes += 1
            else:
                attempt.num_deaths += 1
                if self._nodes.has_other_node({*attempt.failed_nodes, actor.node_id}):
                    attempt.failed_nodes[actor.node_id] = f"its worker died: {first_line(error)}"
            if attempt.num_deaths <= self._task_retries and attempt.num_lost_nodes <= _MAX_LOST_NODES:
                self._waiting_attempts.appendleft(attempt)
            else:
                yield Outcome(attempt.task, None, lost=first_line(error))
            return
        fault: MachineFault | None = getattr(result, "machine_fault", None)
        is_retried = False
        if fault is not None:
            attempt.failed_nodes[actor.node_id] = fault.reason
            is_final = fault.is_doubtful and len(attempt.failed_nodes) >= _MAX_DOUBTFUL_NODES
            is_retried = not is_final and self._nodes.has_other_node(attempt.failed_nodes)
        if is_retried:
            self._waiting_attempts.appendleft(attempt)
        else:
            yield Outcome(attempt.task, result)
        if fault is None:
            self._num_faults[actor.node_id] = 0
            for node_id, reason in attempt.failed_nodes.items():
                self._num_faults[node_id] += 1
                if self._num_faults[node_id] >= _MAX_FAULTS:
                    yield from self._nodes.refuse(node_id, f"its tasks fail, but succeed on other nodes: {reason}")
        self._send_task(actor)

    def _get_result(self, call: Any) -> tuple[Exception | None, Any]:
        """Return (None, result of a call), or (error, None) if the worker of the call was lost.

        Raises:
            Exception: The function raised this exception.
            UserError: The runtime environment of a Ray job cannot be set up.
            ConnectionError: The Ray instance has ended.
        """
        errors = self._ray.exceptions
        try:
            return None, self._ray.get(call)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(first_line(error))
            cause.add_note(str(error))
            raise cause from None
        except errors.RuntimeEnvSetupError as error:
            raise UserError(
                f"a node cannot set up the runtime environment of the job: {on_one_line(str(error))}",
                hint="correct the runtime environment that you pass to `ray job submit`",
            ) from None
        except errors.LocalRayletDiedError as error:
            raise ConnectionError(first_line(error)) from None
        except errors.RayError as error:
            return error, None


def worker_class(ray: Any, check: Check | None, need: Need) -> type:
    """Return an actor class that runs serialised calls. Its method `arrive` must be called first.

    Args:
        check: Function that returns the reason why the actor must get no tasks, or None. The function is sent by value
            if it is defined in `clipmill.prep.engines.admission`.
        need: Resources of a worker, which determine its number of threads.
    """
    ray.cloudpickle.register_pickle_by_value(admission)
    variable, cpus, gpus = THREADS_VARIABLE, need.cpus, need.gpus

    class Worker:
        def arrive(self) -> tuple[str, str | None]:
            """Return the ID of the node, and the reason why the actor must get no tasks, or None."""
            node_id = ray.get_runtime_context().get_node_id()
            threads = cpus
            if not threads:  # use cores in proportion to the worker's fraction of the GPUs
                (node,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
                threads = node.get("CPU", 1) * gpus / max(gpus, node.get("GPU", 0))
            os.environ[variable] = str(max(1, int(threads)))
            reason = check() if check is not None else None
            if reason is None:
                from clipmill.prep.engines import die_with_parent

                # When the driver of a private instance is killed, its raylet exits. Kill the worker with the raylet.
                die_with_parent()
            return node_id, reason

        def work(self, payload: bytes) -> Any:
            function, task = ray.cloudpickle.loads(payload)
            return function(task)

    return Worker
