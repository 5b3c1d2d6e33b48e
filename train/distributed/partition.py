"""Which layers lie on which stage of a pipeline: arithmetic alone."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from manifests.errors import UserError
from train.config.machine import COUNTS_RULE, TYPE_RULE, check_rule


@dataclass(frozen=True)
class LayerCost:
    """What a rule looks at: a layer's kind (`block`, say) and its number of parameters."""

    kind: str
    num_parameters: int


def partition(layers: Sequence[LayerCost], *, num_stages: int, rule: str) -> list[range]:
    """The layers of each stage, in order; each stage has one at least.

    Args:
        rule: parameters: the stage with the most parameters has as few as possible; uniform: equally many layers, the
            first stages one more where it does not divide; type:KIND: the same for the layers of a kind, others go with
            the one before them (the first ones with the one behind); 5,9: so many layers each.

    Raises:
        UserError: there are more stages than layers (of that kind), or the numbers do not add up.
    """
    check_rule(rule)
    if num_stages > len(layers):
        raise UserError(
            f"--parallel.stages is {num_stages}, and the model has {len(layers)} layers to cut between",
            hint=f"use {len(layers)} stages or fewer",
        )
    if COUNTS_RULE.fullmatch(rule):
        return _given([int(part) for part in rule.split(",")], num_layers=len(layers), num_stages=num_stages)
    if rule == "uniform":
        return _even(list(range(len(layers))), num_layers=len(layers), num_stages=num_stages)
    if rule.startswith(TYPE_RULE):
        kind = rule.removeprefix(TYPE_RULE)
        chosen = [number for number, layer in enumerate(layers) if layer.kind == kind]
        if len(chosen) < num_stages:
            kinds = ", ".join(sorted({layer.kind for layer in layers}))
            raise UserError(
                f"--parallel.partition is {rule!r}, and {len(chosen)} layers of that kind are less than "
                f"{num_stages} stages",
                hint=f"use fewer --parallel.stages, or another kind: {kinds}",
            )
        return _even(chosen, num_layers=len(layers), num_stages=num_stages)
    return _balanced([layer.num_parameters for layer in layers], num_stages=num_stages)


def _given(counts: list[int], *, num_layers: int, num_stages: int) -> list[range]:
    if len(counts) != num_stages or sum(counts) != num_layers or 0 in counts:
        raise UserError(
            f"--parallel.partition is {','.join(map(str, counts))}: {sum(counts)} layers on {len(counts)} stages",
            hint=f"name the layers of each of {num_stages} stages, 1 or more each and {num_layers} in all",
        )
    begins = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return _ranges(begins)


def _even(chosen: list[int], *, num_layers: int, num_stages: int) -> list[range]:
    """Cuts before some of the chosen layers, so that each stage has equally many of them."""
    share, rest = divmod(len(chosen), num_stages)
    firsts = [stage * share + min(stage, rest) for stage in range(1, num_stages)]
    return _ranges([0, *(chosen[first] for first in firsts), num_layers])


def _balanced(costs: list[int], *, num_stages: int) -> list[range]:
    """The cuts with the least cost of the dearest stage; of those with the same, the ones that fill first stages."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_stages(costs, middle) <= num_stages else (middle + 1, high)
    begins, spent = [0], 0
    for number, cost in enumerate(costs):
        stages_left, layers_left = num_stages - len(begins), len(costs) - number
        # The last layers go one to a stage where there would be stages without any.
        if number > begins[-1] and stages_left and (spent + cost > low or layers_left == stages_left):
            begins.append(number)
            spent = 0
        spent += cost
    return _ranges([*begins, len(costs)])


def _num_stages(costs: list[int], most: int) -> int:
    """How few stages there can be of which none costs more than `most`."""
    count, spent = 1, 0
    for cost in costs:
        count, spent = (count, spent + cost) if spent + cost <= most else (count + 1, cost)
    return count


def _ranges(begins: list[int]) -> list[range]:
    return [range(begin, end) for begin, end in itertools.pairwise(begins)]
