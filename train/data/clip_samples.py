"""Clips of spans of videos, decoded from chunks, and what all sample sets of clips have in common."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.train.data.batch import Sample
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.decoding.clip import Clip, ClipBuilder, ClipShape, make_clip
from clipmill.train.data.decoding.decoders import ChunkFrames
from clipmill.train.data.decoding.pictures import rgb_pictures
from clipmill.train.data.decoding.reading import ChunkBytes
from clipmill.train.data.frame_sampling import US_PER_S, frame_indices
from clipmill.train.data.loader import Loader, LoaderSettings, ReadAhead, SampleRequest
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.usable_captions import Spans

if TYPE_CHECKING:
    import av


@dataclass(frozen=True)
class ClipPlan:
    """The frames of a requested clip, as (chunk, frame); `rng` draws the crop.

    `request.sample` is the number of the clip, and `key` its first chunk.
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
        shared: of the chunks that several of the clips need.
        own: of each clip, its other chunks.
    """

    plans: list[ClipPlan]
    shared: dict[int, ChunkBytes | SampleFailed]
    own: list[dict[int, ChunkBytes | SampleFailed]]


class ClipSamples(Loader):
    """Clips of `spans`, decoded from chunks, and the loader of their batches; sample i shows clip i // repeats.

    The base of sample sets; thread-safe. A subclass sets what `describe` needs before it calls `__init__`.

    Args:
        spans: of the distinct clips.
        shape: how clips are made.
        split: of the manifest.
        repeats: samples of a clip in an epoch. They follow one another, so that loaded as a group their chunks are read
            and decoded once.
        same_frames: number of consecutive requests, of one clip, that draw the same moments in training.

    Raises:
        UserError: there are no samples.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        spans: Spans,
        shape: ClipShape,
        *,
        split: str,
        loading: LoaderSettings,
        repeats: int = 1,
        same_frames: int = 1,
    ) -> None:
        self.chunks, self.spans, self._shape, self.split = chunks, spans, shape, split
        self._group, self._repeats, self._of_same_frames = loading.group, repeats, same_frames
        if not len(self):
            raise UserError(
                f"no clip of split {split!r} can be shown: {self.describe()}",
                hint="see prep status; captions and labels come from prep manifest"
                if not chunks.selection.text
                else "use a weaker condition: it must hold for all chunks that a clip touches, which are those of the "
                "whole video for a caption without times",
            )
        super().__init__(self, loading, ahead=self.ahead)

    def __len__(self) -> int:
        return len(self.spans) * self._repeats

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self)

    @property
    def num_clips(self) -> int:
        """Number of distinct clips; ids of clips are in [0, num_clips)."""
        return len(self.spans)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids); 0 in a set without captions."""
        return 0

    @property
    def mixing_facts(self) -> dict[str, str]:
        """What has to be the same in all sets of a mixture. Clips of any size and frame rate become alike."""
        return {}

    @property
    def variant_name(self) -> str:
        """The variants that the samples come from."""
        return self.chunks.variant_name

    def describe(self) -> str:
        """One line for the log: what the set contains, what was excluded and why."""
        raise NotImplementedError

    def complete(self, sample: Sample, request: SampleRequest) -> None:
        """Add what a sample holds beside frames and names; `request.sample` is the number of the clip."""

    def sample(self, plan: ClipPlan, clip: Clip) -> Sample:
        """The sample of a clip."""
        request = plan.request
        sample = Sample(
            position=request.position, key=plan.key, clip_id=request.sample, video=clip.video, colour=clip.colour
        )
        self.complete(sample, request)
        return sample

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return self.chunks.key(int(self.spans.first_chunk[sample // self._repeats]))

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of clips in their videos, microseconds."""
        return self.spans.begin_us[clips], self.spans.end_us[clips]

    def span_s(self, sample: int) -> tuple[float, float]:
        """Start and end of the clip in its video, seconds."""
        clip = sample // self._repeats
        return float(self.spans.begin_us[clip]) / 1e6, float(self.spans.end_us[clip]) / 1e6

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as a model sees them in an evaluation, RGB [H, W, 3]; empty if the clip cannot be read or decoded."""
        try:
            shown = self._make(self.plan(SampleRequest(sample, sample, None)), {}, {})
        except SampleFailed:
            return []
        pictures = shown.video
        if not self._shape.rgb:
            pictures = rgb_pictures(shown.video, shown.colour, size_px=self._shape.size_px)
        return list(pictures)[:num_frames]

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
        own = [
            {chunk: self._try_read(chunk, frames) for chunk, frames in plan.by_chunk.items() if chunk not in shared}
            for plan in plans
        ]
        return ReadClips(plans, shared, own)

    def load_read(self, read: ReadClips) -> list[Sample | FailedSample]:
        """Decode and crop clips that were read: those that `load` gives."""
        return self._load(read.plans, read)

    def _load(self, plans: Sequence[ClipPlan], read: ReadClips | None) -> list[Sample | FailedSample]:
        shared = self._decode_shared(plans, read) if len(plans) > 1 else {}
        loaded: list[Sample | FailedSample] = []
        for number, plan in enumerate(plans):
            there = {} if read is None else {**read.shared, **read.own[number]}
            try:
                loaded.append(self.sample(plan, self._make(plan, shared, there)))
            except SampleFailed as error:
                loaded.append(error.at(plan.request.position))
        return loaded

    def plan(self, request: SampleRequest) -> ClipPlan:
        """Choose the frames of a requested sample."""
        request = replace(request, sample=request.sample // self._repeats) if self._repeats > 1 else request
        spans, clip = self.spans, request.sample
        first, last = int(spans.first_chunk[clip]), int(spans.last_chunk[clip])
        chunks = [self.chunks.table.times(chunk) for chunk in range(first, last + 1)]
        begin_us, end_us = int(spans.begin_us[clip]), int(spans.end_us[clip])
        num_views = self._shape.views.num_clips
        rng = request.generator("frames", num_alike=self._of_same_frames)
        frames = frame_indices(begin_us, end_us, self._shape.sampling, chunks, rng=rng, num_views=num_views)
        places = tuple((first + one.chunk, one.frame) for one in frames)
        return ClipPlan(request, self.chunks.key(first), places, request.generator("crop"))

    def clip(self, plan: ClipPlan, decoded: Mapping[int, ChunkFrames]) -> Clip:
        """Crop the frames of a plan, given the decoded frames of each chunk; raises SampleFailed if they differ."""
        pictures = [decoded[chunk][frame] for chunk, frame in plan.frames]
        in_graph = self.chunks.rule == "filter"
        return make_clip(pictures, self._shape, rng=plan.rng, in_graph=in_graph, key=plan.key)

    def deviations(self) -> list[str]:
        """What deviates from the settings, with numbers."""
        parts = [self.chunks.describe()] if self.chunks.describe() else []
        sampling, spans, table = self._shape.sampling, self.spans, self.chunks.table
        if sampling.rule == "stride":
            fps_den = table.fps_den[spans.first_chunk].astype(np.int64)
            window = sampling.num_frames * sampling.stride * US_PER_S * fps_den
            num_shrunk = int(((spans.end_us - spans.begin_us) * table.fps_num[spans.first_chunk] < window).sum())
            if num_shrunk:
                parts.append(f"{num_shrunk:,} shorter than {sampling.window}, with a smaller stride")
        return parts

    def _make(
        self, plan: ClipPlan, shared: Mapping[int, ChunkFrames], read: Mapping[int, ChunkBytes | SampleFailed]
    ) -> Clip:
        """Decode the chunks that are not `shared`, reading those that are not `read`; each frame is cropped as the
        decoder outputs it."""
        chunks = self.chunks
        if chunks.rule == "filter":
            decoded = {
                chunk: shared.get(chunk) or chunks.decoder.decode(self._bytes(chunk, frames, read))
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
                chunks.decoder.decode_each(self._bytes(chunk, indices, read), add)
        return building.clip()

    def _decode_shared(self, plans: Sequence[ClipPlan], read: ReadClips | None) -> dict[int, ChunkFrames]:
        """Frames of the chunks that several plans need; a chunk that fails is left out, and fails each of the plans."""
        shared: dict[int, ChunkFrames] = {}
        for chunk, needed in _shared_chunks(plans).items():
            try:
                content = self._bytes(chunk, needed, {} if read is None else read.shared)
                shared[chunk] = self.chunks.decoder.decode(content)
            except SampleFailed:
                continue
        return shared

    def _try_read(self, chunk: int, frames: Collection[int]) -> ChunkBytes | SampleFailed:
        try:
            return self.chunks.read(chunk, frames)
        except SampleFailed as error:
            return error

    def _bytes(self, chunk: int, frames: Collection[int], read: Mapping[int, ChunkBytes | SampleFailed]) -> ChunkBytes:
        found = read[chunk] if chunk in read else self.chunks.read(chunk, frames)
        if isinstance(found, SampleFailed):
            raise found
        return found


def _shared_chunks(plans: Sequence[ClipPlan]) -> dict[int, set[int]]:
    """The chunks that several plans need, and the frames that all of them need of each."""
    wanted: dict[int, set[int]] = {}
    for plan in plans:
        for chunk, frames in plan.by_chunk.items():
            wanted.setdefault(chunk, set()).update(frames)
    return {chunk: frames for chunk, frames in wanted.items() if sum(chunk in plan.by_chunk for plan in plans) > 1}
