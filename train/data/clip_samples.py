"""Pictures of clips: spans of videos, decoded from chunks."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.batch import Sample
from train.data.chunks import ChunkSet
from train.data.cursor import LoaderState
from train.data.decoding.chunks import ChunkFrames
from train.data.decoding.clip import Clip, ClipMaking, ClipShape, frame_places, make_clip
from train.data.decoding.pictures import rgb_pictures
from train.data.frame_sampling import US_PER_S
from train.data.loader import Loader, LoaderSettings, SampleRequest
from train.data.outcomes import FailedSample, LoadedBatch, SampleFailed
from train.data.usable_captions import Spans

if TYPE_CHECKING:
    import av


@dataclass(frozen=True)
class ClipPlan:
    """What a visit shows: (chunk, frame) of each picture; `rng` goes on to draw the crop."""

    request: SampleRequest
    places: tuple[tuple[int, int], ...]
    rng: np.random.Generator | None

    @cached_property
    def by_chunk(self) -> dict[int, dict[int, list[int]]]:
        """The frames of each chunk, and the places of each of them in the clip."""
        by_chunk: dict[int, dict[int, list[int]]] = {}
        for place, (chunk, frame) in enumerate(self.places):
            by_chunk.setdefault(chunk, {}).setdefault(frame, []).append(place)
        return by_chunk


class VideoClips:
    """The clips of `spans`, shown as `shape` says; a sample's number is its clip's. Safe to use from many threads.

    Args:
        visits_of_same_frames: so many visits in a row, of one clip, draw their moments together in training.
    """

    def __init__(self, chunks: ChunkSet, spans: Spans, shape: ClipShape, *, requests_of_same_frames: int = 1) -> None:
        self.chunks, self.spans, self._shape = chunks, spans, shape
        self._requests_of_same_frames = requests_of_same_frames

    def __len__(self) -> int:
        return len(self.spans)

    def key(self, clip: int) -> str:
        """The chunk in which a clip begins."""
        return self.chunks.key(int(self.spans.first_chunk[clip]))

    def span_s(self, clip: int) -> tuple[float, float]:
        """Begin and end of a clip in its video, seconds."""
        return float(self.spans.begin_us[clip]) / 1e6, float(self.spans.end_us[clip]) / 1e6

    def pictures(self, clip: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them in an evaluation, RGB [H, W, 3]; none where they cannot be had."""
        try:
            plan = self.plan(SampleRequest(clip, clip, None))
            shown = self._show(plan, {})
        except SampleFailed:
            return []
        pictures = shown.video
        if not self._shape.rgb:
            pictures = np.stack(rgb_pictures(shown.video, shown.colour, size_px=self._shape.size_px))
        return list(pictures)[:num_frames]

    def load(
        self, requests: Sequence[SampleRequest], finish: Callable[[SampleRequest, Clip], Sample]
    ) -> list[Sample | FailedSample]:
        """Reads, decodes and crops clips, and lets `finish` make samples of them.

        A chunk that several of them show is decoded once.
        """
        plans = [self.plan(request) for request in requests]
        shared = self._decode_shared(plans) if len(plans) > 1 else {}
        loaded: list[Sample | FailedSample] = []
        for plan in plans:
            try:
                loaded.append(finish(plan.request, self._show(plan, shared)))
            except SampleFailed as error:
                loaded.append(FailedSample(plan.request.position, error.key, error.reason, error.detail))
        return loaded

    def plan(self, request: SampleRequest) -> ClipPlan:
        """Which frames a visit shows."""
        spans, number = self.spans, request.sample
        first, last = int(spans.first_chunk[number]), int(spans.last_chunk[number])
        chunks = [self.chunks.table.times(chunk) for chunk in range(first, last + 1)]
        rng = request.rng()
        rng_of_moments = (
            rng if self._requests_of_same_frames == 1 else request.shared_rng(self._requests_of_same_frames)
        )
        begin_us, end_us = int(spans.begin_us[number]), int(spans.end_us[number])
        num_views = self._shape.views.num_clips
        places = frame_places(begin_us, end_us, self._shape.sampling, chunks, rng=rng_of_moments, num_views=num_views)
        return ClipPlan(request, tuple((first + place.chunk, place.frame) for place in places), rng)

    def clip(self, plan: ClipPlan, decoded: Mapping[int, ChunkFrames]) -> Clip:
        """Crops the frames of a plan, which are among those decoded of each chunk; SampleFailed where they differ."""
        pictures = [decoded[chunk][frame] for chunk, frame in plan.places]
        in_graph = self.chunks.rule == "filter"
        return make_clip(pictures, self._shape, rng=plan.rng, in_graph=in_graph, key=self.key(plan.request.sample))

    def describe(self) -> list[str]:
        """What is not as it was asked for."""
        parts = [self.chunks.describe()] if self.chunks.describe() else []
        if num_shrunk := self._num_shrunk:
            parts.append(f"{num_shrunk:,} shorter than {self._shape.sampling.window}, with a smaller stride")
        return parts

    def _show(self, plan: ClipPlan, shared: Mapping[int, ChunkFrames]) -> Clip:
        """Reads and decodes what is not `shared`; a frame is cropped when it comes out of the decoder."""
        chunks = self.chunks
        if chunks.rule == "filter":
            decoded = {
                chunk: shared.get(chunk) or chunks.decode(chunks.read(chunk, frames))
                for chunk, frames in plan.by_chunk.items()
            }
            return self.clip(plan, decoded)
        key = self.key(plan.request.sample)
        making = ClipMaking(self._shape, num_frames=len(plan.places), rng=plan.rng, key=key)
        for chunk, places in plan.by_chunk.items():

            def add(frame: int, picture: "av.VideoFrame", places: dict[int, list[int]] = places) -> None:
                making.add(picture, places[frame])

            if chunk in shared:
                for frame in places:
                    add(frame, shared[chunk][frame])
            else:
                chunks.decode_each(chunks.read(chunk, places), add)
        return making.clip()

    def _decode_shared(self, plans: Sequence[ClipPlan]) -> dict[int, ChunkFrames]:
        """Frames of the chunks that several plans show; a chunk that fails is left to each of them to fail with."""
        wanted: dict[int, set[int]] = {}
        for plan in plans:
            for chunk, places in plan.by_chunk.items():
                wanted.setdefault(chunk, set()).update(places)
        shared: dict[int, ChunkFrames] = {}
        for chunk, frames in wanted.items():
            if sum(chunk in plan.by_chunk for plan in plans) > 1:
                try:
                    shared[chunk] = self.chunks.decode(self.chunks.read(chunk, frames))
                except SampleFailed:
                    continue
        return shared

    @property
    def _num_shrunk(self) -> int:
        sampling, spans, table = self._shape.sampling, self.spans, self.chunks.table
        if sampling.rule != "stride":
            return 0
        window = sampling.num_frames * sampling.stride * US_PER_S * table.fps_den[spans.first_chunk]
        return int(((spans.end_us - spans.begin_us) * table.fps_num[spans.first_chunk] < window).sum())


