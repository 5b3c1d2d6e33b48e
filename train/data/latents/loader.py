"""Batches of latents with their text embeddings: the one class that the others of this package serve."""

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from train.data.caption_choice import CaptionTexts
from train.data.classes import ClassList
from train.data.cursor import Cursor, LoaderState, resume_cursor
from train.data.latents.checksums import Checksums
from train.data.latents.filling import Filled, fill, fill_checked
from train.data.latents.gather import Gather, RequestBlock, Words
from train.data.latents.records import FrameShape
from train.data.latents.segment_set import Captions, SegmentSet
from train.data.latents.segments import Tails
from train.data.order import SampleOrder
from train.data.outcomes import LoadedBatch

if TYPE_CHECKING:
    from train.models.text import Tokenize

# Visits are worked out this many at a time; the first blocks are small, so that the first batch does not wait.
_BLOCK = 1 << 14
_GROWTH = 8


class LatentLoader:
    """Batches of one split for one rank; `for loaded in loader` goes on without end (train.data.loader.LoadedBatch).

    A sample is a segment of a chunk's latents with one of the captions that overlap it: in training one drawn for
    each visit by a pure function of (seed, position), in evaluation the one of the lowest id. train.data.batch lists
    what is in a batch. Positions run on over the epochs without end, so no sample is dropped or shown twice where a
    batch does not divide an epoch. Rank r takes every `num_ranks`-th position; all ranks get batches without end.

    Args:
        data_dir: folder that prep made.
        split: of the manifest.
        segment: length of a segment in seconds, a whole number of frames.
        batch: samples of this rank's batch.
        seed: of order and captions.
        text: whether samples have captions; segments without one are then left out.
        tokenize: captions come as its tokens; without it as stored embeddings, and those without one are left out.
        sources: weights of captions' sources (train.config.data).
        classes: of labels, with `text=False`; segments without any of them are left out (train.data.latents.labels).
        tails: what becomes of the frames after the last full segment of a chunk: "drop", or "pad" with zeros
            (batches then say `num_frames`).
        depth: a batch is valid until `depth` further ones were taken. Buffers are pinned where there is a GPU.
        copy: give each batch memory of its own. Large batches then cost several times as much: every page is new.
        verify: compare every record with its checksum at its first visit, so that only the first epoch takes longer.
            One that differs is a failed sample: it is named, and in training the next sample of this rank takes its
            place.

    Attributes:
        samples: the set.
        place: where the batches taken so far end.

    Raises:
        UserError: nothing can be shown, the columns do not belong together, or a tar is missing or cut short.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        segment: str = "5s",
        batch: int = 32,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        text: bool = True,
        tokenize: "Tokenize | None" = None,
        sources: str | None = None,
        classes: Sequence[ClassList] = (),
        tails: Tails = "drop",
        depth: int = 2,
        copy: bool = False,
        verify: bool = True,
    ) -> None:
        if batch < 1 or depth < 1 or not 0 <= rank < num_ranks:
            raise ValueError(f"batch={batch}, depth={depth}, rank={rank} of {num_ranks}: out of range")
        if text and classes:
            raise ValueError("a set has captions or labels")
        captions: Captions = "none" if not text else "stored" if tokenize is None else "words"
        self.samples = SegmentSet(
            data_dir,
            split=split,
            segment=segment,
            captions=captions,
            tails=tails,
            wanted_sources=sources,
            classes=classes,
        )
        words = Words(CaptionTexts(data_dir), tokenize) if text and tokenize is not None else None
        self._batch, self._seed, self._rank, self._num_ranks = batch, seed, rank, num_ranks
        self._order = SampleOrder(len(self.samples), seed)
        self._gather = Gather(self.samples, batch=batch, depth=None if copy else depth, words=words)
        self._verify, self._checksums = verify, Checksums(self.samples)
        self.place = Cursor(0)

    def __len__(self) -> int:
        """Samples of an epoch, of all ranks together."""
        return len(self.samples)

    @property
    def num_samples(self) -> int:
        """As `len`."""
        return len(self)

    @property
    def num_clips(self) -> int:
        """Ids of clips are from 0 to below this."""
        return len(self)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are from 0 to below this; 0 in a set without."""
        captions = self.samples.captions
        return 0 if captions is None else int(captions.caption_id.max()) + 1

    @property
    def fingerprint(self) -> str:
        """Hash of which samples there are and in which order."""
        return self.samples.fingerprint

    @property
    def variant_name(self) -> str:
        """The variants that the samples are made of."""
        return self.samples.variant_name

    @property
    def frame_shape(self) -> FrameShape:
        """Channels, height, width and rate that all latents have."""
        return self.samples.records.shape

    @property
    def segment_frames(self) -> int:
        """Frames of a segment."""
        return self.samples.segments.num_frames

    def describe(self) -> str:
        """One line for the log: what is in the set, and what is left out and why."""
        return self.samples.describe()

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self.batches()

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order, from `position` on, or from where the loader stands.

        Raises:
            TooManyFailures: more than `max_failures` samples failed.
        """
        begin = self.place if position is None else Cursor(position)
        filled = self._filled(self._training_blocks(begin), max_failures=max_failures)
        for num_batches, (batch, failed, num_own) in enumerate(filled, start=1):
            num_common = num_batches * self._batch
            if begin.ahead or num_own != num_common:
                place = begin.after(num_common, num_own, rank=self._rank, num_ranks=self._num_ranks)
            else:
                place = Cursor(begin.position + num_common * self._num_ranks)
            self.place = place
            yield LoadedBatch(batch, failed, place)

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """This rank's part of every `every`-th sample, each once, in order; ranks differ by one sample at most.

        The last batch may be smaller, or empty where all that was left has failed.
        """
        for batch, failed, num_taken in self._filled(self._evaluation_blocks(every), max_failures=None):
            yield LoadedBatch(batch, failed, Cursor(min(num_taken * self._num_ranks * every, len(self))))

    def state_dict(self) -> LoaderState:
        """Where the batches taken so far end. It is the same for every rank, unless a sample has failed."""
        place = self.place
        return LoaderState(position=place.position, ahead=list(place.ahead), seed=self._seed, samples=self.fingerprint)

    def load_state_dict(self, *states: LoaderState) -> None:
        """Goes on from the states of all ranks, whatever the batch and the number of ranks were and are.

        One state is enough where no sample has failed, or where there was one rank.

        Raises:
            UserError: they are of another set of samples or another seed, in which their place means nothing, or of
                different steps.
        """
        self.place = resume_cursor(states, samples=self.fingerprint, seed=self._seed, what=self.describe())

    def _filled(self, blocks: Iterator[RequestBlock], *, max_failures: int | None) -> Iterator[Filled]:
        if not self._verify:
            return fill(blocks, self._gather, batch=self._batch)
        return fill_checked(blocks, self._gather, self._checksums, batch=self._batch, max_failures=max_failures)

    def _training_blocks(self, place: Cursor) -> Iterator[RequestBlock]:
        """This rank's visits from `place` on, in blocks of whole batches."""
        largest = max(_BLOCK // self._batch, 1)
        begin, num_batches = 0, 1
        while True:
            count = num_batches * self._batch
            positions = place.positions(begin, count, rank=self._rank, num_ranks=self._num_ranks)
            yield self._block(self._order.at(positions), positions, seed=self._seed)
            begin += count
            num_batches = min(num_batches * _GROWTH, largest)

    def _evaluation_blocks(self, every: int) -> Iterator[RequestBlock]:
        step = self._num_ranks * every
        count = max(_BLOCK // self._batch, 1) * self._batch * step
        for begin in range(0, len(self), count):
            samples = np.arange(begin + self._rank * every, min(begin + count, len(self)), step)
            yield self._block(samples, samples, seed=None)

    def _block(self, samples: NDArray[np.int64], positions: NDArray[np.int64], *, seed: int | None) -> RequestBlock:
        return self._gather.block(self.samples.request(samples, position=positions, seed=seed))
