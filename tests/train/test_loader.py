import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.data.batch import Sample
from clipmill.train.data.loader import Loader, LoaderSettings, SampleRequest
from clipmill.train.data.outcomes import FailedSample, LoadedBatch, TooManyFailures
from clipmill.train.data.workers import ThreadedReader, map_in_order
from tests.tiers import nightly_beyond


class Numbers(ThreadedReader):
    """Samples that hold their own number and a random one; some fail, and each takes a random time."""

    fingerprint = "numbers"

    def __init__(self, num_samples: int, *, failing: tuple[int, ...] = ()) -> None:
        self._num_samples = num_samples
        self._failing = failing
        self.num_loaded = 0
        self._lock = threading.Lock()

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def describe(self) -> str:
        return "numbers"

    def key(self, sample: int) -> str:
        return f"key_{sample}"

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        time.sleep(random.random() * 0.002)
        with self._lock:
            self.num_loaded += len(requests)
        return [self._load(request) for request in requests]

    def _load(self, request: SampleRequest) -> Sample | FailedSample:
        sample, rng = request.sample, request.generator("crop")
        if sample in self._failing:
            return FailedSample(request.position, self.key(sample), "undecodable", "as told")
        drawn = -1 if rng is None else int(rng.integers(1 << 30))
        video = np.full((3,), sample % 256, np.uint8)
        return Sample(
            position=request.position,
            key=self.key(sample),
            caption_id=sample,
            video=video,
            tokens=np.array([sample, drawn]),
        )


def settings(**changes: Any) -> LoaderSettings:
    return LoaderSettings(**{"batch": 4, "num_threads": 3, "num_ahead": 8, "seed": 5, **changes})


def loader_of(samples: Numbers, loading: LoaderSettings) -> Loader:
    return Loader(samples, samples, loading)


def training(samples: Numbers, max_failures: int, **changes: Any) -> Generator[LoadedBatch, None, None]:
    return loader_of(samples, settings(**changes)).batches(max_failures=max_failures)


def take(samples: Numbers, num_batches: int, *, position: int = 0, **changes: int) -> list[LoadedBatch]:
    batches = loader_of(samples, settings(**changes)).batches(position=position, max_failures=100)
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
        assert [loaded.failed for loaded in got] == [loaded.failed for loaded in expected]
        assert [loaded.cursor.position for loaded in got] == [loaded.cursor.position for loaded in expected]


@pytest.mark.parametrize("failing", [(), (3, 7, 8)])
def test_going_on_from_any_batch_gives_the_batches_that_would_have_come(failing: tuple[int, ...]) -> None:
    whole = take(Numbers(23, failing=failing), 12)
    for stop in (1, 5, 6, 11):
        rest = take(Numbers(23, failing=failing), 12 - stop, position=whole[stop - 1].cursor.position)
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
    assert [failure.position // 10 for failure in failed] == [0, 1, 2, 3]  # once per epoch
    positions = [place for loaded in batches for place in loaded.batch["position"].tolist()]
    assert sorted(positions + [failure.position for failure in failed]) == list(range(40))


def test_past_the_budget_the_failures_are_handed_over() -> None:
    batches = training(Numbers(10, failing=(1, 2, 3)), 2, batch=8)
    with pytest.raises(TooManyFailures) as caught:
        next(batches)
    assert {failure.key for failure in caught.value.failed} == {"key_1", "key_2", "key_3"}


def test_a_set_that_fails_altogether_ends() -> None:
    batches = training(Numbers(4, failing=(0, 1, 2, 3)), 10)
    with pytest.raises(TooManyFailures) as caught:
        next(batches)
    assert len(caught.value.failed) == 11


def test_no_more_is_decoded_ahead_than_told() -> None:
    samples = Numbers(1000)
    batches = training(samples, 0)
    next(batches)
    time.sleep(0.1)
    assert samples.num_loaded <= 4 + 8
    batches.close()


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())  # earlier tests may have left threads
    batches = training(Numbers(100), 0)
    next(batches)
    threads = set(threading.enumerate()) - before
    assert any(thread.name.startswith("loader") for thread in threads)
    batches.close()
    assert not threads & set(threading.enumerate())


def test_evaluation_gives_every_sample_once_in_order() -> None:
    batches = list(loader_of(Numbers(10), settings()).evaluation_batches())
    assert [loaded.batch["tokens"][:, 0].tolist() for loaded in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all((loaded.batch["tokens"][:, 1] == -1).all() for loaded in batches)


@pytest.mark.parametrize("failing", [(2, 9), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)])
def test_evaluation_names_what_failed(failing: tuple[int, ...]) -> None:
    batches = list(loader_of(Numbers(10, failing=failing), settings()).evaluation_batches())
    seen = [sample for loaded in batches if loaded.batch for sample in loaded.batch["caption_id"].tolist()]
    assert seen == [sample for sample in range(10) if sample not in failing]
    assert [failure.key for loaded in batches for failure in loaded.failed] == [f"key_{sample}" for sample in failing]


def test_a_bug_in_loading_is_not_taken_for_a_failed_sample() -> None:
    class Broken(Numbers):
        def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
            raise ZeroDivisionError

    batches: list[Callable[[], object]] = [
        lambda: next(training(Broken(10), 100)),
        lambda: next(loader_of(Broken(10), settings()).evaluation_batches()),
    ]
    for run in batches:
        with pytest.raises(ZeroDivisionError):
            run()


def test_a_batch_is_whole_until_the_second_one_after_it_is_asked_for() -> None:
    batches = training(Numbers(100), 0)
    before = next(batches)
    for _ in range(6):
        loaded = next(batches)
        for batch in (before, loaded):
            assert batch.batch["video"][:, 0].tolist() == batch.batch["caption_id"].tolist()
        before = loaded
    batches.close()


