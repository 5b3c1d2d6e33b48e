"""Tracking the nodes of a Ray cluster: which were refused or lost, and whether any is left that can run a worker."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.prep.engines import Refused, no_worker_left
from clipmill.prep.engines.execution import Need

Notify = Callable[[str], None]  # shows a line to the user

_NODE_LABEL = "ray.io/node-id"
_CHECK_INTERVAL_S = 2.0
_REPORT_INTERVAL_S = 60.0
_MOST_AWAITED = 1000  # workers to ask an autoscaler for, which may know no limit


class Nodes:
    """The nodes that can run workers, and those that get no tasks.

    Args:
        need: what a worker takes; a node with less never gets a task.
        where: name of the Ray instance for messages.
        wait_s: how long to wait for a node that can run a worker.
    """

    def __init__(self, ray: Any, need: Need, *, where: str, wait_s: float, notify: Notify) -> None:
        self._ray, self.need = ray, need
        self._where, self._wait_s, self._notify = where, wait_s, notify
        self._refused: dict[str, Refused] = {}
        self._lost = set[str]()
        self._checked_s = time.monotonic()
        self._waiting_since_s: float | None = None
        self._reported_s = 0.0
        self._had_one = False
        self._counted_s, self._capacities = float("-inf"), (0, 0)

    def options(self, *, avoided: Collection[str] = ()) -> dict[str, Any]:
        """Return the options of an actor: what it takes, and a selector that keeps it off refused and avoided nodes."""
        closed = [*self._refused, *avoided]
        return {
            **self.need.options(),
            **({"label_selector": {_NODE_LABEL: f"!in({','.join(closed)})"}} if closed else {}),
        }

    def refuse(self, node_id: str, reason: str) -> Iterator[Refused]:
        """Exclude a node from now on; yield it if it was not excluded before.

        Raises:
            UserError: no node is left.
        """
        if node_id in self._refused:
            return
        refused = Refused(self.name_of(node_id), reason)
        self._refused[node_id] = refused
        self.require_one(at_once=True)
        yield refused

    def lose(self, node_id: str) -> Iterator[Refused]:
        """Yield a node that was lost, the first time."""
        if node_id not in self._lost | self._refused.keys():
            self._lost.add(node_id)
            yield Refused(self.name_of(node_id), "it was lost; its tasks run on other nodes")

    def is_refused(self, node_id: str) -> bool:
        """Return True for a node that gets no tasks."""
        return node_id in self._refused

    def has_other(self, node_ids: Collection[str]) -> bool:
        """Return True if a node besides these can run a worker."""
        closed = {*node_ids, *self._refused}
        return any(node["NodeID"] not in closed for node in self._able_nodes())

    def name_of(self, node_id: str) -> str:
        """Return the name of a node for messages."""
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        return f"node {node_id[:8]} on {names.get(node_id, 'an unknown host')}"

    def is_alive(self, node_id: str) -> bool:
        """Return True if a node is alive."""
        return any(node["NodeID"] == node_id and node["Alive"] for node in self._ray.nodes())

    def capacity(self) -> int:
        """Return how many workers the living nodes have room for, as of the last seconds."""
        return self._counted()[0]

    def largest_capacity(self) -> int:
        """Return how many workers the cluster has room for when its autoscaler has started all nodes; 0 if unknown."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, int]:
        if time.monotonic() - self._counted_s > _CHECK_INTERVAL_S:
            self._counted_s = time.monotonic()
            nodes = [node["Resources"] for node in self._able_nodes() if node["NodeID"] not in self._refused]
            largest = self._ray._private.state.state.get_max_resources_from_cluster_config() or {}
            # The types of nodes need not tell their memory.
            room = replace(self.need, memory_bytes=0).room(largest)
            self._capacities = sum(map(self.need.room, nodes)), min(room, _MOST_AWAITED)
        return self._capacities

    def require_one(self, *, at_once: bool = False) -> None:
        """Check that a node can run a worker, at most once every few seconds; report it while there is none.

        Raises:
            UserError: all nodes were refused, or none has appeared within the time limit.
            FailedWork: the last node was lost, and none has appeared within the time limit.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_INTERVAL_S and not at_once:
            return
        self._checked_s = now_s
        able = self._able_nodes()
        if any(node["NodeID"] not in self._refused for node in able):
            self._had_one = True
            if self._waiting_since_s is not None:
                self._notify(f"a node with {self.need} has joined after {now_s - self._waiting_since_s:.0f} s")
            self._waiting_since_s = None
            return
        if self._refused:
            raise no_worker_left(self._refused.values())
        if self._waiting_since_s is None:
            self._waiting_since_s, self._reported_s = now_s, float("-inf")
        waited_s = now_s - self._waiting_since_s
        if waited_s >= self._wait_s:
            self._give_up()
        if now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            left_s = self._wait_s - waited_s
            self._notify(f"waiting up to {left_s:.0f} s for a node with {self.need}; {self._where} has {self._found()}")

    def _give_up(self) -> None:
        if self._had_one:
            raise FailedWork(
                f"{self._where} has lost its last node with {self.need}, and none has joined for {self._wait_s:g} s; "
                "finished work is kept; run the same command again to resume"
            )
        waited = f", and none has joined for {self._wait_s:g} s" if self._wait_s else ""
        raise UserError(
            f"{self._where} has {self._found()}, but a worker requires {self.need} on one node{waited}",
            hint="start such nodes, wait longer with --wait-for-nodes, or give a smaller --num-gpus (0: CPU), "
            "--task-cpus or --task-memory",
        )

    def _found(self) -> str:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        totals = (
            count_noun(int(sum(node.get(resource, 0) for node in nodes)), resource) for resource in ("CPU", "GPU")
        )
        memory_gb = max((node.get("memory", 0) for node in nodes), default=0) / 1e9
        return (
            f"{count_noun(len(nodes), 'node')} with {' and '.join(totals)}, "
            f"and at most {memory_gb:.1f} GB of memory each"
        )

    def _able_nodes(self) -> list[Any]:
        """Return the living nodes that can run workers, including refused ones."""
        return [node for node in self._ray.nodes() if node["Alive"] and self.need.fits(node["Resources"])]
