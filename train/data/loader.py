"""`Loader`: batches of samples for one rank, with a fixed order, reported failures, and exact resumption.

The loader accesses rows only by index. Rows belong to a `SampleTable` (clipmill.train.data.samples), and a reader turns
rows into samples: threads decode clips and images (clipmill.train.data.workers), latents are copied from mapped files,
and a stream is read sequentially.

Training follows the endless order of clipmill.train.data.order; its state is a cursor in this order. If a sample fails,
it is reported with the batch, and the next sample in order replaces it. Therefore the same failures result in the same
batches (clipmill.train.data.outcomes).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.config.training import NEW_RUN
from clipmill.train.data.batch import Batch
from clipmill.train.data.order import SEPARATOR, Cursor, LoaderState, SampleOrder, Share, merge_cursors
from clipmill.train.data.outcomes import BatchBuilder, LoadedBatch
from clipmill.train.device.random import Positions, generator

# Number of positions that are computed at a time. The first blocks are small, so that the first batch is ready early.
_FIRST_BLOCK, _GROWTH, _BLOCK = 64, 8, 4096


@dataclass(frozen=True)
class SampleRequest:
    """A sample to load for one position of the order. Without a seed, as in evaluation, it has no random choices."""

    sample: int
    position: int
    seed: int | None

    def generator(self, purpose: str, *, num_alike: int = 1) -> np.random.Generator | None:
        """Return the generator of random draws for a purpose; None in an evaluation.

        Args:
            num_alike: Number of consecutive positions that draw the same numbers.
        """
        first = self.position - self.position % num_alike
        return None if self.seed is None else generator(first, seed=self.seed, purpose=purpose)


class Block(NamedTuple):
    """Samples to load, in order.

    Attributes:
        samples: Indices of the samples, int64 [N]; -1 for an empty position in the order.
        positions: Positions in the order, int64 [N]; in an evaluation, the indices of the samples.
        seed: Seed of random draws; None in an evaluation.
    """

    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings for loading and batching samples.

    Attributes:
        batch: Number of samples in this rank's batch.
        num_ahead: Maximum number of samples that are loaded, or being loaded, ahead of the caller.
        group: Number of consecutive samples that are loaded together.
        stuck_after_s: Time after which a sample that is still being loaded counts as failed, seconds.
        pin: Put batches into pinned memory, for copies to a GPU.
        can_keep: Never overwrite a batch in use. Otherwise, each batch overwrites the second batch before it.
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


class Rows(Protocol):
    """Properties of the samples that a `Loader` needs, in addition to a reader."""

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if unknown, as in a stream."""

    def describe(self) -> str:
        """Return a line for the log: the content of the set, and omitted samples with reasons."""


class Reader(Protocol):
    """Reader that turns rows into samples."""

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[Any]:
        """Return the samples or failures of the blocks, in order, loaded ahead; None for an empty position."""

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[Any]], Batch]:
        """Return the function that collates samples into batches, for one iteration."""


class TrainingSet(Protocol):
    """Batches of samples, with the interface that the training loop and evaluations use."""

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if unknown, as in a stream."""

    @property
    def visits_per_epoch(self) -> float | None:
        """Number of samples per epoch of training; None if unknown."""

    def describe(self) -> str:
        """Return a line for the log: content of the set, and omitted samples with reasons."""

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Yield endless batches in training order; raise TooManyFailures after more than `max_failures` failures."""

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """Yield this rank's share of every `every`-th sample, once, in order. The last batch may be smaller."""

    def load_state_dict(self, *states: LoaderState) -> None:
        """Resume `batches` from the states of all ranks; raise UserError if they do not match the set."""


class Order(Protocol):
    """Endless order of samples, such as `SampleOrder`."""

    def at(self, positions: Positions) -> Positions:
        """Return the samples at `positions`; -1 for empty positions."""