@pytest.mark.parametrize("num_ahead", [8, 1, 20])
def test_a_thread_that_never_comes_back_is_a_failed_sample_and_the_run_goes_on(
    num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads hang forever, one after the other. All other samples arrive in their normal order."""
    for_good = threading.Event()
    monkeypatch.setattr("clipmill.train.data.workers._JOIN_TIMEOUT_S", 0.1)  # do not wait for hanging threads

    class Hanging(Numbers):
        def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
            if requests[0].sample in (3, 7):
                for_good.wait()
            return super().load(requests)

    batches = loader_of(Hanging(10), settings(num_threads=2, num_ahead=num_ahead, stuck_after_s=0.3)).batches(
        max_failures=100
    )
    taken = list(islice(batches, 4))
    expected = take(Numbers(10, failing=(3, 7)), 4)
    assert content(taken) == content(expected)
    failed = [failure for loaded in taken for failure in loaded.failed]
    assert {(failure.key, failure.reason) for failure in failed} == {("key_3", "stuck"), ("key_7", "stuck")}
    batches.close()
    for_good.set()


def test_a_caller_that_takes_groups_is_woken_when_a_group_is_there() -> None:
    last_of_group, others_done = threading.Event(), threading.Semaphore(0)
    taken: list[object] = []

    def work(number: int) -> int:
        if number == 3:
            last_of_group.wait()
        others_done.release()
        return number

    results = map_in_order(work, range(12), num_threads=2, num_ahead=8, stuck_after_s=60, num_together=4)
    caller = threading.Thread(target=lambda: taken.extend(result for _, result in results))
    caller.start()
    for _ in range(7):  # the seven samples that can be started beside the blocked one
        others_done.acquire()
    time.sleep(0.05)
    assert not taken
    assert others_done.acquire(blocking=False) is False
    last_of_group.set()
    caller.join()
    assert taken == list(range(12))


def test_every_rank_gets_as_much_and_together_they_get_everything_once() -> None:
    for num_ranks in (2, 3, 5):
        parts = [take(Numbers(60), 60 // (4 * num_ranks), rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        seen = [sample for part in parts for loaded in part for sample in loaded.batch["caption_id"].tolist()]
        assert len(seen) == len(set(seen)) == 60 // (4 * num_ranks) * 4 * num_ranks


@pytest.mark.parametrize("group", nightly_beyond([3], [1, 3]))
@pytest.mark.parametrize("failing", [(), (3, 17, 18, 40)])
def test_a_run_resumes_at_any_step_on_any_number_of_ranks(failing: tuple[int, ...], group: int) -> None:
    """For any number of ranks before, no sample occurs twice in the epoch, and no sample is missing."""
    samples = Numbers(64, failing=failing)
    for before, after in ((1, 3), (3, 1), (2, 5), (4, 4)):
        loaders = [
            loader_of(samples, settings(rank=rank, num_ranks=before, group=group, batch=5)) for rank in range(before)
        ]
        seen: list[int] = []
        for loader in loaders:
            batches = loader.batches(max_failures=100)
            for loaded in islice(batches, 2):
                seen += loaded.batch["position"].tolist() + [failure.position for failure in loaded.failed]
            batches.close()
        states = [loader.state_dict() for loader in loaders]
        for rank in range(after):
            loader = loader_of(samples, settings(rank=rank, num_ranks=after, group=group, batch=3))
            loader.load_state_dict(*states)
            batches = loader.batches(max_failures=1000)
            for loaded in islice(batches, 40):
                seen += loaded.batch["position"].tolist() + [failure.position for failure in loaded.failed]
            batches.close()
        assert len(seen) == len(set(seen))
        of_first_epochs = [position for position in seen if position < 64]
        # 64 is not a multiple of 3, so the last group of an epoch has two empty places.
        assert sorted(of_first_epochs) == list(range(64))


def test_a_state_of_other_samples_is_refused() -> None:
    loader = loader_of(Numbers(10), settings())
    state = loader_of(Numbers(10), settings(seed=6)).state_dict()
    with pytest.raises(UserError, match="seed 6"):
        loader.load_state_dict(state)


def test_a_group_is_loaded_together_and_stays_together() -> None:
    loaded_together: list[list[int]] = []

    class Watched(Numbers):
        def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
            loaded_together.append([request.sample for request in requests])
            return super().load(requests)

    batches = take(Watched(20), 15, group=3, num_threads=1, num_ahead=3)
    assert {tuple(group) for group in loaded_together} <= {
        (first, first + 1, first + 2) for first in range(0, 18, 3)
    } | {(18, 19)}
    visited = [sample for loaded in batches for sample in loaded.batch["caption_id"].tolist()]
    for epoch in range(3):
        assert sorted(visited[20 * epoch : 20 * epoch + 20]) == list(range(20))


@pytest.mark.nightly
def test_memory_stays_as_it_is_over_forty_thousand_samples() -> None:
    """Anonymous memory after 10,000 and 40,000 samples differs by less than the memory of 2,000 samples."""

    class Instant(Numbers):
        def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
            video = np.zeros(1000, np.uint8)
            return [
                Sample(
                    position=request.position,
                    key="k",
                    caption_id=request.sample,
                    video=video,
                    tokens=np.zeros(77, np.int64),
                )
                for request in requests
            ]

    batches = training(Instant(10**9), 0, batch=500, num_ahead=1000)
    used: list[int] = []
    for number in range(80):
        next(batches)
        if number in (20, 79):
            used.append(resident_bytes())
    batches.close()
    assert used[1] - used[0] < 2000 * (1000 + 77 * 8)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")
