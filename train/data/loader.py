"""Batches from a set of samples: worker threads decode ahead, and the order does not depend on them.

Training walks the endless order of train.data.order. Its whole state is a place in it (train.data.place); how many
samples have failed so far is the caller's to count. A failed sample is handed to the caller by name and its
place in the batch is filled by the next sample in order, so the same failures give the same batches.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from train.data.batch import Sample
from train.data.failures import FailedSample
from train.data.filling import BatchFilling, LoadedBatch
from train.data.order import SampleOrder
from train.data.place import LoaderState, Place, resumed
from train.data.workers import Stuck, in_order

_BLOCK = 4096


@dataclass(frozen=True)
class Visit:
    """One sample at one position of the order; without a seed as in evaluation, where nothing is random."""

    sample: int
    position: int
    seed: int | None

    def rng(self) -> np.random.Generator | None:
        """A generator of its own for every visit: what is drawn does not depend on threads or on what came before."""
        return None if self.seed is None else np.random.default_rng((self.seed, self.position))

    def shared_rng(self, num_visits: int) -> np.random.Generator | None:
        """A generator that the `num_visits` visits of a group begin with alike, and that is none of their own."""
        first = self.position - self.position % num_visits
        return None if self.seed is None else np.random.default_rng((self.seed, first, num_visits))


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

    def load(self, visits: Sequence[Visit]) -> list[Sample | FailedSample]:
        """The samples of a few visits that may share work, in their order."""
        ...

    def key(self, sample: int) -> str:
        """What a sample is named by where it fails."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How batches are made of samples.

    Attributes:
        num_ahead: samples that are decoded or waiting at any time, at most.
        group: samples that are visited in a row and loaded together.
        stuck_after_s: a sample that takes longer has failed.
        pin: whether batches lie in pinned memory, for copies to a GPU.
    """

    batch: int
    num_threads: int
    num_ahead: int
    seed: int
    group: int = 1
    rank: int = 0
    num_ranks: int = 1
    stuck_after_s: float = 120.0
    pin: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.num_threads, self.num_ahead, self.group) < 1 or not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"out of range: {self}")


class TrainingSet(Protocol):
    """Samples with a loader of their own: what the loop and the evaluations read from."""

    @property
    def fingerprint(self) -> str:
        """Hash of which samples there are and in which order."""
        ...

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None where that shows only in passing."""
        ...

    def describe(self) -> str:
        """One line for the log: what is in the set, and what is left out and why."""
        ...

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order; TooManyFailures when more than `max_failures` samples failed."""
        ...

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """This rank's part of every `every`-th sample, each once, in order; the last batch may be smaller, or empty."""
        ...

    def load_state_dict(self, *states: LoaderState) -> None:
        """`batches` without a position go on from the states of all ranks; UserError where they do not fit."""
        ...


class Loader:
    """Batches of a set for one rank. A batch is valid until the second one after it is asked for.

    Attributes:
        place: where the batches taken so far end.
    """

    def __init__(self, samples: SampleSet, settings: LoaderSettings) -> None:
        self._samples = samples
        self._settings = settings
        self._order = SampleOrder(len(samples), settings.seed, settings.group)
        self.place = Place(0)

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order, from `position` on, or from where the loader stands.

        Raises:
            TooManyFailures: more than `max_failures` samples failed.
        """
        settings = self._settings
        begin = self.place if position is None else Place(position)
        filling = BatchFilling(settings.batch, pin=settings.pin, max_failures=max_failures)
        where = {"rank": settings.rank, "num_ranks": settings.num_ranks, "group": settings.group}
        for num_own, outcome in enumerate(self._outcomes(self._training_visits(begin)), start=1):
            if filling.add(outcome):
                num_common = filling.num_batches * settings.batch
                self.place = begin.after(num_common, num_own, **where)
                yield filling.take(self.place)

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """This rank's part of every `every`-th sample, each once, in order; the last batch may be smaller, or empty."""
        settings = self._settings
        filling = BatchFilling(settings.batch, pin=settings.pin, max_failures=None)
        numbers = range(settings.rank * every, len(self._samples), settings.num_ranks * every)
        visits: Iterator[list[Visit | None]] = ([Visit(number, number, None)] for number in numbers)
        for number, outcome in zip(numbers, self._outcomes(visits), strict=True):
            if filling.add(outcome):
                yield filling.take(Place(number + 1))
        if filling.has_any:
            yield filling.take(Place(len(self._samples)))

    def state_dict(self) -> LoaderState:
        """Where the batches taken so far end. It is the same for every rank, unless a sample has failed."""
        place = self.place
        return LoaderState(
            position=place.position,
            ahead=list(place.ahead),
            seed=self._settings.seed,
            samples=self._samples.fingerprint,
        )

    def load_state_dict(self, *states: LoaderState) -> None:
        """Goes on from the states of all ranks, whatever the batch and the number of ranks were and are.

        Raises:
            UserError: they are of other samples or another seed, or of different steps.
        """
        self.place = resumed(
            states, samples=self._samples.fingerprint, seed=self._settings.seed, what=self._samples.describe()
        )

    def _training_visits(self, place: Place) -> Iterator[list[Visit | None]]:
        """This rank's visits in groups; None for an empty place of the order."""
        settings, taken = self._settings, 0
        count = -(-_BLOCK // settings.group) * settings.group
        while True:
            positions = place.positions(
                taken, count, rank=settings.rank, num_ranks=settings.num_ranks, group=settings.group
            )
            taken += count
            visits = [
                Visit(sample, at, settings.seed) if sample >= 0 else None
                for at, sample in zip(positions.tolist(), self._order.at(positions).tolist(), strict=True)
            ]
            for begin in range(0, count, settings.group):
                yield visits[begin : begin + settings.group]

    def _outcomes(self, groups: Iterator[list[Visit | None]]) -> Iterator[Sample | FailedSample | None]:
        """What has become of each visit, in order; None for an empty place."""
        settings = self._settings
        num_ahead = max(1, settings.num_ahead // settings.group)

        def load(group: list[Visit | None]) -> list[Sample | FailedSample]:
            return self._samples.load([visit for visit in group if visit is not None])

        loaded = in_order(
            load,
            groups,
            num_threads=settings.num_threads,
            num_ahead=num_ahead,
            stuck_after_s=settings.stuck_after_s,
            # While the caller sleeps nothing new is begun: two pieces of work for each thread must be left meanwhile.
            num_together=max(1, min(settings.batch // settings.group, num_ahead - 2 * settings.num_threads)),
        )
        for group, outcomes in loaded:
            if isinstance(outcomes, Stuck):
                outcomes = [self._stuck(visit, outcomes) for visit in group if visit is not None]
            left = iter(outcomes)
            for visit in group:
                yield None if visit is None else next(left)

    def _stuck(self, visit: Visit, stuck: Stuck) -> FailedSample:
        detail = f"it was not there after {stuck.after_s:g} s, and nobody waits for it any more"
        return FailedSample(visit.position, self._samples.key(visit.sample), "stuck", detail)
