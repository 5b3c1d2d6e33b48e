"""Tensors that are spread over ranks (DTensors): the part that lies here, norms of the whole, and back to parts."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from train.device.sending import sent


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, sharing its memory; the whole of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def norms(parts: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of each of N tensors, float64 [N], with one exchange between ranks for all of them.

    Args:
        parts: what this rank has of each.
        like: for each, a tensor that is whole or spread over ranks as it is; every rank gives the same.
    """
    squares_N = torch.stack([norm.double() for norm in torch._foreach_norm(list(parts))]) ** 2
    spread: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[int]] = {}
    for index, tensor in enumerate(like):
        if isinstance(tensor, DTensor):
            spread.setdefault((tensor.device_mesh, _summands(tensor.placements)), []).append(index)
    for (mesh, placements), numbers in spread.items():
        indices = sent(torch.tensor(numbers), squares_N.device)
        # Where a mesh has one rank, or all have the whole, this exchanges nothing.
        squares_N[indices] = DTensor.from_local(squares_N[indices], mesh, placements, run_check=False).full_tensor()
    return squares_N.sqrt()


def _summands(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """How sums over the parts of a tensor are placed: a shard has a summand, a copy has the sum."""
    return tuple(Replicate() if placement.is_replicate() else Partial() for placement in placements)


def reshard(model: nn.Module) -> None:
    """Gives back what FSDP has gathered of a model's weights: its parameters are the sharded ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
