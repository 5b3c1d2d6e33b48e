"""Sharded tensors (DTensors): local parts, norms of whole tensors, and tables with rows on all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from clipmill.train.device.transfer import send
from clipmill.train.distributed.world import World


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, sharing its memory; plain tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def norms(parts: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norms of N whole tensors, float64 [N], with one collective for all of them.

    Args:
        parts: the local part of each.
        like: for each, a tensor with the same sharding; the same on every rank.
    """
    squares_N = torch.stack([norm.double() for norm in torch._foreach_norm(list(parts))]) ** 2
    sharded: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[int]] = {}
    for index, tensor in enumerate(like):
        if isinstance(tensor, DTensor):
            sharded.setdefault((tensor.device_mesh, _summands(tensor.placements)), []).append(index)
    for (mesh, placements), members in sharded.items():
        indices = send(torch.tensor(members), squares_N.device)
        # No communication for meshes of one rank and for replicated tensors.
        squares_N[indices] = DTensor.from_local(squares_N[indices], mesh, placements, run_check=False).full_tensor()
    return squares_N.sqrt()


def _summands(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placement of sums over local parts: partial for shards, replicated for copies."""
    return tuple(Replicate() if placement.is_replicate() else Partial() for placement in placements)


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP has gathered, so that the parameters are the sharded ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ShardedRows(nn.Module):
    """A table [num_rows, C] sharded over ranks by rows, with the layout of DTensor's Shard(0).

    In `state_dict` it is one tensor `rows`, a DTensor with several ranks, which torch.distributed.checkpoint can load
    into a world of another size.

    Args:
        start: initial value of each row, C numbers.
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
        # One more row stands for rows of other ranks, so that no shape depends on how many are local.
        self.register_buffer("rows", torch.tensor(start).repeat(self._num_own + 1, 1))
        self.register_state_dict_post_hook(_show_whole)
        self.register_load_state_dict_pre_hook(_take_own)

    def read(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Rows [B, C] of `ids_B`; all ranks call it with the same ids."""
        place_B = self._places(ids_B)
        is_own_B1 = (place_B < self._num_own)[:, None]
        return self._world.sum(torch.where(is_own_B1, self.rows[place_B], 0))

    def write(self, ids_B: torch.Tensor, values_BC: torch.Tensor) -> None:
        """Set rows; all ranks call it with the same values, which must be equal for ids that occur twice."""
        self.rows[self._places(ids_B)] = values_BC.to(self.rows.dtype)

    def _places(self, ids_B: torch.Tensor) -> torch.Tensor:
        place_B = ids_B - self._first
        return torch.where((place_B >= 0) & (place_B < self._num_own), place_B, self._num_own)

    def whole(self) -> torch.Tensor:
        """All rows [num_rows, C], sharing memory with the local ones; a DTensor with several ranks."""
        own = self.rows[: self._num_own]
        if self._world.size == 1:
            return own
        if self._mesh is None or self._mesh.device_type != own.device.type:
            self._mesh = init_device_mesh(own.device.type, (self._world.size,))
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(self._shape), stride=(self._shape[1], 1)
        )

    def with_spare(self, rows: torch.Tensor) -> torch.Tensor:
        """The buffer `rows` for all rows or for this rank's part of them."""
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
