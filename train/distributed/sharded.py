"""Tensors that are spread over ranks (DTensors): the part that lies here, norms of the whole, and back to parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from train.device.transfer import sent
from train.distributed.world import World


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


# A table with a row for each of many things, of which each rank keeps an equal part.


class ShardedRows(nn.Module):
    """[num_rows, C] numbers; rank k keeps the k-th of equal parts of the rows, as DTensor's Shard(0) lays them out.

    In `state_dict` it is one tensor `rows`, a DTensor where there are several ranks, so that
    torch.distributed.checkpoint gives each rank of another world its part.

    Args:
        start: each row at the beginning, C numbers.
    """

    rows: torch.Tensor

    def __init__(self, num_rows: int, *, start: tuple[float, ...], world: World) -> None:
        super().__init__()
        self._shape = (num_rows, len(start))
        self._world = world
        self._mesh: DeviceMesh | None = None
        part = -(-num_rows // world.size)
        self._first = min(num_rows, world.rank * part)
        self._num_own = min(num_rows, self._first + part) - self._first
        # One row more, for what belongs to other ranks: then nothing depends on how many are ours.
        self.register_buffer("rows", torch.tensor(start).repeat(self._num_own + 1, 1))
        self.register_state_dict_post_hook(_show_whole)
        self.register_load_state_dict_pre_hook(_take_own)

    def read(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Rows [B, C] of `ids_B`, the same on all ranks, which all call it with the same ids."""
        place_B = self._places(ids_B)
        is_own_B1 = (place_B < self._num_own)[:, None]
        return self._world.sum(torch.where(is_own_B1, self.rows[place_B], 0))

    def write(self, ids_B: torch.Tensor, values_BC: torch.Tensor) -> None:
        """Sets rows; all ranks call it with the same values, and an id that occurs twice has equal ones."""
        self.rows[self._places(ids_B)] = values_BC.to(self.rows.dtype)

    def _places(self, ids_B: torch.Tensor) -> torch.Tensor:
        place_B = ids_B - self._first
        return torch.where((place_B >= 0) & (place_B < self._num_own), place_B, self._num_own)

    def whole(self) -> torch.Tensor:
        """All rows [num_rows, C], sharing memory with what is kept here; a DTensor where there are several ranks."""
        own = self.rows[: self._num_own]
        if self._world.size == 1:
            return own
        if self._mesh is None or self._mesh.device_type != own.device.type:
            self._mesh = init_device_mesh(own.device.type, (self._world.size,))
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(self._shape), stride=(self._shape[1], 1)
        )

    def with_spare(self, rows: torch.Tensor) -> torch.Tensor:
        """What `rows` keeps for `whole` rows, or for this rank's part of them."""
        own = rows.to_local() if isinstance(rows, DTensor) else rows
        if not isinstance(rows, DTensor) and len(rows) == self._shape[0]:
            own = rows[self._first : self._first + self._num_own]
        return torch.cat([own, self.rows[self._num_own :].to(own)])


def _show_whole(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    assert isinstance(module, ShardedRows)
    state[prefix + "rows"] = module.whole()


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    assert isinstance(module, ShardedRows)
    if prefix + "rows" in state and state[prefix + "rows"].shape == module._shape:
        state[prefix + "rows"] = module.with_spare(state[prefix + "rows"])
