import random
import threading
import time
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch

from train.data.batch import Sample
from train.data.failures import SampleFailed, TooManyFailures
from train.data.loader import LoadedBatch, LoaderSettings, evaluation_batches, training_batches


class Numbers:
    """Samples that hold their own number and a random one; some fail, and each takes a while of its own."""

    fingerprint = "numbers"

    def __init__(self, num_samples: int, *, failing: tuple[int, ...] = ()) -> None:
        self._num_samples = num_samples
        self._failing = failing
        self.num_loaded = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_samples

    def describe(self) -> str:
        return "numbers"

    def load(self, sample: int, *, position: int, rng: np.random.Generator | None) -> Sample:
        time.sleep(random.random() * 0.002)
        with self._lock:
            self.num_loaded += 1
        if sample in self._failing:
            raise SampleFailed(f"key_{sample}", reason="undecodable", detail="as told")
        drawn = -1 if rng is None else int(rng.integers(1 << 30))
        return Sample(position=position, key=f"key_{sample}", caption_id=sample, tokens=torch.tensor([sample, drawn]))


def settings(*, batch: int = 4, num_threads: int = 3, num_ahead: int = 8) -> LoaderSettings:
    return LoaderSettings(batch=batch, num_threads=num_threads, num_ahead=num_ahead, seed=5)


def take(samples: Numbers, num_batches: int, *, position: int = 0, **changes: int) -> list[LoadedBatch]:
    batches = training_batches(samples, settings(**changes), position=position, max_failures=100)
    taken = list(islice(batches, num_batches))
    batches.close()
    return taken


def content(batches: list[LoadedBatch]) -> list[list[list[int]]]:
    return [loaded.batch["tokens"].tolist() for loaded in batches]


@pytest.mark.parametrize("failing", [(), (3, 7, 8)])
def test_batches_do_not_depend_on_threads(failing: tuple[int, ...]) -> None:
    expected = take(Numbers(23, failing=failing), 12, num_threads=1, num_ahead=1)
    for num_threads, num_ahead in ((2, 8), (7, 40)):
        got = take(Numbers(23, failing=failing), 12, num_threads=num_threads, num_ahead=num_ahead)
        assert content(got) == content(expected)
        assert [one.failed for one in got] == [one.failed for one in expected]
        assert [one.next_position for one in got] == [one.next_position for one in expected]


@pytest.mark.parametrize("failing", [(), (3, 7, 8)])
def test_going_on_from_any_batch_gives_the_batches_that_would_have_come(failing: tuple[int, ...]) -> None:
    whole = take(Numbers(23, failing=failing), 12)
    for stop in (1, 5, 6, 11):
        rest = take(Numbers(23, failing=failing), 12 - stop, position=whole[stop - 1].next_position)
        assert content(rest) == content(whole[stop:])


def test_an_epoch_holds_every_sample_once_whatever_the_batch() -> None:
    batches = take(Numbers(20), 15)
    visited = [sample for loaded in batches for sample in loaded.batch["caption_id"].tolist()]
    for epoch in range(3):
        assert sorted(visited[20 * epoch : 20 * epoch + 20]) == list(range(20))


def test_every_visit_draws_its_own_random_numbers() -> None:
    drawn = [number for loaded in take(Numbers(8), 6) for number in loaded.batch["tokens"][:, 1].tolist()]
    assert len(set(drawn)) == 24


def test_a_failed_sample_is_named_and_its_place_filled_by_the_next() -> None:
    batches = take(Numbers(10, failing=(4,)), 9)
    for loaded in batches:
        assert loaded.batch["caption_id"].shape == (4,) and 4 not in loaded.batch["caption_id"]
    failed = [failure for loaded in batches for failure in loaded.failed]
    assert {failure.key for failure in failed} == {"key_4"}
    assert [failure.position // 10 for failure in failed] == [0, 1, 2, 3]  # once an epoch
    positions = [place for loaded in batches for place in loaded.batch["position"].tolist()]
    assert sorted(positions + [failure.position for failure in failed]) == list(range(40))


def test_past_the_budget_the_failures_are_handed_over() -> None:
    batches = training_batches(Numbers(10, failing=(1, 2, 3)), settings(batch=8), position=0, max_failures=2)
    with pytest.raises(TooManyFailures) as caught:
        next(batches)
    assert {failure.key for failure in caught.value.failed} == {"key_1", "key_2", "key_3"}


def test_a_set_that_fails_altogether_ends() -> None:
    batches = training_batches(Numbers(4, failing=(0, 1, 2, 3)), settings(), position=0, max_failures=10)
    with pytest.raises(TooManyFailures) as caught:
        next(batches)
    assert len(caught.value.failed) == 11


def test_no_more_is_decoded_ahead_than_told() -> None:
    samples = Numbers(1000)
    batches = training_batches(samples, settings(batch=4, num_ahead=8), position=0, max_failures=0)
    next(batches)
    time.sleep(0.1)
    assert samples.num_loaded <= 4 + 8
    batches.close()


def test_closing_ends_the_threads() -> None:
    batches = training_batches(Numbers(100), settings(), position=0, max_failures=0)
    next(batches)
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_evaluation_gives_every_sample_once_in_order() -> None:
    batches = list(evaluation_batches(Numbers(10), settings()))
    assert [loaded.batch["tokens"][:, 0].tolist() for loaded in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all((loaded.batch["tokens"][:, 1] == -1).all() for loaded in batches)


@pytest.mark.parametrize("failing", [(2, 9), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)])
def test_evaluation_names_what_failed(failing: tuple[int, ...]) -> None:
    batches = list(evaluation_batches(Numbers(10, failing=failing), settings()))
    seen = [sample for loaded in batches if loaded.batch for sample in loaded.batch["caption_id"].tolist()]
    assert seen == [sample for sample in range(10) if sample not in failing]
    assert [one.key for loaded in batches for one in loaded.failed] == [f"key_{sample}" for sample in failing]


def test_a_bug_in_loading_is_not_taken_for_a_failed_sample() -> None:
    class Broken(Numbers):
        def load(self, sample: int, *, position: int, rng: np.random.Generator | None) -> Sample:
            raise ZeroDivisionError

    batches: list[Callable[[], object]] = [
        lambda: next(training_batches(Broken(10), settings(), position=0, max_failures=100)),
        lambda: next(evaluation_batches(Broken(10), settings())),
    ]
    for run in batches:
        with pytest.raises(ZeroDivisionError):
            run()
