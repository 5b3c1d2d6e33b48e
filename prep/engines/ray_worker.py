"""What the Ray engine sends to nodes: an actor class that needs no clipmill there before its check has passed.

Ray sends nested classes by value, so the one here may use nothing of this package before. Function and tasks stay bytes
until then.
"""

import os
from collections.abc import Callable
from typing import Any

from clipmill.prep.engines import THREADS_VARIABLE, Check, admission
from clipmill.prep.engines.execution import Need


def packed(ray: Any, function: Callable[[Any], Any], task: Any) -> bytes:
    """Serialise a call of the function."""
    return bytes(ray.cloudpickle.dumps((function, task)))


def worker_class(ray: Any, check: Check | None, need: Need) -> type:
    """Return an actor class that runs serialised calls; its `arrive` must be called first.

    Args:
        check: sent by value if it is of `clipmill.prep.engines.admission`.
        need: what a worker takes, which decides its number of threads.
    """
    ray.cloudpickle.register_pickle_by_value(admission)
    variable, cpus, gpus = THREADS_VARIABLE, need.cpus, need.gpus

    class Worker:
        def arrive(self) -> tuple[str, str | None]:
            """Return the node id, and why the actor must not work there; the call returns once it has started."""
            node_id = ray.get_runtime_context().get_node_id()
            threads = cpus
            if not threads:  # its share of the cores, by its share of the GPUs
                (node,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
                threads = node.get("CPU", 1) * gpus / max(gpus, node.get("GPU", 0))
            os.environ[variable] = str(max(1, int(threads)))
            reason = check() if check is not None else None
            if reason is None:
                from clipmill.prep.engines import die_with_parent

                # A worker whose node has exited, as happens when a driver is killed, would otherwise continue its task
                # for a while.
                die_with_parent()
            return node_id, reason

        def work(self, packed: bytes) -> Any:
            function, task = ray.cloudpickle.loads(packed)
            return function(task)

    return Worker
