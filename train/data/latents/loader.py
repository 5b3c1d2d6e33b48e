"""`LatentLoader`: batches of latents, with the captions or labels of their segments."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.caption_choice import CaptionTexts
from clipmill.train.data.classes import ClassList
from clipmill.train.data.latents.filling import Checksums, FilledBatch, fill
from clipmill.train.data.latents.gather import Gather, RequestBlock
from clipmill.train.data.latents.opened_segments import Captions
from clipmill.train.data.latents.requests import SegmentRequests
from clipmill.train.data.latents.segment_set import SegmentSet
from clipmill.train.data.latents.segments import FrameShape, Tails, times_us
from clipmill.train.data.loader import Order
from clipmill.train.data.order import Cursor, Resumable, SampleOrder, Share
from clipmill.train.data.outcomes import LoadedBatch, SampleFailed
from clipmill.train.data.remote import RemoteTars
from clipmill.train.data.remote_maps import remote_parts

if TYPE_CHECKING:
    import torch

    from clipmill.train.models.text import Tokenize

FALSE_COLOUR_STDS = 2.0  # range of false colours: standard deviations on either side of grey

# Number of requests computed at a time; the first blocks are small, so that the first batch does not wait.
_BLOCK = 1 << 14
_GROWTH = 8


class LatentLoader(Resumable):
    """Batches of a split for one rank; `for loaded in loader` never ends (clipmill.train.data.outcomes.LoadedBatch).

    A sample is a segment of a chunk's latents with one of the captions that overlap it: in training one drawn by a pure
    function of (seed, position), in evaluation the one with the lowest id. clipmill.train.data.batch documents the
    batches. Positions count on across epochs, so that no sample is dropped or repeated if the batch size does not
    divide an epoch. Rank r takes every `num_ranks`-th position.

    Args:
        data_dir: folder that prep made.
        split: of the manifest.
        segment: length of a segment in seconds, a whole number of frames.
        batch: samples in this rank's batch.
        seed: of the sample order and the choice of captions.
        text: give samples captions; segments without one are then excluded.
        tokenize: makes captions tokens; without it they are stored embeddings, and those without one are excluded.
        words: captions are texts (`texts_of`), neither tokens nor embeddings.
        sources: weights of the captions' sources (clipmill.train.config.data).
        classes: of labels, in place of captions; segments without any of them are excluded
            (clipmill.train.data.latents.labels).
        max_segments: at most this many samples of each video, spread evenly over it.
        tails: what to do with the frames after the last full segment of a chunk: "drop", or "pad" with zeros (batches
            then have `num_frames`).
        depth: a batch is valid until `depth` further ones were taken. Buffers are pinned if there is a GPU.
        copy: never overwrite a batch that is in use, whatever `depth`; its memory is not pinned.
        verify: verify every record against its checksum when it is first needed, so that only the first epoch takes
            longer. A record that does not match is a failed sample (clipmill.train.data.outcomes).
        where: an expression that selects segments, by chunks and captions (clipmill.shards.where); None for all.
        tars: reads the tars of a remote data folder, whose small files are in `data_dir`.

    Attributes:
        samples: the set.

    Raises:
        UserError: nothing can be shown, the columns do not belong together, or a tar is missing or truncated.
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
        words: bool = False,
        sources: str | None = None,
        classes: Sequence[ClassList] = (),
        max_segments: int | None = None,
        tails: Tails = "drop",
        depth: int = 2,
        copy: bool = False,
        verify: bool = True,
        where: str | None = None,
        tars: RemoteTars | None = None,
    ) -> None:
        if batch < 1 or depth < 1 or not 0 <= rank < num_ranks:
            raise ValueError(f"batch={batch}, depth={depth}, rank={rank} of {num_ranks}: out of range")
        super().__init__(seed=seed)
        self._data_dir, self.split = data_dir, split
        captions: Captions = "none" if classes or not text else "words" if words or tokenize else "stored"
        self.samples = SegmentSet(
            data_dir,
            split=split,
            segment=segment,
            captions=captions,
            tails=tails,
            wanted_sources=sources,
            classes=classes,
            max_segments=max_segments,
            where=where,
            tars=tars,
        )
        self._batch, self._rank, self._num_ranks = batch, rank, num_ranks
        self._order: Order = SampleOrder(len(self.samples), seed)
        self._tokenize = tokenize if captions == "words" else None
        self._depth, self._verify = None if copy else depth, verify

    def __len__(self) -> int:
        """Number of samples in an epoch, of all ranks together."""
        return len(self.samples)

    @property
    def num_samples(self) -> int:
        """The same."""
        return len(self)

    @property
    def num_clips(self) -> int:
        """Ids of clips are in [0, num_clips)."""
        return len(self)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in a set without captions."""
        return self.samples.num_caption_ids

    @property
    def mixing_facts(self) -> dict[str, str]:
        """What has to be the same in all sets of a mixture."""
        return self.samples.mixing_facts

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""
        return self.samples.fingerprint

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self.samples.variant_name

    @property
    def frame_shape(self) -> FrameShape:
        """Channels, height, width and frame rate of all latents."""
        return self.samples.records.shape

    @property
    def segment_frames(self) -> int:
        """Number of frames in a segment."""
        return self.samples.segments.num_frames

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""
        return self.samples.describe()

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self.batches()

    def batches(self, *, position: int | None = None, max_failures: int = 100) -> Generator[LoadedBatch, None, None]:
        """Endless batches in training order, from `position` on; by default from the cursor.

        Raises:
            TooManyFailures: more than `max_failures` samples failed.
        """
        begin = self.cursor if position is None else Cursor(position)
        filled = self._fill(self._training_blocks(begin), max_failures=max_failures)
        for num_batches, (batch, failed, num_own) in enumerate(filled, start=1):
            num_common = num_batches * self._batch
            if begin.ahead or num_own != num_common:
                cursor = begin.after(num_common, num_own, self._share)
            else:
                cursor = Cursor(begin.position + num_common * self._num_ranks)
            self.cursor = cursor
            yield LoadedBatch(batch, failed, cursor)

    def evaluation_batches(self, *, every: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """This rank's share of every `every`-th sample, once, in order; the last batch may be smaller or empty.

        Args:
            begin: position to start at: 0, or that of the cursor after a batch.
        """
        for batch, failed, num_taken in self._fill(self._evaluation_blocks(every, begin), max_failures=None):
            yield LoadedBatch(batch, failed, Cursor(min(begin + num_taken * self._num_ranks * every, len(self))))

    def span_us(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Begin and end of the samples' segments in their videos, microseconds."""
        return times_us(self.samples.records, self.samples.segments, self.samples.segment_of(samples))

    def texts_of(self, caption_id: NDArray[np.int64]) -> list[str]:
        """The texts of captions of the manifest."""
        return self._texts.texts(caption_id)

    @cached_property
    def _gather(self) -> Gather:
        tokens_of = None if self._tokenize is None else self._tokens_by(self._tokenize)
        return Gather(self.samples, batch=self._batch, depth=self._depth, tokenize=tokens_of)

    @cached_property
    def _checksums(self) -> Checksums:
        for part in remote_parts(self.samples.tars):
            part.begin_fetching()
        return Checksums(self.samples)

    def _fill(self, blocks: Iterator[RequestBlock], *, max_failures: int | None) -> Iterator[FilledBatch]:
        checksums = self._checksums if self._verify or remote_parts(self.samples.tars) else None
        return fill(blocks, self._gather, checksums, batch=self._batch, max_failures=max_failures)

    @property
    def _share(self) -> Share:
        return Share(self._rank, self._num_ranks)

    def _training_blocks(self, cursor: Cursor) -> Iterator[RequestBlock]:
        """This rank's requests from `cursor` on, in blocks of whole batches."""
        largest = max(_BLOCK // self._batch, 1)
        begin, num_batches = 0, 1
        while True:
            count = num_batches * self._batch
            positions = cursor.positions(begin, count, self._share)
            yield self._block(self._order.at(positions), positions, seed=self._seed)
            begin += count
            num_batches = min(num_batches * _GROWTH, largest)

    def _evaluation_blocks(self, every: int, first: int) -> Iterator[RequestBlock]:
        step = self._num_ranks * every
        count = max(_BLOCK // self._batch, 1) * self._batch * step
        for begin in range(first, len(self), count):
            samples = np.arange(begin + self._rank * every, min(begin + count, len(self)), step)
            yield self._block(samples, samples, seed=None)

    def _block(self, samples: NDArray[np.int64], positions: NDArray[np.int64], *, seed: int | None) -> RequestBlock:
        return self._gather.block(self.samples.request(samples, position=positions, seed=seed))

    def _tokens_by(self, tokenize: "Tokenize") -> "Callable[[torch.Tensor], torch.Tensor]":
        import torch

        def tokens(caption_id: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.stack([tokenize(text) for text in self.texts_of(caption_id.numpy())]))

        return tokens

    @cached_property
    def _texts(self) -> CaptionTexts:
        return CaptionTexts(self._data_dir)


class CaptionedLatents(LatentLoader):
    """A `LatentLoader` with text, and what an evaluation shows of single samples, each with its first caption."""

    @property
    def text_width(self) -> int | None:
        """Width of the stored embeddings; None if captions are tokens."""
        return None if self.samples.text is None else self.samples.text.width

    def text(self, sample: int) -> str:
        """The text of the caption."""
        caption_id = self._request(sample).caption_id
        assert caption_id is not None
        return self._texts.text(int(caption_id[0]))

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        captions = self.samples.captions
        assert captions is not None
        self._texts.require_different(captions.caption_id, split=self.split)

    def key(self, sample: int) -> str:
        """The chunk."""
        return self.samples.key(int(self._request(sample).chunk[0]))

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the segment in its video, seconds."""
        begin_us, end_us = self.span_us(np.array([sample]))
        return float(begin_us[0]) / 1e6, float(end_us[0]) / 1e6

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as a model sees them, in false colours: three channels as red, green and blue [h, w, 3].

        Empty if the latents do not match their checksum.
        """
        request, shape = self._request(sample), self.frame_shape
        try:
            with self._checksums.held(int(request.chunk[0])):
                bits = self.samples.frames(request, 0).copy()
        except SampleFailed:
            return []
        if shape.dtype == "bfloat16":
            latents = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            latents = bits.view(np.float16).astype(np.float32)
        chosen = (np.arange(num_frames) * 2 + 1) * len(latents) // (2 * num_frames)
        colours = latents[chosen][:, np.arange(3) % shape.channels].transpose(0, 2, 3, 1)
        return list((np.clip(colours / (2 * FALSE_COLOUR_STDS) + 0.5, 0, 1) * 255).astype(np.uint8))

    def _request(self, sample: int) -> SegmentRequests:
        at = np.array([sample])
        return self.samples.request(at, position=at, seed=None)


class LabelledLatents(LatentLoader):
    """A `LatentLoader` with `classes`: its samples are the segments that have any of the labels."""

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """int64 [samples, labels], the class of each in each class list; -1 if it has none."""
        assert self.samples.labels is not None
        return self.samples.labels.label[self.samples.rows_of(np.arange(len(self)))]

    @property
    def labels(self) -> NDArray[np.int64]:
        """int64 [samples], the class of each in the first class list."""
        return self.all_labels[:, 0]

    @property
    def video(self) -> NDArray[np.int64]:
        """int64 [samples], number of the video of each."""
        return self.samples.video_of(np.arange(len(self)))
