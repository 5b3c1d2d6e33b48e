"""`LatentReader`: segments of latents, read in blocks, with their captions or labels."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch
from clipmill.train.data.captions import Captions
from clipmill.train.data.latents.reading import LatentSample, SegmentReader, SegmentRequests
from clipmill.train.data.latents.ring import LatentRing
from clipmill.train.data.latents.segments import FALSE_COLOUR_STDS, LatentSegments, frame_times_us
from clipmill.train.data.loader import Block, LoaderSettings
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.table import SampleTable


class LatentReader:
    """Reads the segments of a table, whose parts are chunks of latents (clipmill.train.data.samples.RowReader).

    Sample i shows row i.
    """

    mixture: ClassVar[str] = "clipmill.train.data.latents.mixed:MixedLatentReader"

    def __init__(self, segments: LatentSegments, table: SampleTable, captions: Captions | None) -> None:
        assert table.frame is not None
        self.segments, self.captions = segments, captions
        self._chunk, self._frame = table.first_part, table.frame
        self._label_N = None if table.label is None else table.label[:, 0]
        self._rings: dict[LoaderSettings, LatentRing] = {}

    @property
    def num_frames(self) -> int:
        """Number of frames of a segment."""
        return self.segments.num_frames

    @property
    def segment_s(self) -> float:
        """Length of a segment, seconds."""
        return float(self.num_frames / self.segments.records.shape.fps)

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """The samples or failures of some blocks, in order."""
        # Not a generator, which would be resumed for every sample.
        return chain.from_iterable(self.read(block, loading) for block in blocks)

    def read(self, block: Block, loading: LoaderSettings) -> Iterator[LatentSample | FailedSample]:
        """The samples or failures of a block, in order."""
        return self.segment_reader.read(self.requests(block), loading)

    @cached_property
    def segment_reader(self) -> SegmentReader:
        """Reader of segments; the first use of it begins to fetch remote tars."""
        self.segments.maps.begin_fetching()
        return SegmentReader(self.segments)

    def requests(self, block: Block) -> SegmentRequests:
        """Requests for a block, each with one caption: drawn with the seed, or the first one without."""
        rows, chunk, frame = block.samples, self._chunk[block.samples], self._frame[block.samples].astype(np.int64)
        num_frames = np.minimum(self.segments.records.num_frames[chunk] - frame, self.num_frames)
        columns = {"position": block.positions, "clip_id": rows.astype(np.int64)}
        text_place = None
        if self.captions is not None:
            captions = self.captions.rows
            choice, seed = captions.choice, block.seed
            entry = choice.first(rows) if seed is None else choice.draw(rows, position=block.positions, seed=seed)
            caption = captions.of_entries(entry)
            columns["caption_id"] = captions.caption_id[caption].astype(np.int64)
            if captions.place is None:
                columns["text_row"] = captions.text_row[caption].astype(np.int64)
            else:
                text_place = captions.place[caption]
            if captions.num_tokens is not None:
                columns["num_tokens"] = captions.num_tokens[caption].astype(np.int64)
        if self._label_N is not None:
            columns["label"] = self._label_N[rows]
        if self.segments.has_tails:
            columns["num_frames"] = num_frames
        return SegmentRequests(columns, range(len(rows)), chunk, frame, num_frames, text_place)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[LatentSample]], Batch]:
        """The function that makes batches of samples; it uses the same memory in all iterations."""
        if loading not in self._rings:
            self._rings[loading] = LatentRing(self.segments, loading, keys_of=self.keys_of, captions=self.captions)
        return self._rings[loading].collate

    def keys_of(self, rows: NDArray[np.int64]) -> list[str]:
        """The chunks of rows."""
        return [self.segments.key(chunk) for chunk in self._chunk[rows].tolist()]

    def key(self, sample: int) -> str:
        """The chunk of a sample."""
        return self.segments.key(int(self._chunk[sample]))

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the videos of rows."""
        return self.segments.records.video_row[self._chunk[rows]].astype(np.int64)

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of segments in their videos, microseconds."""
        chunk, frame = self._chunk[rows], self._frame[rows]
        return frame_times_us(self.segments.records, chunk, frame, num_frames=self.num_frames)

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Start and end in their video of the frames in the middle of an evaluated segment, seconds."""
        begin_us, _ = self.span_us(np.array([sample]))
        fps = self.segments.records.shape.fps
        begin_s = float(begin_us[0]) / 1e6 + float((self.num_frames - num_frames) // 2 / fps)
        return begin_s, begin_s + float(num_frames / fps)

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as a model sees them, in false colours: three channels as red, green and blue [h, w, 3].

        Empty if the latents do not match their checksum.
        """
        number, shape = np.array([sample]), self.segments.records.shape
        [loaded] = self.read(Block(number, number, None), LoaderSettings())
        if isinstance(loaded, FailedSample):
            return []
        content, begin, end = loaded[2]
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

    def deviations(self) -> list[str]:
        """Which chunks the latents were made of, if not of the current ones, and where the tars are."""
        return [self.segments.made_of, self.segments.maps.describe()]
