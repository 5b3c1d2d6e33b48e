import numpy as np
import pytest

from train.data.order import SampleOrder, permute, positions_of_rank


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


def test_positions_run_on_into_the_next_epoch() -> None:
    order = SampleOrder(num_samples=10, seed=0)
    samples = order.at(np.arange(30))
    for epoch in range(3):
        part = samples[10 * epoch : 10 * epoch + 10]
        assert sorted(part.tolist()) == list(range(10))
        assert part.tolist() == permute(np.arange(10), 10, seed=0, epoch=epoch).tolist()


def test_ranks_take_equal_parts_that_make_up_the_whole() -> None:
    for group in (1, 5):
        parts = [positions_of_rank(10, 5, rank=rank, num_ranks=4, group=group) for rank in range(4)]
        assert [len(part) for part in parts] == [5] * 4
        assert sorted(np.concatenate(parts).tolist()) == list(range(40, 60))
    assert positions_of_rank(1, 4, rank=1, num_ranks=2, group=3).tolist() == [4, 5, 9, 10]


@pytest.mark.parametrize(("num_samples", "group"), [(20, 3), (21, 3), (2, 5), (1, 1), (1000, 7)])
def test_groups_stay_in_a_row_and_an_epoch_holds_every_sample_once(num_samples: int, group: int) -> None:
    order = SampleOrder(num_samples, seed=3, group=group)
    for epoch in range(3):
        begin = epoch * order.positions_per_epoch
        samples = order.at(np.arange(begin, begin + order.positions_per_epoch))
        assert sorted(samples[samples >= 0].tolist()) == list(range(num_samples))
        for row in samples.reshape(-1, group):
            there = row[row >= 0]
            assert (np.diff(there) == 1).all() and there[0] % group == 0


def test_the_order_looks_random() -> None:
    """Successive samples are as far apart as random ones, and no sample keeps its place from epoch to epoch."""
    num_samples = 20_000
    visited = permute(np.arange(num_samples), num_samples, seed=0, epoch=0)
    steps = np.abs(np.diff(visited)) / num_samples
    assert abs(steps.mean() - 1 / 3) < 0.01  # the mean distance of two uniform places
    other = permute(np.arange(num_samples), num_samples, seed=0, epoch=1)
    assert (visited == other).sum() < 10
    assert abs(np.corrcoef(visited, other)[0, 1]) < 0.03


def test_the_order_is_what_it_was() -> None:
    """A run of an older version must resume in the same order: a change here needs a new checkpoint format."""
    assert SampleOrder(num_samples=100, seed=0).at(np.arange(98, 104)).tolist() == [82, 71, 83, 84, 18, 96]
