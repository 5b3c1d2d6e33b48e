"""Forward passes through the stages of a pipeline without microbatches: each stage waits for the one before it."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from train.distributed.world import World

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 6

Tensors = tuple[torch.Tensor, ...]


def run_along(stages: World, run: Callable[[Tensors], Tensors], *, first: int = 0, device: torch.device) -> Tensors:
    """Calls `run` on each rank of a pipeline from `first` on with what it gave on the rank before, () on the first.

    Returns:
        What it gave on this rank; () on ranks before `first`.
    """
    if stages.rank < first:
        return ()
    given = _received(stages, device=device) if stages.rank > first else ()
    found = run(given)
    if stages.rank < stages.size - 1:
        _send(found, stages)
    return found


def from_last(stages: World, tensor: torch.Tensor | None, *, device: torch.device) -> torch.Tensor:
    """The last rank's tensor, on all ranks; others give None."""
    if stages.size == 1:
        assert tensor is not None
        return tensor
    last = stages.size - 1
    header = _header(tensor) if stages.rank == last and tensor is not None else _no_header()
    dist.broadcast(header, group=stages.group, group_src=last)
    # A copy: whoever gets it may write into it.
    shared = _room(header, device=device) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, group=stages.group, group_src=last)
    return shared


def _send(tensors: Tensors, stages: World) -> None:
    dist.send(torch.tensor([len(tensors)]), group=stages.group, group_dst=stages.rank + 1)
    for tensor in tensors:
        dist.send(_header(tensor), group=stages.group, group_dst=stages.rank + 1)
        dist.send(tensor.contiguous(), group=stages.group, group_dst=stages.rank + 1)


def _received(stages: World, *, device: torch.device) -> Tensors:
    count = torch.zeros(1, dtype=torch.int64)
    dist.recv(count, group=stages.group, group_src=stages.rank - 1)
    found = []
    for _ in range(int(count)):
        header = _no_header()
        dist.recv(header, group=stages.group, group_src=stages.rank - 1)
        room = _room(header, device=device)
        dist.recv(room, group=stages.group, group_src=stages.rank - 1)
        found.append(room)
    return tuple(found)


def _header(tensor: torch.Tensor) -> torch.Tensor:
    """Type, number of dimensions and size of a tensor: on the CPU, which needs no GPU to wait."""
    header = _no_header()
    numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def _no_header() -> torch.Tensor:
    return torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64)


def _room(header: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    dtype, num_dimensions, *shape = header.tolist()
    return torch.empty(shape[:num_dimensions], dtype=_DTYPES[dtype], device=device)
