"""`ClipReader`: the clips of a table, decoded from chunks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Sample
from clipmill.train.data.captions import Annotations
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.decoding.clip import Clip, ClipBuilder, ClipShape, make_clip
from clipmill.train.data.decoding.decoders import ChunkFrames
from clipmill.train.data.decoding.reading import ChunkBytes
from clipmill.train.data.frame_sampling import US_PER_S, frame_indices
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.table import SampleTable
from clipmill.train.data.workers import ReadAhead, ThreadedReader

if TYPE_CHECKING:
    import av


@dataclass(frozen=True)
class ClipPlan:
    """The frames of a requested clip, as (chunk, frame); `rng` draws the crop.

    `request.sample` is the row of the clip, and `key` its first chunk.
    """

    request: SampleRequest
    key: str
    frames: tuple[tuple[int, int], ...]
    rng: np.random.Generator | None

    @cached_property
    def by_chunk(self) -> dict[int, dict[int, list[int]]]:
        """The frames needed of each chunk, and the indices of each of them in the clip."""
        by_chunk: dict[int, dict[int, list[int]]] = {}
        for index, (chunk, frame) in enumerate(self.frames):
            by_chunk.setdefault(chunk, {}).setdefault(frame, []).append(index)
        return by_chunk


@dataclass(frozen=True)
class ReadClips:
    """The clips of a group of requests, read ahead of decoding: bytes, or why they cannot be read, by chunk.

    Attributes:
        shared: Chunks that several of the clips need.
        others: Other chunks of each clip.
    """

    plans: list[ClipPlan]
    shared: dict[int, ChunkBytes | SampleFailed]
    others: list[dict[int, ChunkBytes | SampleFailed]]


class ClipReader(ThreadedReader):
    """Reads the clips of a table from chunks: the frames of their spans, decoded and cropped. Thread-safe.

    Sample i shows row i // repeats.

    Args:
        chunks: The chunks, which are the parts of the table.
        shape: How clips are made.
        annotations: What samples get beside frames.
        repeats: Samples of a clip in an epoch. They follow one another, so that loaded as a group their chunks are read
            and decoded once.
        same_frames: Number of consecutive requests, of one clip, that draw the same moments in training.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        table: SampleTable,
        shape: ClipShape,
        *,
        annotations: Sequence[Annotations] = (),
        repeats: int = 1,
        same_frames: int = 1,
    ) -> None:
        assert table.begin_us is not None and table.end_us is not None
        self.chunks, self.decoder = chunks, chunks.decoder
        self._shape, self._annotations = shape, annotations
        self._begin_us, self._end_us, self._first_chunk = table.begin_us, table.end_us, table.first_part
        self._last_chunk = table.first_part if table.last_part is None else table.last_part
        self._repeats, self._of_same_frames = repeats, same_frames

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return self.chunks.key(int(self._first_chunk[sample // self._repeats]))

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of clips in their videos, microseconds."""
        return self._begin_us[rows], self._end_us[rows]

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the videos of clips."""
        return self.chunks.table.video_row[self._first_chunk[rows]].astype(np.int64)

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Start of the first and end of the last frame of an evaluated clip in its video, seconds."""
        frames = self.plan(SampleRequest(sample, sample, None)).frames
        times = [(self.chunks.table.times(chunk), frame) for chunk, frame in (frames[0], frames[-1])]
        (first, first_frame), (last, last_frame) = times
        return (
            first.start_ms / 1000 + first_frame * first.fps_den / first.fps_num,
            last.start_ms / 1000 + (last_frame + 1) * last.fps_den / last.fps_num,
        )

    def deviations(self) -> list[str]:
        """Deviations from the settings, with numbers."""
        parts = [self.chunks.describe()]
        if self._repeats > 1:
            noun = "crops of the same frames" if self._of_same_frames > 1 else "samples"
            parts.append(f"{self._repeats} {noun} of each in an epoch")
        sampling, table = self._shape.sampling, self.chunks.table
        if sampling.rule == "stride":
            fps_den = table.fps_den[self._first_chunk].astype(np.int64)
            window = sampling.num_frames * sampling.stride * US_PER_S * fps_den
            is_shrunk = (self._end_us - self._begin_us) * table.fps_num[self._first_chunk] < window
            if num_shrunk := int(is_shrunk.sum()):
                parts.append(f"{num_shrunk:,} shorter than {sampling.window}, with a smaller stride")
        return parts

    @property
    def ahead(self) -> ReadAhead | None:
        """How clips of a remote folder are read ahead of decoding; None for a local one."""
        num_readers = self.chunks.num_readers
        return ReadAhead(self.read, self.load_read, num_readers) if num_readers else None

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the clips of a group of requests; shared chunks are decoded once."""
        return self._load([self.plan(request) for request in requests], None)

    def read(self, requests: Sequence[SampleRequest]) -> ReadClips:
        """Read the bytes of the clips of a group of requests, for `load_read`."""
        plans = [self.plan(request) for request in requests]
        shared = {chunk: self._try_read(chunk, frames) for chunk, frames in _shared_chunks(plans).items()}
        others = [
            {chunk: self._try_read(chunk, frames) for chunk, frames in plan.by_chunk.items() if chunk not in shared}
            for plan in plans
        ]
        return ReadClips(plans, shared, others)

    def load_read(self, read: ReadClips) -> list[Sample | FailedSample]:
        """Decode and crop clips that were read: those that `load` gives."""
        return self._load(read.plans, read)

    def _load(self, plans: Sequence[ClipPlan], read: ReadClips | None) -> list[Sample | FailedSample]:
        shared = self._decode_shared(plans, read) if len(plans) > 1 else {}
        loaded: list[Sample | FailedSample] = []
        for number, plan in enumerate(plans):
            contents = {} if read is None else {**read.shared, **read.others[number]}
            try:
                loaded.append(self._sample(plan, self._make(plan, shared, contents)))
            except SampleFailed as error:
                loaded.append(error.at(plan.request.position))
        return loaded

    def plan(self, request: SampleRequest) -> ClipPlan:
        """Choose the frames of a requested sample."""
        request = replace(request, sample=request.sample // self._repeats) if self._repeats > 1 else request
        row = request.sample
        first, last = int(self._first_chunk[row]), int(self._last_chunk[row])
        chunks = [self.chunks.table.times(chunk) for chunk in range(first, last + 1)]
        begin_us, end_us = int(self._begin_us[row]), int(self._end_us[row])
        num_views = self._shape.views.num_clips
        rng = request.generator("frames", num_alike=self._of_same_frames)
        frames = frame_indices(begin_us, end_us, self._shape.sampling, chunks, rng=rng, num_views=num_views)
        places = tuple((first + place.chunk, place.frame) for place in frames)
        return ClipPlan(request, self.chunks.key(first), places, request.generator("crop"))

    def clip(self, plan: ClipPlan, decoded: Mapping[int, ChunkFrames]) -> Clip:
        """Crop the frames of a plan, given the decoded frames of each chunk; raises SampleFailed if they differ."""
        pictures = [decoded[chunk][frame] for chunk, frame in plan.frames]
        in_graph = self.chunks.rule == "filter"
        return make_clip(pictures, self._shape, rng=plan.rng, in_graph=in_graph, key=plan.key)

    def annotate(self, sample: Sample, request: SampleRequest) -> None:
        """Add to a sample what it has beside frames."""
        for annotations in self._annotations:
            annotations.add(sample, request)

    def _sample(self, plan: ClipPlan, clip: Clip) -> Sample:
        request = plan.request
        sample = Sample(
            position=request.position, key=plan.key, clip_id=request.sample, video=clip.video, colour=clip.colour
        )
        self.annotate(sample, request)
        return sample

    def _make(
        self, plan: ClipPlan, shared: Mapping[int, ChunkFrames], read: Mapping[int, ChunkBytes | SampleFailed]
    ) -> Clip:
        """Decode the chunks that are not `shared`, reading those that are not `read`; each frame is cropped as the
        decoder outputs it."""
        chunks = self.chunks
        if chunks.rule == "filter":
            decoded = {
                chunk: shared.get(chunk) or self.decoder.decode(self._bytes(chunk, frames, read))
                for chunk, frames in plan.by_chunk.items()
            }
            return self.clip(plan, decoded)
        building = ClipBuilder(self._shape, num_frames=len(plan.frames), rng=plan.rng, key=plan.key)
        for chunk, indices in plan.by_chunk.items():

            def add(frame: int, picture: "av.VideoFrame", indices: dict[int, list[int]] = indices) -> None:
                building.add(picture, indices[frame])

            if chunk in shared:
                for frame in indices:
                    add(frame, shared[chunk][frame])
            else:
                self.decoder.decode_each(self._bytes(chunk, indices, read), add)
        return building.clip()

    def _decode_shared(self, plans: Sequence[ClipPlan], read: ReadClips | None) -> dict[int, ChunkFrames]:
        """Frames of the chunks that several plans need; a chunk that fails is left out, and fails each of the plans."""
        shared: dict[int, ChunkFrames] = {}
        for chunk, needed in _shared_chunks(plans).items():
            try:
                content = self._bytes(chunk, needed, {} if read is None else read.shared)
                shared[chunk] = self.decoder.decode(content)
            except SampleFailed:
                continue
        return shared

    def _try_read(self, chunk: int, frames: Collection[int]) -> ChunkBytes | SampleFailed:
        try:
            return self.chunks.read(chunk, frames)
        except SampleFailed as error:
            return error

    def _bytes(self, chunk: int, frames: Collection[int], read: Mapping[int, ChunkBytes | SampleFailed]) -> ChunkBytes:
        content = read[chunk] if chunk in read else self.chunks.read(chunk, frames)
        if isinstance(content, SampleFailed):
            raise content
        return content


def _shared_chunks(plans: Sequence[ClipPlan]) -> dict[int, set[int]]:
    """The chunks that several plans need, and the frames that all of them need of each."""
    needed: dict[int, set[int]] = {}
    for plan in plans:
        for chunk, frames in plan.by_chunk.items():
            needed.setdefault(chunk, set()).update(frames)
    return {chunk: frames for chunk, frames in needed.items() if sum(chunk in plan.by_chunk for plan in plans) > 1}
