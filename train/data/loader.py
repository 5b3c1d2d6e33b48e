"""`Loader`: batches of samples for one rank, in a reproducible order, with reported failures and exact resumption.

The loader knows samples only by their indices, which refer to rows of a `SampleTable` (clipmill.train.data.samples). A
reader loads the samples: threads decode clips and images (clipmill.train.data.workers), latents are copied from mapped
files, and a stream is read sequentially.

Training follows the endless order of clipmill.train.data.order, and the loader's state is a cursor in this order. A
failed sample is reported with the batch, and the next sample in order replaces it, so the same failures always result
in the same batches (clipmill.train.data.outcomes).
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

# Positions in the first block, growth from block to block, and maximum. The first blocks are small, so that the first
# batch is ready early.
_FIRST_BLOCK, _GROWTH, _BLOCK = 64, 8, 4096


@dataclass(frozen=True)
class SampleRequest:
    """Request for the sample at a position in the order.

    Attributes:
        sample: Index of the sample.
        position: Position in the order.
        seed: Seed of random choices; None in an evaluation, which does not make random choices.
    """

    sample: int
    position: int
    seed: int | None

    def generator(self, purpose: str, *, num_repeats: int = 1) -> np.random.Generator | None:
        """Return the random number generator for a purpose; None in an evaluation.

        Args:
            purpose: Name of the random choice, such as "crop".
            num_repeats: Number of consecutive positions that draw the same numbers.
        """
        first = self.position - self.position % num_repeats
        return None if self.seed is None else generator(first, seed=self.seed, purpose=purpose)


class Block(NamedTuple):
    """Samples to load, in order.

    Attributes:
        samples: Indices of the samples, int64 [N]; -1 for an empty position in the order (`SampleOrder`).
        positions: Positions in the order, int64 [N]; in an evaluation, equal to `samples`.
        seed: Seed of random choices; None in an evaluation.
    """

    samples: NDArray[np.int64]
    positions: NDArray[np.int64]
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings for loading and batching samples.

    Attributes:
        batch: Number of samples in this rank's batch.
        num_threads: Number of threads that load samples.
        num_ahead: Maximum number of samples that are loaded, or being loaded, ahead of the caller.
        seed: Seed for the order and for random choices.
        group: Number of consecutive samples that are loaded together.
        rank, num_ranks: Index of this rank, and number of ranks.
        stuck_after_s: Time limit for loading a sample, in seconds. A sample that takes longer counts as failed.
        pin: True to store batches in pinned memory, for copies to a GPU.
        can_keep: True to never overwrite a batch in use. Otherwise, a batch is overwritten by the second batch after
            it.
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
        """Positions of this rank."""
        return Share(self.rank, self.num_ranks, self.group)


class Rows(Protocol):
    """Properties of a set of samples that a `Loader` needs."""

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if unknown, as in a stream."""

    def describe(self) -> str:
        """Return a line for the log: contents of the set, and omitted samples with reasons."""


class Reader(Protocol):
    """Reader that turns rows into samples."""

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[Any]:
        """Return the samples or failures of the blocks, in order and loaded ahead; None for empty positions."""

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[Any]], Batch]:
        """Return a function that collates samples into batches. Each iteration uses a new function."""


class TrainingSet(Protocol):
    """Set of samples with the interface that the training loop and evaluations use."""

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if unknown, as in a stream."""

    @property
    def visits_per_epoch(self) -> float | None:
        """Number of samples in a training epoch; None if unknown."""

    def describe(self) -> str:
        """Return a line for the log: contents of the set, and omitted samples with reasons."""

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Yield endless batches in training order; raise TooManyFailures after more than `max_failures` failures."""

    def evaluation_batches(self, *, stride: int = 1) -> Iterator[LoadedBatch]:
        """Yield batches of this rank's share of samples 0, stride, 2 * stride, ...; the last batch may be smaller."""

    def load_state_dict(self, *states: LoaderState) -> None:
        """Resume `batches` from the states of all ranks; raise UserError if they belong to a different set."""


class Order(Protocol):
    """Endless order of samples, such as `SampleOrder`."""

    def at(self, positions: Positions) -> Positions:
        """Return the samples at `positions`; -1 for empty positions."""


