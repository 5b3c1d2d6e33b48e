"""Layers of a pipeline's stages: every layer occurs once, in order, and the most expensive stage is minimal."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.pipeline import LayerCost, partition

MODEL = [
    LayerCost("embedding", 10),
    *[LayerCost("block", 7)] * 4,
    LayerCost("norm", 1),
    LayerCost("embedding", 30),
    *[LayerCost("block", 9)] * 2,
    LayerCost("head", 30),
]


def lowest_cost(costs: list[int], num_stages: int) -> int:
    """Return the cost of the most expensive stage for the best partition, by trying all of them."""
    largest_costs = []
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        begins = [0, *cuts, len(costs)]
        largest_costs.append(max(sum(costs[begin:end]) for begin, end in pairwise(begins)))
    return min(largest_costs)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_by_parameters_the_dearest_stage_is_as_cheap_as_can_be(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    parts = partition([LayerCost("block", cost) for cost in costs], num_stages=num_stages, rule="parameters")
    assert [number for part in parts for number in part] == list(range(len(costs)))
    assert len(parts) == num_stages and all(parts)
    assert max(sum(costs[number] for number in part) for part in parts) == lowest_cost(costs, num_stages)


@pytest.mark.parametrize(
    ("rule", "num_stages", "lengths"),
    [
        ("uniform", 3, [4, 3, 3]),
        ("type:block", 2, [4, 6]),
        ("type:block", 3, [3, 4, 3]),
        ("2,7,1", 3, [2, 7, 1]),
        ("parameters", 1, [10]),
    ],
)
def test_each_rule_cuts_as_it_says(rule: str, num_stages: int, lengths: list[int]) -> None:
    assert [len(part) for part in partition(MODEL, num_stages=num_stages, rule=rule)] == lengths


@pytest.mark.parametrize(
    ("rule", "num_stages", "message"),
    [
        ("uniform", 11, "the model has only 10 layers"),
        ("type:block", 7, "only 6 layers of this kind"),
        ("type:bloc", 2, "only 0 layers of this kind"),
        ("2,7", 2, "9 layers on 2 stages"),
        ("0,10", 2, "10 layers on 2 stages"),
        ("5,5", 3, "10 layers on 2 stages"),
        ("size", 2, "'size' is not a valid partition"),
        ("type:", 2, "'type:' is not a valid partition"),
        ("3,", 2, "'3,' is not a valid partition"),
    ],
)
def test_cuts_that_cannot_be_are_refused(rule: str, num_stages: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        partition(MODEL, num_stages=num_stages, rule=rule)
