from collections import Counter
from collections.abc import Set

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.train.data.order import Cursor, SampleOrder, Share, merge_cursors, permute


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 64, 65, 1000, 4097])
@pytest.mark.parametrize("epoch", [0, 1, 12])
def test_an_epoch_visits_every_sample_once(num_samples: int, epoch: int) -> None:
    visited = permute(np.arange(num_samples), num_samples, seed=3, epoch=epoch)
    assert sorted(visited.tolist()) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    places = np.arange(1000)
    orders = [tuple(permute(places, 1000, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == len(orders)


def test_a_jump_into_a_billion_samples_gives_what_walking_gives() -> None:
    order = SampleOrder(num_samples=1_000_000_007, seed=1)
    far = 3 * 1_000_000_007 + 999_999_000
    together = order.at(np.arange(far, far + 64))
    alone = [int(order.at(np.array([position]))[0]) for position in range(far, far + 64)]
    assert together.tolist() == alone
    assert len(set(alone)) == 64 and max(alone) < 1_000_000_007


@pytest.mark.parametrize("of_nothing", [{"num_samples": 0}, {"num_samples": 4, "group": 0}])
def test_an_order_of_nothing_is_refused(of_nothing: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs at least one sample"):
        SampleOrder(seed=0, **of_nothing)


def test_positions_run_on_into_the_next_epoch() -> None:
    order = SampleOrder(num_samples=10, seed=0)
    samples = order.at(np.arange(30))
    for epoch in range(3):
        part = samples[10 * epoch : 10 * epoch + 10]
        assert sorted(part.tolist()) == list(range(10))
        assert part.tolist() == permute(np.arange(10), 10, seed=0, epoch=epoch).tolist()


def test_ranks_have_equal_shares_that_make_up_the_whole() -> None:
    for group in (1, 5):
        parts = [Share(rank, 4, group).at(np.arange(10, 15)) for rank in range(4)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(40, 60))
    assert Share(1, 2, 3).at(np.arange(1, 5)).tolist() == [4, 5, 9, 10]


@pytest.mark.parametrize(("num_samples", "group"), [(20, 3), (21, 3), (2, 5), (1, 1), (1000, 7)])
def test_groups_stay_in_a_row_and_an_epoch_holds_every_sample_once(num_samples: int, group: int) -> None:
    order = SampleOrder(num_samples, seed=3, group=group)
    for epoch in range(3):
        begin = epoch * order.positions_per_epoch
        samples = order.at(np.arange(begin, begin + order.positions_per_epoch))
        assert sorted(samples[samples >= 0].tolist()) == list(range(num_samples))
        for row in samples.reshape(-1, group):
            filled = row[row >= 0]
            assert (np.diff(filled) == 1).all() and filled[0] % group == 0


def test_the_order_looks_random() -> None:
    """Successive samples are as far apart as random ones, and no sample keeps its position between epochs."""
    num_samples = 20_000
    visited = permute(np.arange(num_samples), num_samples, seed=0, epoch=0)
    steps = np.abs(np.diff(visited)) / num_samples
    assert abs(steps.mean() - 1 / 3) < 0.01  # the mean distance between two uniform positions
    other = permute(np.arange(num_samples), num_samples, seed=0, epoch=1)
    assert (visited == other).sum() < 10
    assert abs(np.corrcoef(visited, other)[0, 1]) < 0.03


def test_the_order_is_what_it_was() -> None:
    """A run of an older version must resume in the same order, so a change here requires a new checkpoint format."""
    assert SampleOrder(num_samples=100, seed=0).at(np.arange(98, 104)).tolist() == [82, 71, 83, 84, 18, 96]


def batches_of(
    begin: Cursor, share: Share, *, batch: int, num_batches: int, failing: Set[int]
) -> tuple[list[list[int]], list[int], Cursor]:
    """Return the batches that a rank takes, all positions that it visits for them, and the cursor after them."""
    positions = begin.positions(0, batch * num_batches + len(failing), share).tolist()
    good = [at for at in positions if at not in failing][: batch * num_batches]
    taken = positions[: positions.index(good[-1]) + 1] if good else []
    batches = [good[first : first + batch] for first in range(0, len(good), batch)]
    return batches, taken, begin.advance(len(good), len(taken), share)


@settings(max_examples=150, deadline=None)
@given(
    num_ranks=st.integers(1, 5),
    then=st.integers(1, 5),
    group=st.integers(1, 9),
    batch=st.integers(1, 7),
    stop=st.integers(0, 5),
    failing=st.sets(st.integers(0, 150), max_size=20),
)
def test_resumed_ranks_take_what_is_left_and_as_many_ranks_the_batches_that_they_would_have_taken(
    num_ranks: int, then: int, group: int, batch: int, stop: int, failing: set[int]
) -> None:
    """This holds for any groups, batch sizes and failures."""
    whole, taken, cursors = [], Counter[int](), []
    for rank in range(num_ranks):
        share = Share(rank, num_ranks, group)
        whole.append(batches_of(Cursor(0), share, batch=batch, num_batches=stop + 3, failing=failing)[0])
        _, positions, cursor = batches_of(Cursor(0), share, batch=batch, num_batches=stop, failing=failing)
        taken.update(positions)
        cursors.append(cursor)
    state = merge_cursors(cursors)
    for rank in range(num_ranks):
        share = Share(rank, num_ranks, group)
        assert batches_of(state, share, batch=batch, num_batches=3, failing=failing)[0] == whole[rank][stop:]
    if not failing and batch % group == 0:
        assert state == Cursor(num_ranks * stop * batch)
    # A different number of ranks takes twice as many samples each, and then a single rank continues.
    cursors = []
    for rank in range(then):
        _, positions, cursor = batches_of(
            state, Share(rank, then, group), batch=2 * batch, num_batches=2, failing=failing
        )
        taken.update(positions)
        cursors.append(cursor)
    taken.update(merge_cursors(cursors).positions(0, 200, Share()).tolist())
    assert set(taken.values()) == {1} and sorted(taken) == list(range(max(taken) + 1))
