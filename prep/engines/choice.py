"""Selecting the engine and the number of workers: on this machine or on a cluster, with or without GPUs."""

import os

from manifests.errors import UserError
from manifests.quoting import counted
from prep.engines import Engine


def open_engine(name: str, *, address: str | None, workers: int | None, gpus_per_worker: float | None = None) -> Engine:
    """Return the engine for `--engine`.

    Args:
        gpus_per_worker: GPUs per worker for workers that keep a model loaded (0: none); None for stateless workers.

    Raises:
        UserError: there are fewer GPUs than one worker needs.
    """
    if name == "ray":
        from prep.engines.ray import isolated_ray_engine

        return isolated_ray_engine(num_workers=workers, address=address, actor_gpus=gpus_per_worker)
    from prep.engines.processes import ProcessEngine

    if not gpus_per_worker:
        return ProcessEngine(num_workers=workers or num_cores())
    room = int(count_gpus() / gpus_per_worker)
    if not room:
        raise UserError(
            f"this machine has {counted(count_gpus(), 'GPU')}, but a worker requires {gpus_per_worker:g}",
            hint="give a smaller --num-gpus, or 0 for the CPU",
        )
    gpus = [str(gpu) for gpu in range(count_gpus())]
    return ProcessEngine(num_workers=min(room, workers or room), gpus=gpus)


def resolve_gpus_per_worker(asked: float | None) -> float:
    """Return the value of `--num-gpus`; the default is 1 if this machine has a GPU."""
    return asked if asked is not None else float(count_gpus() > 0)


def threads_per_worker(workers: int | None, *, gpus_per_worker: float) -> int:
    """Return the number of threads per worker.

    On a CPU it is 1, since each worker has one core; on a GPU it is the worker's share of the cores.
    """
    if not gpus_per_worker:
        return 1
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
