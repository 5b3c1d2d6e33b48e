"""What the Ray engine sends to workers: calls of a function, in forms that need no clipmill on the node.

Ray sends nested functions by value, so those here may use nothing of this package before a worker has been checked.
"""

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from clipmill.prep.engines import THREADS_VARIABLE, Check, admission
from clipmill.prep.engines.execution import Need

_NAMESPACE = b"clipmill"


class Board:
    """Table of which task each worker has and since when, in the key-value store of the cluster's head.

    Ray tells the driver neither when a task starts nor where. A worker has one row, so the table does not grow with the
    number of tasks.
    """

    def __init__(self, ray: Any) -> None:
        self._store = ray.experimental.internal_kv
        self.prefix = f"{secrets.token_hex(8)}/"

    def running(self) -> dict[int, tuple[str, float]]:
        """Return the task that each worker began last: task number -> (node id, start in seconds since the epoch)."""
        found = {}
        for key in self._store._internal_kv_list(self.prefix, namespace=_NAMESPACE):
            value = self._store._internal_kv_get(key, namespace=_NAMESPACE)
            if value is not None:
                number, node_id, since_s = value.decode().split()
                found[int(number)] = node_id, float(since_s)
        return found

    def clear(self) -> None:
        """Remove the table."""
        self._store._internal_kv_del(self.prefix, del_by_prefix=True, namespace=_NAMESPACE)


class Work:
    """The function and its check.

    Args:
        board: table in which workers note what they begin; None if nobody reads it.
    """

    def __init__(
        self, ray: Any, function: Callable[[Any], Any], check: Check | None, *, need: Need, board: Board | None
    ) -> None:
        ray.cloudpickle.register_pickle_by_value(admission)
        self._ray, self._need, self._board = ray, need, board
        self._function, self._check = function, check

    def packed(self, task: Any) -> bytes:
        """Serialise a call of the function."""
        return bytes(self._ray.cloudpickle.dumps((self._function, task)))

    def as_function(self) -> Callable[[bytes, int], Any]:
        """Return a function of a serialised call and its number.

        It returns (None, result, seconds that it ran) or, if the worker was refused, ((node id, reason), None, 0.0).
        """
        ray, prefix = self._ray, self._board.prefix if self._board is not None else None
        refusal, passed = self.refusal(), list[bool]()  # a worker loads the function once and keeps this list

        def work(packed: bytes, number: int) -> Any:
            if not passed and (refused := refusal()) is not None:
                return refused, None, 0.0
            passed.append(True)
            from clipmill.prep.engines import die_with_parent

            # A worker whose node has exited, as happens when a driver is killed, would otherwise continue its task for
            # a while.
            die_with_parent()
            if prefix is not None:
                context = ray.get_runtime_context()
                row = f"{number} {context.get_node_id()} {time.time()}"
                ray.experimental.internal_kv._internal_kv_put(
                    prefix + context.get_worker_id(), row, True, namespace=b"clipmill"
                )
            begin_s = time.monotonic()
            function, task = ray.cloudpickle.loads(packed)
            return None, function(task), time.monotonic() - begin_s

        return work

    def as_class(self) -> type:
        """Return an actor class that runs serialised calls; its `arrive` must be called first."""
        ray, check, variable = self._ray, self._check, THREADS_VARIABLE
        cpus, gpus = self._need.cpus, self._need.gpus

        class Worker:
            def arrive(self) -> tuple[str, str | None]:
                """Return the node id, and why the actor must not work there; the call returns once it has started."""
                node_id = ray.get_runtime_context().get_node_id()
                threads = cpus
                if not threads:  # its share of the cores, by its share of the GPUs
                    (node,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
                    threads = node.get("CPU", 1) * gpus / max(gpus, node.get("GPU", 0))
                os.environ[variable] = str(max(1, int(threads)))
                return node_id, check() if check is not None else None

            def work(self, packed: bytes) -> Any:
                from clipmill.prep.engines import die_with_parent

                die_with_parent()
                begin_s = time.monotonic()
                function, task = ray.cloudpickle.loads(packed)
                return None, function(task), time.monotonic() - begin_s

        return Worker

    def refusal(self) -> Callable[[], tuple[str, str] | None]:
        """Return a function that checks a worker and returns (node id, reason) if it must not work, otherwise None."""
        ray, check = self._ray, self._check

        def refusal() -> tuple[str, str] | None:
            reason = check() if check is not None else None
            return None if reason is None else (ray.get_runtime_context().get_node_id(), reason)

        return refusal
