"""Batches from a sample set: worker threads load ahead, and the order of samples does not depend on them.

Training follows the endless order of clipmill.train.data.order, and its whole state is a cursor in it
(clipmill.train.data.order). A sample that fails is reported beside the batch and replaced by the next sample in order,
so the same failures give the same batches (clipmill.train.data.outcomes).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch, BatchRing, Sample
from clipmill.train.data.order import Cursor, LoaderState, Resumable, SampleOrder, Share
from clipmill.train.data.outcomes import BatchBuilder, FailedSample, LoadedBatch
from clipmill.train.data.workers import Stuck, in_order
from clipmill.train.device.random import Positions, generator

# Number of positions computed at a time; the first blocks are small, so that the first batch does not wait.
_FIRST_BLOCK, _GROWTH, _BLOCK = 64, 8, 4096


@dataclass(frozen=True)
class SampleRequest:
    """A sample to load for one position of the order; without a seed, as in evaluation, nothing about it is random."""

    sample: int
    position: int
    seed: int | None

    def generator(self, purpose: str, *, num_alike: int = 1) -> np.random.Generator | None:
        """A generator of the draws for one purpose; None in an evaluation.

        Args:
            num_alike: Number of consecutive positions that draw the same numbers.
        """
        first = self.position - self.position % num_alike
        return None if self.seed is None else generator(first, seed=self.seed, purpose=purpose)


_Group = list[SampleRequest | None]  # requests that are loaded together; None for an empty position of the order


class SampleSet(Protocol):
    """Samples as a `Loader` reads them."""

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""

    def __len__(self) -> int: ...

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Load the samples of a group of requests, in their order; requests of a group may share work."""

    def key(self, sample: int) -> str:
        """Name of a sample in failures."""


class TrainingSet(Protocol):
    """Batches of samples, as the training loop and evaluations read them."""

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if unknown, as in a stream."""

    @property
    def visits_per_epoch(self) -> float | None:
        """Number of samples that training takes in an epoch; None if unknown."""

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order; raises TooManyFailures after more than `max_failures` failures."""

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """This rank's share of every `every`-th sample, once, in order; the last batch may be smaller or empty."""

    def load_state_dict(self, *states: LoaderState) -> None:
        """Resume `batches` from the states of all ranks; raises UserError if they do not match the set."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How samples are loaded and batched.

    Attributes:
        batch: samples in this rank's batch.
        num_ahead: maximum number of samples loaded or being loaded ahead of the caller.
        group: number of consecutive samples that are loaded together.
        stuck_after_s: seconds after which a sample that is still being loaded fails.
        pin: put batches into pinned memory, for copies to a GPU.
        can_keep: never overwrite a batch that is still in use; otherwise the second batch after it overwrites it.
    """

    batch: int = 32
    num_threads: int = 4
    num_ahead: int = 64
    seed: int = 0
    group: int = 1
    rank: int = 0
    num_ranks: int = 1
    stuck_after_s: float = 120.0
    pin: bool = False
    can_keep: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.num_threads, self.num_ahead, self.group) < 1 or not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"out of range: {self}")

    @property
    def share(self) -> Share:
        """The positions of this rank."""
        return Share(self.rank, self.num_ranks, self.group)


class BatchLoader(Resumable):
    """Batches of samples in training order for one rank. Subclasses load the samples.

    Attributes:
        mixture: Import path of the class that mixes such samples of several data folders.
    """

    mixture: ClassVar[str] = "clipmill.train.data.mixed_clips:MixedClips"

    def __init__(self, loading: LoaderSettings) -> None:
        super().__init__(seed=loading.seed)
        self._loading = loading

    @property
    def loading(self) -> LoaderSettings:
        """How samples are loaded and batched."""
        return self._loading

    @property
    def num_samples(self) -> int | None:
        """See `TrainingSet`."""
        raise NotImplementedError

    @property
    def frame_shape(self) -> Any:
        """Shape of latents (clipmill.train.data.latents.segments.FrameShape); None for pixels."""
        return None

    @property
    def text_width(self) -> int | None:
        """Width of the stored embeddings of captions; None if captions are tokens or texts."""
        return None

    @property
    def visits_per_epoch(self) -> float | None:
        """See `TrainingSet`: each sample once; a set of samples with several captions may count each of these."""
        return self.num_samples

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order, from `position` on; by default from the cursor.

        Raises:
            TooManyFailures: more than `max_failures` samples failed.
        """
        batch, share = self._loading.batch, self._loading.share
        begin = self.cursor if position is None else Cursor(position)
        building = self._builder(max_failures)
        outcomes = self._training_outcomes(begin)
        while building.fill(outcomes):
            self.cursor = begin.after(building.num_batches * batch, building.num_taken, share)
            yield building.take(self.cursor)

    def outcomes(self, samples: Iterable[int]) -> Iterator[Any]:
        """Each of `samples` as in an evaluation, or its failure, in order; threads load ahead."""
        raise NotImplementedError

    def _evaluated(self, num_samples: int, *, every: int, begin: int) -> Iterator[LoadedBatch]:
        """See `Loader.evaluation_batches`; of a set with a known number of samples."""
        building = self._builder(None)
        first, step = begin + self._loading.rank * every, self._loading.num_ranks * every
        outcomes = self.outcomes(range(first, num_samples, step))
        while building.fill(outcomes):
            yield building.take(Cursor(begin + building.num_taken * step))
        if not building.is_empty:
            yield building.take(Cursor(num_samples))

    def _builder(self, max_failures: int | None) -> BatchBuilder:
        return BatchBuilder(self._loading.batch, self._collate(), max_failures=max_failures)

    def _collate(self) -> Callable[[Sequence[Any]], Batch]:
        """What makes batches of samples, for one iteration."""
        loading = self._loading
        return BatchRing(loading.batch, pin=loading.pin, can_keep=loading.can_keep).collate

    def _training_outcomes(self, begin: Cursor) -> Iterator[Any]:
        """This rank's samples and failures from `begin` on, in order; None for an empty position."""
        raise NotImplementedError

    def _positions(self, begin: Cursor) -> Iterator[NDArray[np.int64]]:
        """This rank's positions from `begin` on, in blocks."""
        taken, size = 0, _FIRST_BLOCK
        while True:
            yield begin.positions(taken, size, self._loading.share)
            taken, size = taken + size, min(size * _GROWTH, _BLOCK)


