"""Data parallelism: replicated (DDP, ZeRO-1) or sharded (FSDP2) models, and tables whose rows are sharded over ranks.

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
    matmul_dtype: torch.dtype | None,
) -> nn.Module:
    """Wrap `model` for forward and backward passes. The wrapper and `model` share their parameters.

    After a backward pass within `sync_gradients(..., True)`, the gradients are averaged over the ranks. With FSDP,
    `model` itself is modified, and its parameters become DTensors.

    Args:
        units: Submodules that FSDP gathers one at a time.
        matmul_dtype: Dtype of matrix products; None for the dtype of the weights. FSDP casts weights to this dtype
            before it gathers them. Gradients are reduced in the dtype of the weights.
    """
    if world.size == 1:
        return model
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (world.size,))
        # Autocast decides the precision of each operation, as it does without FSDP.
        policy = MixedPrecisionPolicy(
            param_dtype=matmul_dtype,
            reduce_dtype=None if matmul_dtype is None else torch.float32,
            cast_forward_inputs=False,
        )
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    # `exchange_buffers` synchronises buffers once per step for every strategy. DDP would do so in each forward pass.
    devices = [device] if device.type == "cuda" else None
    return Replicated(model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False)


class Replicated(DistributedDataParallel):
    """DDP that uses the same buckets in every step of every process.

    The order in which the ranks sum an element depends on its position in a bucket. DDP changes its buckets after the
    first backward pass of a process, so a resumed run would sum the gradients of its next step in a different order
    than an uninterrupted run. This class fills the buckets only once, before the first step, from the last parameter to
    the first, because models define modules in the order of their use.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        with warnings.catch_warnings():
            # Newer versions of torch recommend an argument that older versions lack.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(*arguments, **settings)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()
        return parameters[::-1], are_sparse[::-1]


@contextmanager
def sync_gradients(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Context manager for the forward and backward pass of a wrapped model. Gradients are reduced if `is_last`."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
        return
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
        yield


@contextmanager
def unshard(model: nn.Module) -> Iterator[None]:
    """Give every rank all weights of `model` within the block, so that forward passes do not communicate."""
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
            # Restore the setting of fully_shard: the root stays gathered, because the backward pass begins with it.
            unit.set_reshard_after_forward(unit is not model, recurse=False)


def average_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Average gradients over the ranks, after the backward pass of a module without a wrapper that averages them."""
    if world.size == 1:
        return
    for bucket in buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        averages = world.sum(torch.cat([gradient.flatten() for gradient in bucket])) / world.size
        for gradient, average in zip(bucket, averages.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(average.view_as(gradient))


def exchange_buffers(model: nn.Module, world: World) -> None:
    """Copy `changing_buffers` of rank 0 to all ranks, so that every rank has the buffers of the checkpoint.

    As with DDP, a batch norm normalises with the statistics of the rank's microbatch. All ranks take the running
    statistics of rank 0, for two reasons: copies are exact and can be repeated, so that neither an evaluation nor a
    checkpoint changes the run; and every buffer can be copied, but not every buffer can be averaged.
    """
    if world.size > 1:
        _send(list(changing_buffers(model).values()), world, source=0)


@torch.no_grad()
def _send(tensors: Sequence[torch.Tensor], world: World, *, source: int) -> None:
    """Copy the tensors of rank `source` into the tensors of all other ranks."""
    for bucket in buckets(sorted(tensors, key=lambda tensor: str(tensor.dtype))):
        flat_values = torch.cat([tensor.flatten() for tensor in bucket])
        dist.broadcast(flat_values, group=world.group, group_src=source)
        if world.rank != source:
            for tensor, values in zip(bucket, flat_values.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view_as(tensor))


class ZeroOptimizer:
    """ZeRO-1 (Rajbhandari et al. 2020, section 5.1): shard the optimizer state over ranks, parameter by parameter.

    Each rank updates its own parameters and sends them to the other ranks. Because parameters are not divided, the
    results of every optimizer are bit-identical to the results of a single process.

    Args:
        optimizer: Optimizer of all parameters, without state. This class removes the parameters of other ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = divide([parameter.numel() for parameter in parameters], world.size)
        self._parameters_by_rank: list[list[nn.Parameter]] = [[] for _ in range(world.size)]
        for parameter, owner in zip(parameters, owners, strict=True):
            self._parameters_by_rank[owner].append(parameter)
        local_ids = {id(parameter) for parameter in self._parameters_by_rank[world.rank]}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in local_ids]

    def exchange(self) -> None:
        """Send the updated parameters of each rank to all other ranks."""
        for rank, parameters in enumerate(self._parameters_by_rank):
            _send(parameters, self._world, source=rank)


