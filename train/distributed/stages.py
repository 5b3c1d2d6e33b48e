"""Pipeline stages: which layers each stage gets, and forward passes through the stages without microbatches."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import COUNTS_RULE, TYPE_RULE, check_rule
from clipmill.train.distributed.world import World

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMENSIONS = 6

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LayerCost:
    """A layer's kind (for example `block`) and its number of parameters, which partition rules use."""

    kind: str
    num_parameters: int


def partition(layers: Sequence[LayerCost], *, num_stages: int, rule: str) -> list[range]:
    """Assign consecutive layers to stages; each stage gets at least one.

    Args:
        rule: `parameters` minimises the largest number of parameters of a stage. `uniform` distributes the layers
            evenly, with the remainder on the first stages. `type:KIND` does the same for the layers of a kind; other
            layers follow the one before them (or, at the beginning, precede the first). `5,9` gives their numbers.

    Raises:
        UserError: there are fewer layers (of that kind) than stages, or the numbers do not add up.
    """
    check_rule(rule)
    if num_stages > len(layers):
        raise UserError(
            f"--parallel.stages is {num_stages}, and the model has {len(layers)} layers to cut between",
            hint=f"use {len(layers)} stages or fewer",
            flags=("--parallel.stages",),
        )
    if COUNTS_RULE.fullmatch(rule):
        return _given_ranges([int(part) for part in rule.split(",")], num_layers=len(layers), num_stages=num_stages)
    if rule == "uniform":
        return _even_ranges(list(range(len(layers))), num_layers=len(layers), num_stages=num_stages)
    if rule.startswith(TYPE_RULE):
        kind = rule.removeprefix(TYPE_RULE)
        chosen = [number for number, layer in enumerate(layers) if layer.kind == kind]
        if len(chosen) < num_stages:
            kinds = ", ".join(sorted({layer.kind for layer in layers}))
            raise UserError(
                f"--parallel.partition is {rule!r}, and {len(chosen)} layers of that kind are less than "
                f"{num_stages} stages",
                hint=f"use fewer --parallel.stages, or another kind: {kinds}",
                flags=("--parallel.partition",),
            )
        return _even_ranges(chosen, num_layers=len(layers), num_stages=num_stages)
    return _balanced_ranges([layer.num_parameters for layer in layers], num_stages=num_stages)


def _given_ranges(counts: list[int], *, num_layers: int, num_stages: int) -> list[range]:
    if len(counts) != num_stages or sum(counts) != num_layers or 0 in counts:
        raise UserError(
            f"--parallel.partition is {','.join(map(str, counts))}: {sum(counts)} layers on {len(counts)} stages",
            hint=f"name the layers of each of {num_stages} stages, 1 or more each and {num_layers} in all",
            flags=("--parallel.partition",),
        )
    begins = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return _ranges(begins)


def _even_ranges(chosen: list[int], *, num_layers: int, num_stages: int) -> list[range]:
    """Cut so that the chosen layers are distributed evenly."""
    share, rest = divmod(len(chosen), num_stages)
    firsts = [stage * share + min(stage, rest) for stage in range(1, num_stages)]
    return _ranges([0, *(chosen[first] for first in firsts), num_layers])


def _balanced_ranges(costs: list[int], *, num_stages: int) -> list[range]:
    """Minimise the cost of the most expensive stage; among equal solutions, fill the first stages."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_stages(costs, middle) <= num_stages else (middle + 1, high)
    begins, spent = [0], 0
    for number, cost in enumerate(costs):
        stages_left, layers_left = num_stages - len(begins), len(costs) - number
        # One layer per stage at the end, where stages would otherwise get none.
        if number > begins[-1] and stages_left and (spent + cost > low or layers_left == stages_left):
            begins.append(number)
            spent = 0
        spent += cost
    return _ranges([*begins, len(costs)])


def _num_stages(costs: list[int], most: int) -> int:
    """Minimum number of stages none of which costs more than `most`."""
    count, spent = 1, 0
    for cost in costs:
        count, spent = (count, spent + cost) if spent + cost <= most else (count + 1, cost)
    return count


def _ranges(begins: list[int]) -> list[range]:
    return [range(begin, end) for begin, end in itertools.pairwise(begins)]


def run_along(stages: World, run: Callable[[Tensors], Tensors], *, first: int = 0, device: torch.device) -> Tensors:
    """Call `run` on the ranks of a pipeline in turn, from rank `first`, with the previous rank's result (initially ()).

    Returns:
        The result on this rank; () on ranks before `first`.
    """
    if stages.rank < first:
        return ()
    found = run(_receive_tensors(stages, device=device) if stages.rank > first else ())
    if stages.rank < stages.size - 1:
        _send(found, stages)
    return found


def broadcast_from_last(stages: World, tensor: torch.Tensor | None, *, device: torch.device) -> torch.Tensor:
    """Broadcast the last rank's tensor; the other ranks pass None."""
    if stages.size == 1:
        assert tensor is not None
        return tensor
    last = stages.size - 1
    header = _header(tensor if stages.rank == last else None)
    dist.broadcast(header, group=stages.group, group_src=last)
    shared = _empty_tensor(header, device=device) if tensor is None else tensor.contiguous()
    dist.broadcast(shared, group=stages.group, group_src=last)
    return shared


def _send(tensors: Tensors, stages: World) -> None:
    send = partial(dist.send, group=stages.group, group_dst=stages.rank + 1)
    send(torch.tensor([len(tensors)]))
    for tensor in tensors:
        send(_header(tensor))
        send(tensor.contiguous())


def _receive_tensors(stages: World, *, device: torch.device) -> Tensors:
    receive = partial(dist.recv, group=stages.group, group_src=stages.rank - 1)
    count = torch.zeros(1, dtype=torch.int64)
    receive(count)
    found = []
    for _ in range(int(count)):
        header = _header(None)
        receive(header)
        found.append(_empty_tensor(header, device=device))
        receive(found[-1])
    return tuple(found)


def _header(tensor: torch.Tensor | None) -> torch.Tensor:
    """Dtype, number of dimensions and shape of a tensor; zeros for None. On the CPU, so that no GPU has to wait."""
    header = torch.zeros(2 + _MAX_DIMENSIONS, dtype=torch.int64)
    if tensor is not None:
        numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        header[: len(numbers)] = torch.tensor(numbers)
    return header


def _empty_tensor(header: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    dtype, num_dimensions, *shape = header.tolist()
    return torch.empty(shape[:num_dimensions], dtype=_DTYPES[dtype], device=device)
