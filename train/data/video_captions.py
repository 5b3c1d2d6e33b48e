"""The set of (clip, caption) samples of one split: captions of the manifest, pictures from the `video` column."""

import hashlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.keys import chunk_key
from manifests.store import read_captions, read_videos
from shards.reader import Variant
from shards.tars import TarBytes
from train.data.batch import Sample
from train.data.chunk_table import ChunkTable, chunk_table, rows_of
from train.data.clips import US_PER_S
from train.data.decoding.chunks import ChunkDecoder, ChunkFrames
from train.data.decoding.clip import Clip, ClipShape, frame_places, make_clip
from train.data.decoding.reading import ChunkBytes, DecodeRule, has_closed_gops, read_chunk
from train.data.decoding.rgb import rgb_pictures
from train.data.failures import FailedSample, SampleFailed
from train.data.filling import LoadedBatch
from train.data.loader import Loader, LoaderSettings, Visit
from train.data.place import LoaderState
from train.data.usable_captions import UsableCaptions, usable_captions
from train.models.text import Tokenize


@dataclass(frozen=True)
class ClipPlan:
    """What a visit shows: (chunk, frame) of each picture; `rng` goes on to draw the crop."""

    visit: Visit
    places: tuple[tuple[int, int], ...]
    rng: np.random.Generator | None

    @cached_property
    def by_chunk(self) -> dict[int, set[int]]:
        """The frames of each chunk."""
        by_chunk: dict[int, set[int]] = {}
        for chunk, frame in self.places:
            by_chunk.setdefault(chunk, set()).add(frame)
        return by_chunk


