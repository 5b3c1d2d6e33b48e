"""A model spread over ranks: copies that average their gradients (DDP, ZeRO-1), or parts (FSDP2).

strategy   weights      gradients    optimizer's state
ddp        everywhere   everywhere   everywhere
zero1      everywhere   everywhere   in parts            (train.distributed.parallel)
fsdp       in parts     in parts     in parts
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from train.config.machine import Strategy
from train.distributed.world import World


def wrap_model(
    model: nn.Module,
    *,
    strategy: Strategy,
    units: Sequence[nn.Module],
    world: World,
    device: torch.device,
    products: torch.dtype | None,
) -> nn.Module:
    """What stands for `model` in forward and backward passes; its parameters stay those of `model`.

    Averaged over ranks, the gradients are in place after a backward pass within `synced(..., True)`. With FSDP `model`
    itself becomes a module whose parameters are DTensors.

    Args:
        units: submodules that FSDP gathers one by one.
        products: what FSDP gathers weights in: the precision of the model's products, None for that of the weights.
            Gradients are summed in the precision of the weights.
    """
    if world.size == 1:
        return model
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (world.size,))
        # Autocast decides what is computed in which precision, as it does without FSDP.
        policy = MixedPrecisionPolicy(
            param_dtype=products,
            reduce_dtype=None if products is None else torch.float32,
            cast_forward_inputs=False,
        )
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


@contextmanager
def synced(model: nn.Module, is_last: bool) -> Iterator[None]:
    """A forward and backward pass of the spread `model`; ranks exchange gradients if it is the last of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
        return
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
        yield


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Within, every rank has all weights of `model`, and forward passes exchange nothing."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        yield
        return
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            # As fully_shard sets it: the root is needed again at once, when the backward pass begins.
            unit.set_reshard_after_forward(unit is not model, recurse=False)


def average_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Averages gradients over ranks, where no wrapper does it: together, after the backward pass."""
    if world.size == 1:
        return
    for bucket in buckets([one.grad for one in parameters if one.grad is not None]):
        flat = world.sum(torch.cat([one.flatten() for one in bucket])) / world.size
        for gradient, averaged in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


# ZeRO-1: each rank has the optimizer's state of its own parameters, and sends them to the others after a step.
#
# (Rajbhandari et al. 2020, section 5.1.) Parameters are given away whole, so that every optimizer works as it does on
# one process, and to the bit with the same result.


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


# Tensors that are exchanged together: many small ones cost as little as one, and the copy of all of them is small.


Some = TypeVar("Some", bound=torch.Tensor)
_BUCKET_BYTES = 64 << 20


def buckets(tensors: Sequence[Some]) -> list[list[Some]]:
    """Runs of tensors of one type, each small enough that its copy does not weigh."""
    found: list[list[Some]] = []
    size_bytes = 0
    for one in tensors:
        added_bytes = one.numel() * one.element_size()
        if not found or size_bytes + added_bytes > _BUCKET_BYTES or found[-1][0].dtype != one.dtype:
            found.append([])
            size_bytes = 0
        found[-1].append(one)
        size_bytes += added_bytes
    return found
