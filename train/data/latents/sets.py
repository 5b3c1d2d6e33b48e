"""The training set of a dual encoder on latents: segments with one of their captions, as tokens or as embedding."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from train.data.caption_choice import CaptionTexts
from train.data.latents.loader import LatentLoader
from train.data.latents.segment_set import SegmentRequests
from train.data.latents.segments import times_us
from train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    from train.models.text import Tokenize

from collections.abc import Sequence

from train.data.classes import ClassList
from train.data.latents.labels import SegmentLabels

SPREAD = 2.0  # of false colours: standard deviations on either side of grey


class CaptionedLatents(LatentLoader):
    """A `LatentLoader` with text, and what an evaluation shows of single samples, each with its first caption."""

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        segment: str,
        batch: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        tokenize: "Tokenize | None" = None,
        sources: str | None = None,
    ) -> None:
        super().__init__(
            data_dir,
            split=split,
            segment=segment,
            batch=batch,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
            tokenize=tokenize,
            sources=sources,
        )
        self._data_dir = data_dir
        self.split = split

    @property
    def text_width(self) -> int | None:
        """Width of the stored embeddings; None where captions come as tokens."""
        return None if self.samples.text is None else self.samples.text.width

    def text(self, sample: int) -> str:
        """The words of the caption."""
        caption_id = self._request(sample).caption_id
        assert caption_id is not None
        return self._texts.text(int(caption_id[0]))

    def require_different_texts(self) -> None:
        """Raises a UserError where all captions are the same text: there is nothing to tell apart."""
        captions = self.samples.captions
        assert captions is not None
        self._texts.require_different(captions.caption_id, split=self.split)

    def key(self, sample: int) -> str:
        """The chunk."""
        return self.samples.key(int(self._request(sample).chunk[0]))

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the segment in its video, seconds."""
        captions = self.samples.captions
        assert captions is not None
        numbers = captions.segment[np.array([sample])].astype(np.int64)
        begin_us, end_us = times_us(self.samples.records, self.samples.segments, numbers)
        return float(begin_us[0]) / 1e6, float(end_us[0]) / 1e6

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them, in false colours: three channels as red, green and blue [h, w, 3].

        None where they are not those written.
        """
        request, shape = self._request(sample), self.frame_shape
        try:
            self._checksums.require_good(int(request.chunk[0]))
        except SampleFailed:
            return []
        content = self.samples.tars.bytes_at(int(request.address[0]), self.samples.segment_bytes)
        if shape.dtype == "bfloat16":
            bits = np.frombuffer(content, np.uint16).astype(np.uint32) << np.uint32(16)
            latents = bits.view(np.float32)
        else:
            latents = np.frombuffer(content, np.float16).astype(np.float32)
        latents = latents.reshape(-1, shape.channels, shape.height, shape.width)
        chosen = (np.arange(num_frames) * 2 + 1) * len(latents) // (2 * num_frames)
        colours = latents[chosen][:, np.arange(3) % shape.channels].transpose(0, 2, 3, 1)
        return list((np.clip(colours / (2 * SPREAD) + 0.5, 0, 1) * 255).astype(np.uint8))

    @cached_property
    def _texts(self) -> CaptionTexts:
        return CaptionTexts(self._data_dir)

    def _request(self, sample: int) -> SegmentRequests:
        at = np.array([sample])
        return self.samples.request(at, position=at, seed=None)


# The set of (segment of latents, class) samples of one split: the twin of `train.data.labelled_clips`.


class LabelledLatents(LatentLoader):
    """A `LatentLoader` of the segments that have a label; `train.data.latents.labels` says which they have.

    Args:
        classes: what labels are numbered by.
        also: of further labels; segments that have any of the labels are then samples.

    Raises:
        UserError: there is no such data, or no segment with a label.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        classes: ClassList,
        segment: str,
        batch: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        also: Sequence[ClassList] = (),
    ) -> None:
        super().__init__(
            data_dir,
            split=split,
            segment=segment,
            batch=batch,
            seed=seed,
            rank=rank,
            num_ranks=num_ranks,
            text=False,
            classes=(classes, *also),
        )
        self.split = split

    @property
    def all_labels(self) -> NDArray[np.int64]:
        """int64 [samples, 1 + further labels], the classes of each; -1 where it has none."""
        return self._labels.label

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of `classes`: int64 [samples]."""
        return self._labels.label[:, 0]

    @property
    def video(self) -> NDArray[np.int64]:
        """int64 [samples], number of the video of each."""
        return self.samples.video_of(np.arange(len(self)))

    @property
    def _labels(self) -> SegmentLabels:
        assert self.samples.labels is not None
        return self.samples.labels
