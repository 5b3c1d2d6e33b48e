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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from clipmill.train.config.training import Strategy
from clipmill.train.device.transfer import changing_buffers, send
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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, sharing its memory; plain tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def norms(parts: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norms of N complete tensors, float64 [N], with one collective for all of them.

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
    """Return the placement of sums over local parts: partial for shards, replicated for copies."""
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
        """Return the rows [B, C] of `ids_B`; all ranks call it with the same ids."""
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
        """Return all rows [num_rows, C], sharing memory with the local ones; a DTensor with several ranks."""
        own = self.rows[: self._num_own]
        if self._world.size == 1:
            return own
        if self._mesh is None or self._mesh.device_type != own.device.type:
            self._mesh = init_device_mesh(own.device.type, (self._world.size,))
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(self._shape), stride=(self._shape[1], 1)
        )

    def with_spare(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the buffer `rows` for all rows or for this rank's part of them."""
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
