"""Batches from a set of samples: worker threads decode ahead, and the order does not depend on them.

Training walks the endless order of train.data.order. Its whole state is two integers: the next position, and how
many samples have failed so far (the caller counts those). A failed sample is handed to the caller by name and its
place in the batch is filled by the next sample in order, so the same failures give the same batches.

Threads, not processes: decoding and resizing leave the interpreter's lock, and nothing needs to be copied.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

import numpy as np

from train.data.batch import Batch, Sample, collate
from train.data.failures import FailedSample, SampleFailed, TooManyFailures
from train.data.order import SampleOrder, positions_of_rank

_ORDER_BLOCK = 4096
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class SampleSet(Protocol):
    """What a loader reads from."""

    @property
    def fingerprint(self) -> str:
        """Hash of which samples there are and in which order."""
        ...

    def __len__(self) -> int: ...

    def describe(self) -> str:
        """One line for the log: what is in the set, and what is left out and why."""
        ...

    def load(self, sample: int, *, position: int, rng: np.random.Generator | None) -> Sample:
        """One sample, random choices made with `rng`; SampleFailed where it cannot be had."""
        ...


@dataclass(frozen=True)
class LoadedBatch:
    """A batch, the samples that failed on the way to it, and the position from which the next one goes on."""

    batch: Batch
    failed: tuple[FailedSample, ...]
    next_position: int


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """`num_ahead` samples at most are decoded or waiting at any time."""

    batch: int
    num_threads: int
    num_ahead: int
    seed: int


class TrainingSet(Protocol):
    """Samples with a loader of their own: what the loop and the evaluations read from."""

    @property
    def fingerprint(self) -> str:
        """Hash of which samples there are and in which order."""
        ...

    def __len__(self) -> int: ...

    def describe(self) -> str:
        """One line for the log: what is in the set, and what is left out and why."""
        ...

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order; TooManyFailures when more than `max_failures` samples failed."""
        ...

    def evaluation_batches(self) -> Iterator[LoadedBatch]:
        """Every sample once, in order; the last batch may be smaller."""
        ...


def training_batches(
    samples: SampleSet, settings: LoaderSettings, *, position: int, max_failures: int
) -> Generator[LoadedBatch, None, None]:
    """Endless batches from `position` on.

    Raises:
        TooManyFailures: more than `max_failures` samples failed.
    """
    order = SampleOrder(len(samples), settings.seed)

    def places() -> Iterator[tuple[int, int]]:
        for block in count(position, _ORDER_BLOCK):
            positions = positions_of_rank(block, _ORDER_BLOCK, rank=0, num_ranks=1)
            yield from zip(positions.tolist(), order.at(positions).tolist(), strict=True)

    def load(place: tuple[int, int]) -> Sample | FailedSample:
        at, sample = place
        # A generator of its own for every visit: what is drawn does not depend on threads or on what came before.
        return _load(samples, sample, position=at, rng=np.random.default_rng((settings.seed, at)))

    good: list[Sample] = []
    failed: list[FailedSample] = []
    num_failures = 0
    for (at, _), outcome in in_order(load, places(), settings=settings):
        if isinstance(outcome, FailedSample):
            failed.append(outcome)
            num_failures += 1
            if num_failures > max_failures:
                raise TooManyFailures(tuple(failed))
            continue
        good.append(outcome)
        if len(good) == settings.batch:
            yield LoadedBatch(collate(good), tuple(failed), at + 1)
            good, failed = [], []


def evaluation_batches(samples: SampleSet, settings: LoaderSettings) -> Iterator[LoadedBatch]:
    """Every sample once, in order, as for evaluation; the last batch may be smaller."""
    good: list[Sample] = []
    failed: list[FailedSample] = []

    def load(sample: int) -> Sample | FailedSample:
        return _load(samples, sample, position=sample, rng=None)

    for sample, outcome in in_order(load, range(len(samples)), settings=settings):
        if isinstance(outcome, FailedSample):
            failed.append(outcome)
        else:
            good.append(outcome)
        is_last = sample == len(samples) - 1
        if len(good) == settings.batch or (is_last and good):
            yield LoadedBatch(collate(good), tuple(failed), sample + 1)
            good, failed = [], []
    if failed:
        yield LoadedBatch(Batch(), tuple(failed), len(samples))


def in_order(
    work: Callable[[_Item], _Result], items: Iterable[_Item], *, settings: LoaderSettings
) -> Iterator[tuple[_Item, _Result]]:
    """(item, work(item)) in the order of `items`; threads run ahead of the caller by a bounded number of items."""
    with ThreadPoolExecutor(settings.num_threads, thread_name_prefix="loader") as pool:
        waiting: deque[tuple[_Item, Future[_Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) >= settings.num_ahead:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _load(samples: SampleSet, sample: int, *, position: int, rng: np.random.Generator | None) -> Sample | FailedSample:
    try:
        return samples.load(sample, position=position, rng=rng)
    except SampleFailed as error:
        return FailedSample(position, error.key, error.reason, error.detail)
