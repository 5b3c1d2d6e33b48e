"""Data parallelism: replicated (DDP, ZeRO-1) or sharded (FSDP2) models.

strategy   weights      gradients    optimizer state
ddp        replicated   replicated   replicated
zero1      replicated   replicated   sharded
fsdp       sharded      sharded      sharded
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from clipmill.train.config.training import Strategy
from clipmill.train.device.transfer import changing_buffers
from clipmill.train.distributed.world import World


def wrap_model(
    model: nn.Module,
    *,
    strategy: Strategy,
    units: Sequence[nn.Module],
    world: World,
    device: torch.device,
    products: torch.dtype | None,
) -> nn.Module:
    """Wrap `model` for forward and backward passes; its parameters remain those of `model`.

    After a backward pass within `sync_gradients(..., True)` the gradients are averaged over ranks. With FSDP `model`
    itself is modified and its parameters become DTensors.

    Args:
        units: submodules that FSDP gathers one by one.
        products: dtype in which FSDP gathers weights, that of the matrix products; None for the weights' own. Gradients
            are reduced in the dtype of the weights.
    """
    if world.size == 1:
        return model
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (world.size,))
        # Autocast decides the precision of each operation, as it does without FSDP.
        policy = MixedPrecisionPolicy(
            param_dtype=products, reduce_dtype=None if products is None else torch.float32, cast_forward_inputs=False
        )
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    # `exchange_buffers` makes buffers equal once per step, with every strategy; DDP would before each forward pass.
    devices = [device] if device.type == "cuda" else None
    return Replicated(model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False)


class Replicated(DistributedDataParallel):
    """DDP with the same buckets in every step of every process.

    The order in which ranks sum an element depends on its place in a bucket. DDP itself lays out new buckets after the
    first backward pass of a process, so that a run which is resumed would sum the gradients of its next step in another
    order than the undisturbed run. Here they are laid out once, before the first step, from the last parameter to the
    first: models define modules in the order in which they use them.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        with warnings.catch_warnings():
            # The argument that newer versions of torch name in its place is unknown to older ones.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(*arguments, **settings)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


@contextmanager
def sync_gradients(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Context for forward and backward passes of a wrapped model; gradients are reduced if it is the step's last."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
        return
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
        yield


@contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """Context in which every rank has all weights of `model`, so that forward passes need no communication."""
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
            # As fully_shard sets it: the backward pass begins with the root, which therefore stays gathered.
            unit.set_reshard_after_forward(unit is not model, recurse=False)


def average_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Average gradients over ranks after the backward pass, for models without a wrapper that does so."""
    if world.size == 1:
        return
    for bucket in buckets([one.grad for one in parameters if one.grad is not None]):
        flat = world.sum(torch.cat([one.flatten() for one in bucket])) / world.size
        for gradient, averaged in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


def exchange_buffers(model: nn.Module, world: World) -> None:
    """Send the buffers that a step has changed on rank 0 to all ranks, so that all have what a checkpoint holds.

    Batch norms normalise by the statistics of a rank's own microbatch, as with DDP. Of their running statistics those
    of rank 0 count: copies are exact and may be repeated, so that neither an evaluation nor a checkpoint changes the
    run, and a buffer of any kind can be copied, but not averaged.
    """
    if world.size > 1:
        _send(list(changing_buffers(model).values()), world, source=0)


@torch.no_grad()
def _send(tensors: Sequence[torch.Tensor], world: World, *, source: int) -> None:
    """Copy tensors of rank `source` into those of all other ranks."""
    for bucket in buckets(sorted(tensors, key=lambda tensor: str(tensor.dtype))):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.broadcast(flat, group=world.group, group_src=source)
        if world.rank != source:
            for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view_as(tensor))


class ZeroOptimizer:
    """ZeRO-1 (Rajbhandari et al. 2020, section 5.1): shards the optimizer state over ranks by whole parameters.

    Each rank steps its own parameters and sends them to the others. Whole parameters give every optimizer bit-identical
    results to those of one process.

    Args:
        optimizer: optimizer of all parameters, without state; restricted to the parameters of this rank.
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

    def exchange(self) -> None:
        """Send the updated parameters of each rank to all others."""
        for rank, parameters in enumerate(self._of_rank):
            _send(parameters, self._world, source=rank)


def divide(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign items of given sizes to ranks: greedily, the largest first, each to the rank with the least load."""
    loads = [0] * num_ranks
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


Some = TypeVar("Some", bound=torch.Tensor)
_BUCKET_BYTES = 64 << 20


def buckets(tensors: Sequence[Some]) -> list[list[Some]]:
    """Group consecutive tensors of one dtype into buckets for communication, small enough to be copied."""
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
