"""Choose the engine and its number of workers: on this machine or on a cluster, with or without GPUs."""

import os
import sys

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.prep.engines import Engine
from clipmill.prep.engines.execution import Execution, worker_need

_JOB_VARIABLE, _ADDRESS_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS"


def cluster_address(flag: str | None) -> str | None:
    """Return the cluster address: `--address`, `RAY_ADDRESS`, or the cluster of a Ray job; None without a cluster.

    Args:
        flag: Value of `--address`.
    """
    address = flag or os.environ.get(_ADDRESS_VARIABLE) or ("auto" if _JOB_VARIABLE in os.environ else None)
    return None if address == "local" else address


def open_engine(
    name: str,
    *,
    address: str | None,
    workers: int | None,
    gpus_per_worker: float = 0.0,
    execution: Execution = Execution(),  # noqa: B008 - frozen
    memory_gb: float = 0.0,
) -> Engine:
    """Return the engine that `--engine` selects.

    Args:
        name: Value of `--engine`.
        address: Address of the Ray cluster; None for this machine.
        workers: Number of workers; None for as many workers as fit.
        gpus_per_worker: GPUs per worker; 0 for none.
        execution: Settings of the Ray engine.
        memory_gb: Memory to reserve for a worker on a cluster, in GB, unless `execution` sets it.

    Raises:
        UserError: This machine has fewer GPUs than a worker needs, or torch is not installed.
    """
    if name == "ray":
        from clipmill.prep.engines.ray import isolated_ray_engine

        return isolated_ray_engine(
            num_workers=workers,
            address=address,
            # On a single machine, the user chooses the number of workers, so memory is reserved only on request.
            need=worker_need(
                execution, gpus=gpus_per_worker, default_memory_gb=memory_gb if address is not None else 0.0
            ),
            execution=execution,
        )
    from clipmill.prep.engines.processes import ProcessEngine

    if not gpus_per_worker:
        return ProcessEngine(num_workers=workers or num_cores())
    max_workers = int(count_gpus() / gpus_per_worker)
    if not max_workers:
        raise UserError(
            f"this machine has {count_noun(count_gpus(), 'GPU')}, but a worker requires {gpus_per_worker:g}",
            hint="use a smaller --num-gpus, or --num-gpus 0 for the CPU",
        )
    gpus = [str(gpu) for gpu in range(count_gpus())]
    return ProcessEngine(num_workers=min(max_workers, workers or max_workers), gpus=gpus)


def resolve_gpus_per_worker(flag: float | None, *, address: str | None) -> float:
    """Return the number of GPUs per worker; the default is 1 if this machine, or the cluster at `address`, has a GPU.

    Args:
        flag: Value of `--num-gpus`; None for the default.

    Raises:
        UserError: No cluster is running at `address`, or torch is not installed.
    """
    if flag is not None:
        return flag
    if address is None:
        return float(count_gpus() > 0)
    from clipmill.prep.engines.ray import count_cluster_gpus

    has_gpu = count_cluster_gpus(address) > 0
    if not has_gpu:
        sys.stderr.write(
            f'note: the Ray cluster at "{address}" has no GPU, so workers run on CPUs; '
            "use --num-gpus 1 to wait for a GPU\n"
        )
    return float(has_gpu)


def threads_per_worker(
    workers: int | None, *, gpus_per_worker: float, address: str | None, execution: Execution
) -> int | None:
    """Return the number of threads per worker; None if the engine assigns it (`clipmill.prep.engines.worker_threads`).

    A CPU worker gets as many threads as it reserves cores. GPU workers on this machine share the cores equally.
    """
    if not gpus_per_worker:
        return max(1, int(execution.task_cpus or 1))
    if address is not None or execution.task_cpus is not None:
        return None
    return max(1, num_cores() // (workers or max(1, int(count_gpus() / gpus_per_worker))))


def num_cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))


def count_gpus() -> int:
    """Return the number of GPUs that torch can use on this machine.

    Raises:
        UserError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise UserError("torch is not installed", hint="install clipmill[columns]") from None
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