class Order(Protocol):
    """The samples at the positions of the endless order, as `SampleOrder` gives them."""

    def at(self, positions: Positions) -> Positions:
        """Samples at `positions`; -1 where empty."""


@dataclass(frozen=True)
class ReadAhead:
    """Loading in two steps, each by threads of its own: most of those that read wait for a network.

    Attributes:
        read: a group of requests; it does not raise for samples that cannot be read.
        load: what was read; gives what `SampleSet.load` does.
        num_threads: that read.
    """

    read: Callable[[Sequence[SampleRequest]], Any]
    load: Callable[[Any], list[Sample | FailedSample]]
    num_threads: int


class Loader(BatchLoader):
    """Batches of a sample set, in the order of its samples under the seed unless another order is given.

    Args:
        ahead: for samples that are read ahead of loading; None if loading them reads them.
    """

    def __init__(
        self,
        samples: SampleSet,
        loading: LoaderSettings,
        *,
        order: Order | None = None,
        ahead: ReadAhead | None = None,
    ) -> None:
        super().__init__(loading)
        self._samples, self._ahead = samples, ahead
        self._order: Order = order or SampleOrder(len(samples), loading.seed, loading.group)

    @property
    def fingerprint(self) -> str:
        return self._samples.fingerprint

    def describe(self) -> str:
        return self._samples.describe()

    def evaluation_batches(self, *, every: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """This rank's share of every `every`-th sample, once, in order; the last batch may be smaller or empty.

        Args:
            begin: position to start at: 0, or that of the cursor after a batch.
        """
        return self._evaluated(len(self._samples), every=every, begin=begin)

    def outcomes(self, samples: Iterable[int]) -> Iterator[Sample | FailedSample]:
        """Each of `samples` as in an evaluation, or its failure, in order; threads load ahead."""
        groups: Iterator[list[SampleRequest | None]] = ([SampleRequest(one, one, None)] for one in samples)
        return cast(Iterator[Sample | FailedSample], self._outcomes(groups))

    def _training_outcomes(self, begin: Cursor) -> Iterator[Sample | FailedSample | None]:
        return self._outcomes(self._training_requests(begin))

    def _training_requests(self, begin: Cursor) -> Iterator[list[SampleRequest | None]]:
        """This rank's requests in groups; None for an empty position of the order."""
        seed, group = self._loading.seed, self._loading.group
        numbered = chain.from_iterable(
            zip(positions.tolist(), self._order.at(positions).tolist(), strict=True)
            for positions in self._positions(begin)
        )
        # A run that is resumed inside a group loads the rest of it first.
        for _, members in groupby(numbered, lambda one: one[0] // group):
            yield [SampleRequest(sample, at, seed) if sample >= 0 else None for at, sample in members]

    def _outcomes(self, groups: Iterator[list[SampleRequest | None]]) -> Iterator[Sample | FailedSample | None]:
        """The outcome of each request, in order; None for an empty position."""
        loading, ahead = self._loading, self._ahead
        num_ahead = max(1, loading.num_ahead // loading.group)

        def load(item: tuple[_Group, Any]) -> list[Sample | FailedSample] | Stuck:
            group, read = item
            if isinstance(read, Stuck):
                return read
            return self._samples.load(_wanted(group)) if ahead is None else ahead.load(read)

        with closing(self._read(groups)) as items:
            loaded = in_order(
                load,
                items,
                num_threads=loading.num_threads,
                num_ahead=num_ahead,
                stuck_after_s=loading.stuck_after_s,
                # Nothing new is begun while the caller sleeps, so two items for each thread are queued meanwhile.
                num_together=max(1, min(loading.batch // loading.group, num_ahead - 2 * loading.num_threads)),
            )
            for (group, _), outcomes in loaded:
                if isinstance(outcomes, Stuck):
                    keys = ((one.position, self._samples.key(one.sample)) for one in _wanted(group))
                    outcomes = [FailedSample(position, key, "stuck", str(outcomes)) for position, key in keys]
                remaining = iter(outcomes)
                for request in group:
                    yield None if request is None else next(remaining)

    def _read(self, groups: Iterator[_Group]) -> Generator[tuple[_Group, Any], None, None]:
        """The groups, each with what was read of it, or Stuck."""
        if self._ahead is None:
            yield from ((group, None) for group in groups)
            return
        read, num_threads = self._ahead.read, self._ahead.num_threads
        yield from in_order(
            lambda group: read(_wanted(group)),
            groups,
            num_threads=num_threads,
            num_ahead=2 * num_threads,
            stuck_after_s=self._loading.stuck_after_s,
        )


def _wanted(group: _Group) -> list[SampleRequest]:
    return [request for request in group if request is not None]