def divide(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each item. Each item, from the largest to the smallest, goes to the least loaded rank."""
    loads = [0] * num_ranks
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)
_BUCKET_BYTES = 64 << 20


def buckets(tensors: Sequence[AnyTensor]) -> list[list[AnyTensor]]:
    """Group consecutive tensors of the same dtype into buckets that are small enough to copy for communication."""
    groups: list[list[AnyTensor]] = []
    size_bytes = 0
    for tensor in tensors:
        added_bytes = tensor.numel() * tensor.element_size()
        if not groups or size_bytes + added_bytes > _BUCKET_BYTES or groups[-1][0].dtype != tensor.dtype:
            groups.append([])
            size_bytes = 0
        groups[-1].append(tensor)
        size_bytes += added_bytes
    return groups


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor without copying it. Return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def norms(parts: Sequence[torch.Tensor], *, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norms of N complete tensors as float64 [N], the same on every rank.

    One collective is needed for each kind of sharding.

    Args:
        parts: Local part of each tensor.
        like: Tensors that are sharded like the complete tensors.
    """
    squares_N = torch.stack([norm.double() for norm in torch._foreach_norm(list(parts))]) ** 2
    indices_by_layout: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[int]] = {}
    for index, tensor in enumerate(like):
        if isinstance(tensor, DTensor):
            # The sum over a shard is partial; the sum over a replica is complete.
            sums = tuple(Replicate() if placement.is_replicate() else Partial() for placement in tensor.placements)
            indices_by_layout.setdefault((tensor.device_mesh, sums), []).append(index)
    for (mesh, placements), layout_indices in indices_by_layout.items():
        indices = send(torch.tensor(layout_indices), squares_N.device)
        # Meshes of one rank and replicated tensors need no communication.
        squares_N[indices] = DTensor.from_local(squares_N[indices], mesh, placements, run_check=False).full_tensor()
    return squares_N.sqrt()


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP has gathered, so that the parameters are sharded again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ShardedRows(nn.Module):
    """Table [num_rows, C] whose rows are sharded over ranks, with the layout of DTensor's Shard(0).

    The table is the tensor `rows` in `state_dict`: a DTensor if there are several ranks, so that
    torch.distributed.checkpoint can load it into a world of a different size.

    Args:
        start: Initial values of each row, C numbers.
    """

    rows: torch.Tensor

    def __init__(self, num_rows: int, *, start: tuple[float, ...], world: World) -> None:
        super().__init__()
        self._shape = (num_rows, len(start))
        self._world = world
        self._mesh: DeviceMesh | None = None
        part = -(-num_rows // world.size)
        self._first_row = min(num_rows, world.rank * part)
        self._num_local = min(num_rows, self._first_row + part) - self._first_row
        # An additional row stands for all rows of other ranks, so that shapes do not depend on which rows are local.
        self.register_buffer("rows", torch.tensor(start).repeat(self._num_local + 1, 1))
        self.register_state_dict_post_hook(_put_all_rows)
        self.register_load_state_dict_pre_hook(_take_local_rows)

    def read(self, ids_B: torch.Tensor) -> torch.Tensor:
        """Return the rows [B, C] with the given IDs. All ranks must call this method with the same IDs."""
        index_B = self._local_indices(ids_B)
        is_local_B1 = (index_B < self._num_local)[:, None]
        return self._world.sum(torch.where(is_local_B1, self.rows[index_B], 0))

    def write(self, ids_B: torch.Tensor, values_BC: torch.Tensor) -> None:
        """Set the rows with the given IDs. All ranks must call this method with the same IDs and values.

        Repeated IDs must have equal values.
        """
        self.rows[self._local_indices(ids_B)] = values_BC.to(self.rows.dtype)

    def _local_indices(self, ids_B: torch.Tensor) -> torch.Tensor:
        index_B = ids_B - self._first_row
        return torch.where((index_B >= 0) & (index_B < self._num_local), index_B, self._num_local)

    def all_rows(self) -> torch.Tensor:
        """Return all rows [num_rows, C] without copying them; a DTensor if there are several ranks."""
        local_rows = self.rows[: self._num_local]
        if self._world.size == 1:
            return local_rows
        if self._mesh is None or self._mesh.device_type != local_rows.device.type:
            self._mesh = init_device_mesh(local_rows.device.type, (self._world.size,))
        return DTensor.from_local(
            local_rows,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(self._shape),
            stride=(self._shape[1], 1),
        )

    def local_buffer(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a buffer with this rank's part of `rows`, followed by the additional row."""
        local_rows = rows.to_local() if isinstance(rows, DTensor) else rows
        if not isinstance(rows, DTensor) and len(rows) == self._shape[0]:
            local_rows = rows[self._first_row : self._first_row + self._num_local]
        return torch.cat([local_rows, self.rows[self._num_local :].to(local_rows)])


def _put_all_rows(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    assert isinstance(module, ShardedRows)
    state[prefix + "rows"] = module.all_rows()


def _take_local_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, ShardedRows)
    if prefix + "rows" in state and state[prefix + "rows"].shape == module._shape:
        state[prefix + "rows"] = module.local_buffer(state[prefix + "rows"])
