"""A model spread over ranks: copies that average their gradients (DDP, ZeRO-1), or parts (FSDP2).

strategy   weights      gradients    optimizer's state
ddp        everywhere   everywhere   everywhere
zero1      everywhere   everywhere   in parts            (train.distributed.zero)
fsdp       in parts     in parts     in parts
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from train.config.machine import Strategy
from train.distributed.buckets import buckets
from train.distributed.world import World


def spread(
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
def whole(model: nn.Module) -> Iterator[None]:
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