# What all sets of clips have in common: clips of pictures, and a loader that makes batches of them.


class ClipSamples:
    """Samples of one split; sample i is clip i. Safe to use from many threads.

    A subclass has what `describe` needs before it calls `__init__`.

    Attributes:
        split: of the manifest.
        clips: their pictures.

    Raises:
        UserError: there are none.
    """

    def __init__(self, clips: VideoClips, *, split: str, loading: LoaderSettings) -> None:
        self.split, self.clips, self._group = split, clips, loading.group
        if not len(self):
            raise UserError(
                f"no clip of split {split!r} can be shown: {self.describe()}",
                hint="see prep status; captions and labels come from prep manifest",
            )
        self._loader = Loader(self, loading)

    def __len__(self) -> int:
        return len(self.clips)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch: clips."""
        return len(self)

    @property
    def num_clips(self) -> int:
        """Ids of clips are from 0 to below this."""
        return len(self)

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line for the log: what is in the set, and what is left out and why."""
        raise NotImplementedError

    def sample(self, request: SampleRequest, clip: Clip) -> Sample:
        """The clip with what belongs to it."""
        raise NotImplementedError

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Reads, decodes and crops samples; a chunk that several of them show is decoded once."""
        return self.clips.load(requests, self.sample)

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return self.clips.key(sample)

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the clip in its video, seconds."""
        return self.clips.span_s(sample)

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them in an evaluation, RGB [H, W, 3]; none where they cannot be had."""
        return self.clips.pictures(sample, num_frames=num_frames)

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """See `train.data.loader.Loader`."""
        return self._loader.batches(position=position, max_failures=max_failures)

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """See `train.data.loader.Loader`."""
        return self._loader.evaluation_batches(every=every)

    def state_dict(self) -> LoaderState:
        """See `train.data.loader.Loader`."""
        return self._loader.state_dict()

    def load_state_dict(self, *states: LoaderState) -> None:
        """See `train.data.loader.Loader`."""
        self._loader.load_state_dict(*states)
