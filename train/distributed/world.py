"""The ranks of a run, and what they tell one another: the one door of torch.distributed's collectives.

One process without a launcher is a world of size 1, in which every exchange gives back what it got.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


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
