"""ZeRO-1: each rank has the optimizer's state of its own parameters, and sends them to the others after a step.

(Rajbhandari et al. 2020, section 5.1.) Parameters are given away whole, so that every optimizer works as it does on one
process, and to the bit with the same result.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from train.distributed.buckets import buckets
from train.distributed.world import World


class ZeroOptimizer:
    """Keeps an optimizer's state for a part of its parameters on each rank.

    Args:
        optimizer: of all parameters, without state yet; keeps those of this rank from now on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        everything: list[nn.Parameter] = [one for group in optimizer.param_groups for one in group["params"]]
        owners = divide([one.numel() for one in everything], world.size)
        self._of_rank = [
            [one for one, owner in zip(everything, owners, strict=True) if owner == rank] for rank in range(world.size)
        ]
        own = {id(one) for one in self._of_rank[world.rank]}
        for group in optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) in own]

    @torch.no_grad()
    def exchange(self) -> None:
        """Every rank gets what the others' optimizers made of their parameters."""
        for rank, parameters in enumerate(self._of_rank):
            for bucket in buckets(parameters):
                flat = torch.cat([one.flatten() for one in bucket])
                dist.broadcast(flat, group=self._world.group, group_src=rank)
                if rank != self._world.rank:
                    for one, values in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                        one.copy_(values.view_as(one))


def divide(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """A rank for each of some things of given sizes; the largest first, each to the rank that has least."""
    loads = [0] * num_ranks
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks
