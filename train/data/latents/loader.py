"""`LatentLoader`: batches of latents, with the captions or labels of their segments."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch
from clipmill.train.data.caption_choice import CaptionTexts
from clipmill.train.data.latents.reading import LatentSample, SegmentReader
from clipmill.train.data.latents.ring import LatentRing
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.latents.segment_set import SegmentSet
from clipmill.train.data.latents.segments import FrameShape, times_us
from clipmill.train.data.loader import BatchLoader, Order
from clipmill.train.data.order import Cursor, SampleOrder
from clipmill.train.data.outcomes import FailedSample, LoadedBatch

if TYPE_CHECKING:
    import torch

    from clipmill.train.models.text import Tokenize

FALSE_COLOUR_STDS = 2.0  # range of false colours: standard deviations on either side of grey

_BLOCK = 4096  # samples of an evaluation that are requested at a time


class LatentLoader(BatchLoader):
    """Batches of a split for one rank; `for loaded in loader` never ends (clipmill.train.data.outcomes.LoadedBatch).

    A sample is a segment of a chunk's latents with one of the captions that overlap it: in training one drawn by a pure
    function of (seed, position), in evaluation the one with the lowest id. clipmill.train.data.batch documents the
    batches. Positions count on across epochs, so that no sample is dropped or repeated if the batch size does not
    divide an epoch. Rank r takes every `num_ranks`-th position.

    Every record is verified against its checksum when it is first needed, so that only the first epoch takes longer. A
    record that does not match is a failed sample (clipmill.train.data.outcomes).

    Args:
        tokenize: makes tokens of captions that are words; without it, they are texts (`texts_of`).

    Attributes:
        samples: the set.

    Raises:
        UserError: nothing can be shown, the columns do not belong together, or a tar is missing or truncated.
    """

    mixture = "clipmill.train.data.latents.mixed:MixedLatents"

    def __init__(self, query: SegmentQuery, *, tokenize: "Tokenize | None" = None) -> None:
        import torch

        super().__init__(replace(query.loading, pin=not query.loading.can_keep and torch.cuda.is_available()))
        self._data_dir, self.split = query.data_dir, query.split
        self.samples = SegmentSet(query)
        self._order: Order = SampleOrder(len(self.samples), query.loading.seed)
        self._tokenize = tokenize

    def __len__(self) -> int:
        """Number of samples in an epoch, of all ranks together."""
        return len(self.samples)

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
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

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""
        captions, described = self.samples.captions, self.samples.describe()
        cut = (
            ""
            if self._tokenize is None or captions is None
            else self._texts.describe_cut(captions.caption_id, self._tokenize)
        )
        return "; ".join(filter(None, [described, cut]))

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self.batches()

    def evaluation_batches(self, *, every: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """See `Loader.evaluation_batches`."""
        return self._evaluated(len(self), every=every, begin=begin)

    def outcomes(self, samples: Iterable[int]) -> Iterator[LatentSample | FailedSample]:
        numbers = iter(samples)
        while block := list(islice(numbers, _BLOCK)):
            chosen = np.array(block)
            yield from self._read(chosen, chosen, seed=None)

    @property
    def segment_s(self) -> float:
        """Length of a segment, seconds."""
        return float(self.samples.segments.num_frames / self.frame_shape.fps)

    def span_us(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of the samples' segments in their videos, microseconds."""
        return times_us(self.samples.records, self.samples.segments, self.samples.segment_of(samples))

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Start and end in their video of the frames in the middle of an evaluated segment, seconds."""
        begin_us, _ = self.span_us(np.array([sample]))
        fps, length = self.frame_shape.fps, self.samples.segments.num_frames
        begin_s = float(begin_us[0]) / 1e6 + float((length - num_frames) // 2 / fps)
        return begin_s, begin_s + float(num_frames / fps)

    def texts_of(self, caption_id: NDArray[np.int64]) -> list[str]:
        """The texts of captions of the manifest."""
        return self._texts.texts(caption_id)

    def keys_of(self, samples: NDArray[np.int64]) -> list[str]:
        """The chunks of samples."""
        chunks = self.samples.segments.chunk_of(self.samples.segment_of(samples))
        return [self.samples.key(chunk) for chunk in chunks.tolist()]

    def key(self, sample: int) -> str:
        """The chunk."""
        return self.keys_of(np.array([sample]))[0]

    @cached_property
    def reader(self) -> SegmentReader:
        """What reads the samples."""
        self.samples.tars.begin_fetching()
        return SegmentReader(self.samples, self._loading)

    def _training_outcomes(self, begin: Cursor) -> Iterator[LatentSample | FailedSample]:
        # Not a generator, which would be resumed for every sample.
        return chain.from_iterable(
            self._read(self._order.at(positions), positions, seed=self._seed) for positions in self._positions(begin)
        )

    def _read(
        self, samples: NDArray[np.int64], positions: NDArray[np.int64], *, seed: int | None
    ) -> Iterator[LatentSample | FailedSample]:
        return self.reader.read(self.samples.request(samples, position=positions, seed=seed))

    def _collate(self) -> Callable[[Sequence[LatentSample]], Batch]:
        return self._ring.collate

    @cached_property
    def _ring(self) -> LatentRing:
        loading = self._loading
        tokenize = None if self._tokenize is None else self._tokens_by(self._tokenize)
        return LatentRing(
            self.samples,
            batch=loading.batch,
            pin=loading.pin,
            can_keep=loading.can_keep,
            keys_of=self.keys_of,
            tokenize=tokenize,
        )

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
        number = np.array([sample])
        columns = self.samples.request(number, position=number, seed=None).columns
        return self._texts.text(int(columns["caption_id"][0]))

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        captions = self.samples.captions
        assert captions is not None
        self._texts.require_different(captions.caption_id, split=self.split)

    def span_s(self, sample: int) -> tuple[float, float]:
        """Start and end of the segment in its video, seconds."""
        begin_us, end_us = self.span_us(np.array([sample]))
        return float(begin_us[0]) / 1e6, float(end_us[0]) / 1e6

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as a model sees them, in false colours: three channels as red, green and blue [h, w, 3].

        Empty if the latents do not match their checksum.
        """
        number, shape = np.array([sample]), self.frame_shape
        [found] = self._read(number, number, seed=None)
        if isinstance(found, FailedSample):
            return []
        content, begin, end = found[2]
        bits = np.frombuffer(content[begin:end], np.uint16)
        if shape.segment_frames:
            bits = bits.reshape(shape.channels, -1, shape.height, shape.width).swapaxes(0, 1)
        else:
            bits = bits.reshape(-1, shape.channels, shape.height, shape.width)
        if shape.dtype == "bfloat16":
            latents = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            latents = bits.view(np.float16).astype(np.float32)
        chosen = (np.arange(num_frames) * 2 + 1) * len(latents) // (2 * num_frames)
        colours = latents[chosen][:, np.arange(3) % shape.channels].transpose(0, 2, 3, 1)
        return list((np.clip(colours / (2 * FALSE_COLOUR_STDS) + 0.5, 0, 1) * 255).astype(np.uint8))


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
