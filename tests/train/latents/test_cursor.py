"""Ranks, batch sizes and resuming: every sample of an epoch exactly once, whatever they are."""

from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.manifests.errors import UserError
from clipmill.train.data.latents.loader import LatentLoader
from tests.train.latents.querying import segments
from tests.train.latents.written import Written

SEED = 11


def loader(written: Written, **settings: Any) -> LatentLoader:
    return LatentLoader(segments(written.data_dir, split="train", **{"seed": SEED, "can_keep": True, **settings}))


def shown(loaded: Any) -> list[tuple[int, str, int, bytes]]:
    batch = loaded.batch
    return [
        (int(position), key, int(caption), latents.numpy().tobytes())
        for position, key, caption, latents in zip(
            batch["position"], batch["key"], batch["caption_id"], batch["latents"], strict=True
        )
    ]


@pytest.fixture(scope="module")
def walk(written: Written) -> list[tuple[int, str, int, bytes]]:
    """What is shown at the first positions, one after another."""
    return [one for loaded in islice(loader(written, batch=1), 200) for one in shown(loaded)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [1, 4, 5])
def test_the_ranks_together_show_every_sample_of_an_epoch_once(
    written: Written, walk: list[tuple[int, str, int, bytes]], num_ranks: int, batch: int
) -> None:
    num_samples = len(loader(written))
    num_batches = -(-2 * num_samples // (batch * num_ranks))
    together_shown = [
        one
        for rank in range(num_ranks)
        for loaded in islice(loader(written, batch=batch, rank=rank, num_ranks=num_ranks), num_batches)
        for one in shown(loaded)
    ]
    assert sorted(together_shown) == walk[: num_batches * batch * num_ranks]
    for epoch in range(2):
        of_epoch = [latents for position, _, _, latents in together_shown if position // num_samples == epoch]
        assert len(of_epoch) == len(set(of_epoch)) == num_samples


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_evaluation_shows_every_sample_once_and_ranks_differ_by_one_at_most(written: Written, num_ranks: int) -> None:
    numbers = [
        [
            position
            for loaded in loader(written, batch=3, rank=rank, num_ranks=num_ranks).evaluation_batches()
            for position in loaded.batch["position"].tolist()
        ]
        for rank in range(num_ranks)
    ]
    assert sorted(chain.from_iterable(numbers)) == list(range(len(loader(written))))
    assert max(map(len, numbers)) - min(map(len, numbers)) <= 1


@settings(max_examples=25, deadline=None)
@given(
    before=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 6)),
    then=st.tuples(st.integers(1, 7), st.integers(1, 6)),
)
def test_a_resumed_run_shows_exactly_the_rest(
    written: Written,
    walk: list[tuple[int, str, int, bytes]],
    before: tuple[int, int, int],
    then: tuple[int, int],
) -> None:
    num_ranks, batch, num_batches = before
    first = []
    states = []
    for rank in range(num_ranks):
        running = loader(written, batch=batch, rank=rank, num_ranks=num_ranks)
        first += [one for loaded in islice(running, num_batches) for one in shown(loaded)]
        states.append(running.state_dict())
    assert all(state == states[0] for state in states)
    rest = []
    num_ranks, batch = then
    for rank in range(num_ranks):
        resumed = loader(written, batch=batch, rank=rank, num_ranks=num_ranks)
        resumed.load_state_dict(states[0])
        rest += [one for loaded in islice(resumed, 2) for one in shown(loaded)]
    assert sorted(first) + sorted(rest) == walk[: len(first) + len(rest)]


def test_a_position_is_enough_to_go_on_from(written: Written) -> None:
    whole = [(shown(loaded), loaded.cursor.position) for loaded in islice(loader(written, batch=4), 9)]
    for stop in (1, 4, 8):
        rest = islice(loader(written, batch=4).batches(position=whole[stop - 1][1]), 9 - stop)
        assert [(shown(loaded), loaded.cursor.position) for loaded in rest] == whole[stop:]


def test_a_state_of_other_samples_or_another_order_is_refused(written: Written) -> None:
    state = loader(written).state_dict()
    for other in ({"captions": "none"}, {"segment": "2.5s"}, {"tails": "pad"}, {"seed": SEED + 1}):
        with pytest.raises(UserError, match=r"state (belongs to other|has seed 11)"):
            loader(written, **other).load_state_dict(state)
    loader(written, batch=3, num_ranks=2, can_keep=False).load_state_dict(state)


def test_states_of_different_steps_do_not_belong_together(written: Written) -> None:
    running = loader(written, batch=2, num_ranks=2)
    states = [running.state_dict()]
    next(iter(running))
    states.append(running.state_dict())
    with pytest.raises(UserError, match="are of different steps"):
        loader(written).load_state_dict(*states)
