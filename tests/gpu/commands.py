"""What the processes of the tests of this folder do."""

import os
import sys

import torch

from clipmill.train.distributed import launch
from tests.train.running import train


def train_alone(command: list[str]) -> None:
    """A run of one process."""
    torch.set_num_threads(1)
    sys.exit(train(*command))


def train_within(command: list[str], limit_bytes: int) -> None:
    """A run that may have no more of the GPU's memory."""
    torch.set_num_threads(1)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, 0)
    sys.exit(train(*command))


def train_and_say_peak(command: list[str]) -> None:
    """A run that ends with the most bytes that torch had taken of the GPU."""
    torch.set_num_threads(1)
    status = train(*command)
    print(f"peak_bytes={torch.cuda.max_memory_reserved()}", flush=True)
    sys.exit(status)


def train_as_rank(commands: list[list[str]], ports: list[int], backend: str) -> None:
    """A rank of several that share the one GPU there is, through some runs; the ranks meet anew for each.

    Args:
        backend: nccl for what the command chooses, else what its process group is made by instead.
    """
    torch.set_num_threads(1)
    make_group = launch.dist.init_process_group

    def with_backend(chosen: str, **options: object) -> None:
        make_group(chosen if backend == "nccl" else backend, **options)  # type: ignore[arg-type]

    launch.dist.init_process_group = with_backend  # type: ignore[assignment]
    for command, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if status := train(*command):
            sys.exit(status)