class VideoCaptions:
    """Samples of one split; sample i is the i-th usable caption. Safe to use from many threads.

    Args:
        loading: how batches are made of them.
        decode: how frames come out of chunks.
        tars: how bytes of tars are read, where they do not lie in `data_dir`.

    Raises:
        UserError: there is no such data, or nothing that can be shown.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        shape: ClipShape,
        tokenize: Tokenize,
        loading: LoaderSettings,
        decode: DecodeRule = "packets",
        tars: TarBytes | None = None,
    ) -> None:
        if not data_dir.is_dir():
            raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made: --shards DIR")
        self.split = split
        self._shape = shape
        self._tokenize = tokenize
        self._decode_rule = decode
        self._decoder = ChunkDecoder()
        variant = Variant.open(data_dir, tars=tars)
        self.variant_name = variant.directory.name
        self._shards = variant.shards()
        self._video_ids = videos_of_split(data_dir, split)
        self._chunks: ChunkTable = chunk_table(self._shards, self._video_ids)
        captions = read_captions(data_dir)
        video_row = rows_of(captions["video_id"], self._video_ids)
        of_split = np.flatnonzero(video_row >= 0)
        self.num_captions = len(of_split)
        usable = usable_captions(
            video_row=video_row[of_split],
            begin_s=captions["begin_s"].to_numpy()[of_split],
            end_s=captions["end_s"].to_numpy()[of_split],
            chunks=self._chunks,
        )
        # Samples that are loaded together shall share a chunk.
        self.usable: UsableCaptions = usable if loading.group == 1 else usable.by_chunk()
        self._group = loading.group
        rows = of_split[self.usable.caption]
        self._caption_ids: NDArray[np.int64] = captions["caption_id"].to_numpy()[rows]
        self._texts: pa.ChunkedArray = captions["text"].take(pa.array(rows))
        if not len(self):
            raise UserError(
                f"no caption of split {split!r} can be shown: {self.describe()}",
                hint=f"see prep status --data {data_dir}; captions come from prep manifest",
            )
        self._loader = Loader(self, loading)

    def __len__(self) -> int:
        return len(self.usable.caption)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self)

    def describe(self) -> str:
        """One line: captions that are used, and those that are not, by reason; and what is not as it was asked for."""
        parts = [f"{len(self):,} of {self.num_captions:,} captions of split {self.split!r}"]
        parts += [f"{count:,} {reason.replace('_', ' ')}" for reason, count in self.usable.num_unusable.items()]
        if self.usable.num_shortened:
            parts.append(f"{self.usable.num_shortened:,} shortened to the end of the video")
        if num_shrunk := self._num_shrunk:
            parts.append(f"{num_shrunk:,} shorter than {self._shape.sampling.window}, with a smaller stride")
        if self._num_open:
            open_ = f"{self._num_open} of {len(self._shards)} shards decoded by way of the container: open GOPs"
            parts.append(open_)
        return "; ".join(parts)

    @cached_property
    def _num_open(self) -> int:
        """Shards whose first chunk cannot be decoded by packets; a shard's chunks come from one recipe."""
        if self._decode_rule != "packets":
            return 0
        return sum(not has_closed_gops(shard) for shard in self._shards)

    @property
    def fingerprint(self) -> str:
        """Hash of what decides which sample stands where: the captions, their order, their spans, the pictures."""
        digest = hashlib.sha256(self.variant_name.encode())
        if self._group > 1:
            digest.update(f"groups of {self._group}".encode())
        for array in (self._caption_ids, self.usable.begin_us, self.usable.end_us):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def text(self, sample: int) -> str:
        """The caption's words."""
        return str(self._texts[sample].as_py())

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        return self._key(int(self.usable.first_chunk[sample]))

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the clip in its video, seconds."""
        return float(self.usable.begin_us[sample]) / 1e6, float(self.usable.end_us[sample]) / 1e6

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames as the model gets them in an evaluation, RGB [H, W, 3]; none where they cannot be had."""
        try:
            plan = self.plan(Visit(sample, sample, None))
            clip = self.clip(plan, self._decoded(plan, {}))
        except SampleFailed:
            return []
        pictures = clip.video if self._shape.rgb else rgb_pictures(clip.video, clip.colour, size_px=self._shape.size_px)
        return list(pictures)[:num_frames]

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """See `train.data.loader.Loader`."""
        return self._loader.batches(position=position, max_failures=max_failures)

    def evaluation_batches(self) -> Iterator[LoadedBatch]:
        """See `train.data.loader.Loader`."""
        return self._loader.evaluation_batches()

    def state_dict(self) -> LoaderState:
        """See `train.data.loader.Loader`."""
        return self._loader.state_dict()

    def load_state_dict(self, *states: LoaderState) -> None:
        """See `train.data.loader.Loader`."""
        self._loader.load_state_dict(*states)

    def load(self, visits: Sequence[Visit]) -> list[Sample | FailedSample]:
        """Reads, decodes and crops samples; a chunk that several of them show is decoded once."""
        plans = [self.plan(visit) for visit in visits]
        shared = self._decode_shared(plans) if len(plans) > 1 else {}
        return [self._load(plan, shared) for plan in plans]

    def plan(self, visit: Visit) -> ClipPlan:
        """Which frames a visit shows."""
        first, last = int(self.usable.first_chunk[visit.sample]), int(self.usable.last_chunk[visit.sample])
        begin_us, end_us = int(self.usable.begin_us[visit.sample]), int(self.usable.end_us[visit.sample])
        chunks = [self._chunks.times(chunk) for chunk in range(first, last + 1)]
        rng = visit.rng()
        places = frame_places(begin_us, end_us, self._shape.sampling, chunks, rng=rng)
        return ClipPlan(visit, tuple((first + place.chunk, place.frame) for place in places), rng)

    def read(self, chunk: int, frames: Collection[int]) -> ChunkBytes:
        """The bytes that give `frames` of a chunk; SampleFailed where they cannot be had."""
        shard, row = self._shards[int(self._chunks.shard[chunk])], int(self._chunks.row[chunk])
        return read_chunk(shard, row, frames, rule=self._decode_rule, key=self._key(chunk))

    def decode(self, content: ChunkBytes) -> ChunkFrames:
        """Frames of a chunk that was read; SampleFailed where they do not come out."""
        return self._decoder.decode(content)

    def clip(self, plan: ClipPlan, decoded: Mapping[int, ChunkFrames]) -> Clip:
        """Crops the frames of a plan, which are among those decoded of each chunk; SampleFailed where they differ."""
        pictures = [decoded[chunk][frame] for chunk, frame in plan.places]
        in_graph = self._decode_rule == "filter"
        return make_clip(pictures, self._shape, rng=plan.rng, in_graph=in_graph, key=self.key(plan.visit.sample))

    def sample(self, visit: Visit, clip: Clip) -> Sample:
        """The clip with its caption and its names."""
        return Sample(
            position=visit.position,
            key=self.key(visit.sample),
            caption_id=int(self._caption_ids[visit.sample]),
            video=clip.video,
            colour=clip.colour,
            tokens=self._tokenize(self.text(visit.sample)),
        )

    def _load(self, plan: ClipPlan, shared: Mapping[int, ChunkFrames]) -> Sample | FailedSample:
        try:
            return self.sample(plan.visit, self.clip(plan, self._decoded(plan, shared)))
        except SampleFailed as error:
            return FailedSample(plan.visit.position, error.key, error.reason, error.detail)

    def _decoded(self, plan: ClipPlan, shared: Mapping[int, ChunkFrames]) -> dict[int, ChunkFrames]:
        return {
            chunk: shared.get(chunk) or self.decode(self.read(chunk, frames)) for chunk, frames in plan.by_chunk.items()
        }

    def _decode_shared(self, plans: Sequence[ClipPlan]) -> dict[int, ChunkFrames]:
        """Frames of the chunks that several plans show; a chunk that fails is left to each of them to fail with."""
        wanted: dict[int, set[int]] = {}
        for plan in plans:
            for chunk, frames in plan.by_chunk.items():
                wanted.setdefault(chunk, set()).update(frames)
        shared: dict[int, ChunkFrames] = {}
        for chunk, frames in wanted.items():
            if sum(chunk in plan.by_chunk for plan in plans) > 1:
                try:
                    shared[chunk] = self.decode(self.read(chunk, frames))
                except SampleFailed:
                    continue
        return shared

    def _key(self, chunk: int) -> str:
        video_id = self._video_ids[int(self._chunks.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self._chunks.start_ms[chunk]))

    @property
    def _num_shrunk(self) -> int:
        sampling, first = self._shape.sampling, self.usable.first_chunk
        if sampling.rule != "stride":
            return 0
        span_us = self.usable.end_us - self.usable.begin_us
        window = sampling.num_frames * sampling.stride * US_PER_S * self._chunks.fps_den[first]
        return int((span_us * self._chunks.fps_num[first] < window).sum())


def videos_of_split(data_dir: Path, split: str) -> pa.Array:
    """Ids of the videos of a split; UserError where it has none."""
    videos = read_videos(data_dir)
    of_split = videos.filter(pc.equal(videos["split"], split))
    if not of_split.num_rows:
        there = ", ".join(sorted(set(videos["split"].to_pylist()))) or "none, the manifest is empty"
        raise UserError(f"{data_dir} has no videos of split {split!r}", hint=f"splits of this manifest: {there}")
    return of_split["video_id"].combine_chunks()