class Loader:
    """Loader of batches for training and evaluation.

    Args:
        rows: Set of samples.
        reader: Reader of the samples.
        loading: Settings for loading and batching.
        order: Training order. Default: an order shuffled with the seed, or the order of arrival if the number of
            samples is unknown.

    Attributes:
        reader, loading: See the arguments of the same names.
        cursor: Positions in the order that have been used.
    """

    def __init__(self, rows: Rows, reader: Reader, loading: LoaderSettings, *, order: Order | None = None) -> None:
        self._rows, self.reader, self.loading = rows, reader, loading
        self.cursor = Cursor(0)
        if order is None and rows.num_samples is not None:
            order = SampleOrder(rows.num_samples, loading.seed, loading.group)
        self._order = order

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """Yield endless batches in training order, starting at `position`; None to start at the cursor.

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

    def evaluation_batches(self, *, stride: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """Yield batches of this rank's share of every `stride`-th sample, in order.

        The last batch may be smaller, or empty if all samples since the previous batch have failed.

        Args:
            stride: Step between samples.
            begin: First position: 0, or the position of the cursor after a batch.
        """
        builder, num_samples = self._builder(None), self._rows.num_samples
        first, step = begin + self.loading.rank * stride, self.loading.num_ranks * stride
        indices = count(first, step) if num_samples is None else range(first, num_samples, step)
        outcomes = self.outcomes(indices)
        while builder.fill(outcomes):
            yield builder.take(Cursor(begin + builder.num_taken * step))
        if not builder.is_empty:
            yield builder.take(Cursor(begin + builder.num_taken * step if num_samples is None else num_samples))

    def outcomes(self, samples: Iterable[int]) -> Iterator[Any]:
        """Return samples as in an evaluation, or their failures, in the given order. Samples are loaded ahead."""
        return self.reader.outcomes(_evaluation_blocks(samples), self.loading)

    def state_dict(self) -> LoaderState:
        """Return the state after the last batch. All ranks have equal states unless a sample has failed."""
        position, ahead = self.cursor
        return LoaderState(position=position, ahead=list(ahead), seed=self.loading.seed, samples=self._rows.fingerprint)

    def load_state_dict(self, *states: LoaderState) -> None:
        """Resume from the states of all ranks. The batch size and the number of ranks may differ.

        A single state is enough if no sample had failed or if there was only one rank.

        Raises:
            UserError: The states belong to different samples or a different seed, or were saved after different steps.
        """
        order, _, content = self._rows.fingerprint.partition(SEPARATOR)
        for state in states:
            old_order, _, old_content = state["samples"].partition(SEPARATOR)
            if old_order == order and old_content != content:
                raise UserError(
                    "caption texts or sources have changed since the state was saved; the data are now: "
                    f"{self._rows.describe()}",
                    hint=f"resume with the original captions, or {NEW_RUN}",
                )
            if old_order != order or state["seed"] != self.loading.seed:
                raise UserError(
                    "the loader's state belongs to other samples: the data, their selection or their mixture have "
                    f"changed; the data are now: {self._rows.describe()}"
                    if old_order != order
                    else f"the loader's state has seed {state['seed']}, but this loader has seed {self.loading.seed}",
                    hint="resume with the captions, the data (for a mixture, the same folders in the same order), "
                    f"--variant, split, --where, segment and seed with which the run was started, or {NEW_RUN}",
                )
        try:
            self.cursor = merge_cursors([Cursor(state["position"], tuple(state["ahead"])) for state in states])
        except ValueError as error:
            raise UserError(
                f"the loader's states were saved after different steps: {error}",
                hint="pass states that were saved after the same step",
            ) from error

    def _builder(self, max_failures: int | None) -> BatchBuilder:
        return BatchBuilder(self.loading.batch, self.reader.collate(self.loading), max_failures=max_failures)

    def _training_blocks(self, begin: Cursor) -> Iterator[Block]:
        """Yield this rank's positions and their samples, starting at a cursor."""
        num_taken, size, share = 0, _FIRST_BLOCK, self.loading.share
        while True:
            positions = begin.positions(num_taken, size, share)
            samples = positions if self._order is None else self._order.at(positions)
            yield Block(samples, positions, self.loading.seed)
            num_taken, size = num_taken + size, min(size * _GROWTH, _BLOCK)


def _evaluation_blocks(samples: Iterable[int]) -> Iterator[Block]:
    if isinstance(samples, range):
        for begin in range(0, len(samples), _BLOCK):
            block = samples[begin : begin + _BLOCK]
            indices = np.arange(block.start, block.stop, block.step)
            yield Block(indices, indices, None)
        return
    for sample in samples:  # one sample per block, because the iterable may be endless
        index = np.array([sample])
        yield Block(index, index, None)
