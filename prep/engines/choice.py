"""Engines for columns that a model makes: workers that keep it, and a GPU or a share of one for each."""

import os
from typing import Annotated

from cyclopts import Parameter

from manifests.errors import UserError
from prep.engines import Engine

ModelWorkers = Annotated[
    int | None, Parameter(help="Copies of the model that work at a time; by default one a core, or one a GPU.")
]
NumGpus = Annotated[
    float | None, Parameter(help="GPUs of a worker, such as 1 or 0.5; 0 for none. By default 1 where there are any.")
]


def require_workers(workers: int | None, *, num_gpus: float | None, address: str | None, engine: str) -> None:
    """Checks what the flags ask for.

    Raises:
        UserError: they ask for nothing, or contradict each other.
    """
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} makes nothing", hint="give 1 or more, or leave it out")
    if num_gpus is not None and not 0 <= num_gpus < float("inf"):
        raise UserError(f"--num-gpus {num_gpus:g} is not a number of GPUs", hint="give 1, a share such as 0.5, or 0")
    if address is not None and engine != "ray":
        raise UserError(f"--address {address} needs Ray", hint="leave out --engine processes, or the address")


def require_variant(found: str, only: str | None, *, command: str) -> None:
    """Checks that a recipe read from a variant leads back to it.

    Raises:
        UserError: the weights, or the variant of video, are other ones now.
    """
    if only is not None and found != only:
        raise UserError(
            f"{only} cannot be gone on with: its weights or its chunks are other ones now",
            hint=f"make a new variant: {command}",
        )


def gpus_of_a_worker(asked: float | None) -> float:
    """What `--num-gpus` says, else 1 where this machine has a GPU."""
    return asked if asked is not None else float(count_gpus() > 0)


def open_model_engine(name: str, *, address: str | None, workers: int | None, gpus_each: float) -> Engine:
    """The engine of `--engine`.

    Raises:
        UserError: there are fewer GPUs than one worker needs.
    """
    if name == "ray":
        from prep.engines.ray import ray_apart

        return ray_apart(num_workers=workers, address=address, actor_gpus=gpus_each)
    from prep.engines.processes import ProcessEngine

    if not gpus_each:
        return ProcessEngine(num_workers=workers or num_cores())
    room = int(count_gpus() / gpus_each)
    if not room:
        raise UserError(
            f"this machine has {count_gpus()} GPUs, a worker needs {gpus_each:g}", hint="use --num-gpus 0 for the CPU"
        )
    gpus = [str(gpu) for gpu in range(count_gpus())]
    return ProcessEngine(num_workers=min(room, workers or room), gpus=gpus)


def threads_of_a_worker(workers: int | None, *, gpus_each: float) -> int:
    """One on a CPU, where each worker has a core; a GPU is fed by its share of the cores."""
    if not gpus_each:
        return 1
    return max(1, num_cores() // (workers or max(1, int(count_gpus() / gpus_each))))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_gpus() -> int:
    """GPUs that torch can use on this machine.

    Raises:
        UserError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise UserError("torch is not installed", hint="install clipmill[columns]") from None
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