class Loader:
    """Batches of a table's samples, made by a reader.

    Args:
        rows: Properties of the samples.
        reader: Reader of the samples.
        loading: Settings for batches, and this rank's share.
        order: Training order. By default, the order is shuffled by the seed, or the order of arrival if the number of
            samples is unknown.

    Attributes:
        reader, loading: Arguments of these names.
        cursor: Position up to which batches have been used.
    """

    def __init__(self, rows: Rows, reader: Reader, loading: LoaderSettings, *, order: Order | None = None) -> None:
        self._rows, self.reader, self.loading = rows, reader, loading
        self.cursor = Cursor(0)
        if order is None and rows.num_samples is not None:
            order = SampleOrder(rows.num_samples, loading.seed, loading.group)
        self._order = order

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """Yield endless batches in training order, from `position` on; by default from the cursor.

        Raises:
            TooManyFailures: More than `max_failures` samples failed.
        """
        batch, share = self.loading.batch, self.loading.share
        begin = self.cursor if position is None else Cursor(position)
        builder = self._builder(max_failures)
        outcomes = self.reader.outcomes(self._training_blocks(begin), self.loading)
        while builder.fill(outcomes):
            self.cursor = begin.advance(builder.num_batches * batch, builder.num_taken, share)
            yield builder.take(self.cursor)

    def evaluation_batches(self, *, every: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """Yield this rank's share of every `every`-th sample, once, in order; the last batch may be smaller or empty.

        Args:
            begin: Position to start at: 0, or the position of the cursor after a batch.
        """
        builder, num_samples = self._builder(None), self._rows.num_samples
        first, step = begin + self.loading.rank * every, self.loading.num_ranks * every
        numbers = count(first, step) if num_samples is None else range(first, num_samples, step)
        outcomes = self.outcomes(numbers)
        while builder.fill(outcomes):
            yield builder.take(Cursor(begin + builder.num_taken * step))
        if not builder.is_empty:
            yield builder.take(Cursor(begin + builder.num_taken * step if num_samples is None else num_samples))

    def outcomes(self, samples: Iterable[int]) -> Iterator[Any]:
        """Return each of `samples` as in an evaluation, or its failure, in order. Samples are loaded ahead."""
        return self.reader.outcomes(_evaluation_blocks(samples), self.loading)

    def state_dict(self) -> LoaderState:
        """Return the state after the batches used so far. It is identical on all ranks unless a sample has failed."""
        position, ahead = self.cursor
        return LoaderState(position=position, ahead=list(ahead), seed=self.loading.seed, samples=self._rows.fingerprint)

    def load_state_dict(self, *states: LoaderState) -> None:
        """Resume from the states of all ranks, even if the batch size or the number of ranks has changed.

        A single state is enough if no sample had failed, or if there was only one rank.

        Raises:
            UserError: The states belong to a different sample set or seed, or to different steps.
        """
        order, _, content = self._rows.fingerprint.partition(SEPARATOR)
        for state in states:
            old_order, _, old_content = state["samples"].partition(SEPARATOR)
            if old_order == order and old_content != content:
                raise UserError(
                    "the captions differ in text or source from the captions of the state; here are "
                    f"{self._rows.describe()}",
                    hint=f"resume with the original captions, or {NEW_RUN}",
                )
            if old_order != order or state["seed"] != self.loading.seed:
                raise UserError(
                    "the loader's state belongs to other samples: the data, their selection or their mixture have "
                    f"changed; here are {self._rows.describe()}"
                    if old_order != order
                    else f"the loader's state has seed {state['seed']}, and this loader has seed {self.loading.seed}",
                    hint="resume with the data (of a mixture, the same folders in the same order), split, --where, "
                    f"segment and seed that the run was started with, or {NEW_RUN}",
                )
        try:
            self.cursor = merge_cursors([Cursor(state["position"], tuple(state["ahead"])) for state in states])
        except ValueError as error:
            raise UserError(
                f"the loader's states are of different steps: {error}", hint="give the states of one step"
            ) from error

    def _builder(self, max_failures: int | None) -> BatchBuilder:
        return BatchBuilder(self.loading.batch, self.reader.collate(self.loading), max_failures=max_failures)

    def _training_blocks(self, begin: Cursor) -> Iterator[Block]:
        """Yield this rank's positions from `begin` on, with their samples."""
        taken, size, share = 0, _FIRST_BLOCK, self.loading.share
        while True:
            positions = begin.positions(taken, size, share)
            samples = positions if self._order is None else self._order.at(positions)
            yield Block(samples, positions, self.loading.seed)
            taken, size = taken + size, min(size * _GROWTH, _BLOCK)


def _evaluation_blocks(samples: Iterable[int]) -> Iterator[Block]:
    if isinstance(samples, range):
        for begin in range(0, len(samples), _BLOCK):
            part = samples[begin : begin + _BLOCK]
            numbers = np.arange(part.start, part.stop, part.step)
            yield Block(numbers, numbers, None)
        return
    for sample in samples:  # one at a time, because their number may be unknown
        number = np.array([sample])
        yield Block(number, number, None)
