"""Tracking the nodes of a Ray cluster that were refused."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from prep.engines import Refused, no_worker_left

_NODE_LABEL = "ray.io/node-id"
_CHECK_INTERVAL_S = 2.0


class Nodes:
    """The nodes that get no tasks.

    Args:
        resource: resource that a worker needs, CPU or GPU; nodes without it never get a task.
    """

    def __init__(self, ray: Any, resource: str) -> None:
        self._ray, self._resource = ray, resource
        self._refused: dict[str, Refused] = {}
        self._checked_s = time.monotonic()
        self._asked: dict[Any, str] = {}

    def ask(self, refusal: Callable[[], tuple[str, str] | None]) -> None:
        """Call `refusal` on every living node, in parallel with its other work."""
        remote = self._ray.remote(refusal)
        for node in self._usable_nodes():
            options = {"num_cpus": 0, "max_retries": 0, "label_selector": {_NODE_LABEL: node["NodeID"]}}
            self._asked[remote.options(**options).remote()] = node["NodeID"]

    def answers(self, *, limit_s: float = 0.0) -> Iterator[Refused]:
        """Yield the refused nodes among those that have answered, waiting at most `limit_s` seconds."""
        if not self._asked:
            return
        ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=limit_s)
        for reference in ready:
            node_id = self._asked.pop(reference)
            try:
                refusal = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                refusal = node_id, first_line(error)
            except self._ray.exceptions.RayError:
                continue  # the node has disappeared
            if refusal is not None:
                yield from self.refuse(refusal)

    def options(self) -> dict[str, Any]:
        """Return options for a task or an actor that keep it off the refused nodes."""
        return {"label_selector": {_NODE_LABEL: f"!in({','.join(self._refused)})"}} if self._refused else {}

    def refuse(self, refusal: tuple[str, str]) -> Iterator[Refused]:
        """Exclude a node, given as (node id, reason), from now on; yield it if it was not excluded before.

        Raises:
            UserError: no node is left.
        """
        node_id, reason = refusal
        if node_id in self._refused:
            return
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        refused = Refused(f"node {node_id[:8]} on {names.get(node_id, 'an unknown host')}", reason)
        self._refused[node_id] = refused
        self.require_one(at_once=True)
        yield refused

    def require_one(self, *, at_once: bool = False) -> None:
        """Raise UserError if nodes were refused and no others are left; checks at most once every few seconds."""
        if not self._refused or (time.monotonic() - self._checked_s < _CHECK_INTERVAL_S and not at_once):
            return
        self._checked_s = time.monotonic()
        if all(node["NodeID"] in self._refused for node in self._usable_nodes()):
            raise no_worker_left(self._refused.values())

    def _usable_nodes(self) -> list[Any]:
        """Return the living nodes that can run workers."""
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get(self._resource)]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; Ray's messages are long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
