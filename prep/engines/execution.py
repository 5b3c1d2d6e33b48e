"""Settings of the Ray engine, and the resources that a worker reserves."""

from dataclasses import dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

from clipmill.manifests.help_text import RARE
from clipmill.manifests.settings import Checked, Range

CLUSTER = Parameter(group=Group("Ray", sort_key=8.5))
_BYTES_PER_GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Execution(Checked):
    """Settings of the Ray engine. They do not affect the bytes of the shards."""

    task_cpus: Annotated[float | None, CLUSTER, RARE, Range(above=0, below=10_000)] = None
    """CPUs to reserve per task. Default: 1; none for a worker with a GPU, which uses its share of the node's cores."""
    task_memory: Annotated[float | None, CLUSTER, RARE, Range(0, below=10_000)] = None
    """Memory to reserve per task on a cluster, in GB (10^9 bytes); 0 reserves none. Default: the measured
    memory use of the column (docs/cluster.md)."""
    task_retries: Annotated[int, CLUSTER, RARE, Range(0, 100)] = 2
    """Number of times to retry a task whose worker died, 0 to 100. The loss of a node does not count."""
    wait_for_nodes: Annotated[float, CLUSTER, RARE, Range(0, 7 * 24 * 3600)] = 600.0
    """Time, in seconds, to wait for nodes that can run a task, for example until an autoscaler has started them."""

    @property
    def changed_flags(self) -> list[str]:
        """Flags whose values differ from their defaults."""
        return [self.flag(field.name) for field in fields(self) if getattr(self, field.name) != field.default]


@dataclass(frozen=True)
class Need:
    """Resources that a worker reserves on its node."""

    cpus: float
    gpus: float
    memory_bytes: int

    def fits(self, resources: dict[str, float]) -> bool:
        """Return True if a node with these total resources can run a worker."""
        return (
            resources.get("CPU", 0) >= self.cpus
            and resources.get("GPU", 0) >= self.gpus
            and resources.get("memory", 0) >= self.memory_bytes
        )

    def room(self, resources: dict[str, float]) -> int:
        """Return the number of workers that fit into these resources."""
        needs = (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory_bytes))
        return min((int(resources.get(resource, 0) / amount) for resource, amount in needs if amount), default=0)

    def options(self) -> dict[str, float]:
        """Return the resources as options of a Ray actor."""
        memory = {"memory": self.memory_bytes} if self.memory_bytes else {}
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, **memory}

    def __str__(self) -> str:
        parts = [
            *([f"{self.cpus:g} CPU{'' if self.cpus == 1 else 's'}"] if self.cpus else []),
            *([f"{self.gpus:g} GPU{'' if self.gpus == 1 else 's'}"] if self.gpus else []),
            *([f"{self.memory_bytes / _BYTES_PER_GB:g} GB of memory"] if self.memory_bytes else []),
        ]
        return " and ".join(parts) or "any resources"


def worker_need(execution: Execution, *, gpus: float, default_memory_gb: float) -> Need:
    """Return the resources that a worker reserves.

    Args:
        gpus: GPUs per worker; 0 for a worker on a CPU.
        default_memory_gb: Memory of a worker in GB, used if `execution` does not set it.
    """
    cpus = execution.task_cpus if execution.task_cpus is not None else 0.0 if gpus else 1.0
    memory_gb = execution.task_memory if execution.task_memory is not None else default_memory_gb
    return Need(cpus, gpus, round(memory_gb * _BYTES_PER_GB))
