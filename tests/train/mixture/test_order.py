"""The order of a mixture: proportions, epochs of each folder, access at any position."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.config.shards import folder_names, parse_mix
from clipmill.train.data.mixed_samples import MixedOrder
from clipmill.train.data.order import Share
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings

CASES = [
    ((100, 37), None, 1),
    ((100, 37), "2,1", 1),
    ((9, 1000, 20, 311, 64), None, 4),
    ((50, 60, 70), "0.5,0.3,0.2", 3),
    ((10, 20), "1,100", 1),
    ((997, 1009, 13), "1000,1,7", 2),
    (tuple(range(100, 110)), None, 1),
    (tuple(range(100, 110)), "7,10,3,10,10,1,50,1,2,50", 1),
    ((50, 60, 70), "101,2,101", 1),
]
LENGTH = 9_600  # positions; a multiple of the group size in all cases


def make_order(sizes: tuple[int, ...], mix: str | None, group: int, *, seed: int = 3) -> MixedOrder:
    return MixedOrder(sizes, weights=None if mix is None else parse_mix(mix), seed=seed, group=group)


def walk_order(order: MixedOrder) -> tuple[np.ndarray, np.ndarray]:
    """Return the sample and the folder at each position; -1 marks an empty position."""
    samples = order.at(np.arange(LENGTH))
    return samples, np.where(samples < 0, -1, order.folder_of(samples))


@pytest.mark.parametrize(("sizes", "mix", "group"), CASES)
def test_every_window_has_the_proportions(sizes: tuple[int, ...], mix: str | None, group: int) -> None:
    """Each window has the proportions within the number of groups in docs/data.md, and each period has them exactly."""
    order = make_order(sizes, mix, group)
    folder = walk_order(order)[1].reshape(-1, group)[:, 0]  # the first position of a group is never empty
    period = sum(order.weights)
    for number, share in enumerate(order.weights):
        before = np.cumsum(np.r_[0, folder == number])
        # A difference of two values is the surplus of the window between them.
        surplus = before - np.arange(len(before)) * share / period
        assert np.ptp(surplus) <= 8 + (len(sizes) - 1).bit_length(), number
        ends = np.arange(0, len(before), order.period)
        assert (before[ends] * period == share * ends).all()


@pytest.mark.parametrize(("sizes", "mix", "group"), CASES)
def test_each_epoch_of_a_folder_has_each_of_its_samples_once(
    sizes: tuple[int, ...], mix: str | None, group: int
) -> None:
    order = make_order(sizes, mix, group)
    samples, folder = walk_order(order)
    for number, size in enumerate(sizes):
        folder_samples = samples[folder == number] - order.offsets[number]
        for begin in range(0, len(folder_samples) - size + 1, size):
            assert sorted(folder_samples[begin : begin + size].tolist()) == list(range(size))
    if mix is None:
        length = sum(-(-size // group) * group for size in sizes)
        first = samples[:length]
        assert sorted(first[first >= 0].tolist()) == list(range(sum(sizes)))
        assert order.visits_per_epoch() == [1.0] * len(sizes)


@pytest.mark.parametrize(("sizes", "mix", "group"), CASES)
def test_any_position_and_any_count_is_known_without_those_before_it(
    sizes: tuple[int, ...], mix: str | None, group: int
) -> None:
    order = make_order(sizes, mix, group)
    samples, folder = walk_order(order)
    shuffled = np.random.default_rng(0).permutation(LENGTH)
    assert (order.at(shuffled) == samples[shuffled]).all()
    for position in (0, 1, 17, 99, 1234, 5555, LENGTH - 1):
        expected = np.bincount(folder[:position][folder[:position] >= 0], minlength=len(sizes))
        assert order.counts(position) == expected.tolist()
    far = np.arange(10**15, 10**15 + 50)
    assert order.at(far).tolist() == [int(order.at(far[at : at + 1])[0]) for at in range(50)]


@pytest.mark.parametrize(("sizes", "mix", "group"), CASES)
def test_a_group_is_of_one_folder(sizes: tuple[int, ...], mix: str | None, group: int) -> None:
    for row in walk_order(make_order(sizes, mix, group))[1].reshape(-1, group):
        assert len(set(row[row >= 0])) == 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_each_rank_gets_the_proportions(num_ranks: int) -> None:
    """The numbers of ranks and folders may have a common divisor. Folders may differ in speed."""
    for sizes, mix in (((100, 100), "1,1"), ((100,) * 8, None), ((100, 50, 50), "2,1,1"), ((101, 299), None)):
        order = make_order(sizes, mix, 1)
        for rank in range(num_ranks):
            folders = order.folder_of(order.at(Share(rank, num_ranks).at(np.arange(600))))
            shares = np.bincount(folders, minlength=len(sizes)) / len(folders)
            assert np.abs(shares - np.array(order.weights) / sum(order.weights)).max() < 0.05


def test_seeds_have_orders_of_their_own_and_equal_folders_too() -> None:
    orders = [tuple(make_order((50, 50), "1,1", 1, seed=seed).at(np.arange(200))) for seed in range(5)]
    assert len(set(orders)) == 5
    samples, folder = walk_order(make_order((50, 50), "1,1", 1))
    assert samples[folder == 0][:50].tolist() != (samples[folder == 1][:50] - 50).tolist()


def test_weights_are_read_exactly() -> None:
    assert parse_mix("2, 1") == (Fraction(2), Fraction(1))
    assert parse_mix("0.7,0.3") == (Fraction(7, 10), Fraction(3, 10))
    assert make_order((5, 5), "0.7,0.3", 1).weights == (7, 3) and make_order((5, 5), "4,2", 1).weights == (2, 1)


@pytest.mark.parametrize("mix", ["0,1", "-1,2", "a,b", "1,,2", "", "nan,1", "inf,1", "1e9,1", "0.33333333333,1"])
def test_a_weight_that_is_none_is_named(mix: str) -> None:
    with pytest.raises(UserError, match=f"--mix {mix}: "):
        parse_mix(mix)


def test_folders_have_names_that_tell_them_apart() -> None:
    assert folder_names(("/x/a", "s3://bucket/b/")) == ("a", "b")
    assert folder_names(("/x/data", "/y/data")) == ("x-data", "y-data")
    assert folder_names(("s3://bucket/my data", "/a/b")) == ("my-data", "b")
    assert folder_names(("/a/x y", "/a/x-y")) == ("a-x-y-1", "a-x-y-2")


def test_a_loop_of_links_is_compared_like_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="but they are the same folder"):
        DualEncoderSettings(shards=(f"{tmp_path}/loop", f"{tmp_path}/b/../loop"))
    assert folder_names((f"{tmp_path}/loop", "/x/b")) == ("loop", "b")
