"""The ranks of a run, and what they tell one another: the one door of torch.distributed's collectives.

One process without a launcher is a world of size 1, in which every exchange gives back what it got. Tensors travel by
the backend of their device: gloo on CPUs, NCCL on GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from manifests.errors import ClipmillError, UserError

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among all of a run.

    Attributes:
        rank: 0 ... size - 1.
        local_rank: the same within this machine; the number of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    def share(self, batch: int) -> int:
        """This rank's samples of a batch.

        Raises:
            UserError: the ranks cannot have equal shares.
        """
        if batch % self.size:
            fitting = max(self.size, batch - batch % self.size)
            raise UserError(
                f"--batch is {batch}, and {self.size} processes cannot have equal shares of it",
                hint=f"--batch counts the samples of all processes: use --batch {fitting}, or another --nproc-per-node",
            )
        return batch // self.size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, [size * N, ...] in the order of ranks, without gradient; every rank gives N rows."""
        rows = rows.detach().contiguous()
        if self.size == 1:
            return rows
        gathered = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows)
        return gathered

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, elementwise, without gradient."""
        summed = values.detach().clone()
        if self.size > 1:
            dist.all_reduce(summed)
        return summed

    def gather_objects(self, value: Any) -> list[Any]:
        """The plain values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def first(self, work: Callable[[], Outcome]) -> Outcome:
        """What `work` gives on rank 0, where alone it is called, on all ranks.

        Raises:
            ClipmillError: `work` raised it; every rank raises the same.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = work()
            except ClipmillError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
