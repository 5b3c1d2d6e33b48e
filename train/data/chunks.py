"""Chunks, the pieces into which `prep chunk` cuts videos, and the clips that are made from them.

`ClipQuery` describes the clips. `ChunkSet` opens and reads the chunks. `ClipReader` decodes the chunks into clips.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.divided_videos import DividedVideos, find_split_videos
from clipmill.manifests.errors import Inaccessible, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.store import manifest_dir, read_manifest, read_videos, resolve_folder
from clipmill.shards.columns import VIDEO, how_to_repair
from clipmill.shards.decoding import SourceFile
from clipmill.shards.merged_table import variant_state
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.config.clips import ClipSettings
from clipmill.train.data.batch import Sample
from clipmill.train.data.captions import Annotations
from clipmill.train.data.clip_frames import Clip, ClipBuilder, ClipShape, Views, make_clip
from clipmill.train.data.data_folder import ChunkRows, ChunkTable, DataFolder, Selection, chunk_table
from clipmill.train.data.decoders import ChunkBytes, ChunkDecoder, ChunkFrames, DecodeRule, read_chunk
from clipmill.train.data.frame_sampling import (
    US_PER_S,
    ChunkTimes,
    Moments,
    SourceTimes,
    frame_indices,
    locate_frames,
    to_seconds,
    to_whole_us,
)
from clipmill.train.data.loader import LoaderSettings, SampleRequest
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.query import DataQuery, clip_shape
from clipmill.train.data.samples import SampleTable
from clipmill.train.data.workers import ReadAhead, ThreadedReader

if TYPE_CHECKING:
    import av

    from clipmill.train.data.remote import RemoteTars


@dataclass(frozen=True)
class _OpenedChunks:
    """Videos and chunks of a split, shared by all processes of a machine.

    Attributes:
        video_ids: IDs of the videos of the split.
        table: Chunks of these videos.
        divided: Videos that are divided among several splits; None if no video is divided.
        num_open: Number of shards with open GOPs; None if unknown.
    """

    video_ids: pa.Array
    table: ChunkTable
    divided: DividedVideos | None
    num_open: int | None


def _open_chunks(variant: Variant, data_dir: Path, *, split: str | None) -> _OpenedChunks:
    if split is None:
        video_ids, divided = read_videos(data_dir)["video_id"].combine_chunks(), None
    else:
        video_ids, divided = find_split_videos(data_dir, split)
    try:
        table, open_gops = chunk_table(variant, video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair("the table or shard")) from error
    return _OpenedChunks(video_ids, table, divided, None if open_gops is None else len(open_gops))


def manifest_mark(data_dir: Path) -> tuple[object, ...]:
    """Return values that identify the version of a manifest: its fingerprint and the checksums of its tables."""
    manifest = read_manifest(data_dir)
    tables = manifest.get("tables") or [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(manifest_dir(data_dir).iterdir())
    ]
    return manifest["fingerprint"], repr(tables)


def require_same_manifest(data_dir: Path, mark: tuple[object, ...]) -> None:
    """Raise a UserError if a manifest has changed since `manifest_mark` returned `mark`."""
    if manifest_mark(data_dir) != mark:
        raise UserError(f"the manifest of {data_dir} was replaced while it was read", hint="run the command again")


class ChunkSet:
    """Chunks of a split in the `video` column. Reading is thread-safe.

    Args:
        data_dir: Data folder, or the local copy of its small files if the tars are elsewhere.
        split: Split of the videos; None for all videos.
        rule: Rule for decoding frames.
        tars: Reader of the tars; None if they are in `data_dir`.
        where: Expression that selects samples (clipmill.shards.where); None for all samples.
        has_captions: True if the samples have captions.

    Attributes:
        video_ids: IDs of the videos of the split, including videos that belong to it only partly.
        table: Table of all chunks of these videos. Its video rows are indices into `video_ids`.
        divided: Videos that are divided among several splits, by row in `video_ids`; None if no video is divided.
        selection: Chunks and captions that `where` selects.
        decoder: Decoder for the chunks that `read` returns.
        num_readers: Number of threads that read ahead of decoding; 0 if the decoding threads read a local folder.

    Raises:
        UserError: The data folder does not exist or has no shards; the split has no videos; or `where` is not a valid
            expression, selects nothing, or uses scores that the chunks lack.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str | None,
        rule: DecodeRule,
        tars: "RemoteTars | None" = None,
        where: str | None = None,
        has_captions: bool = False,
    ) -> None:
        if not resolve_folder(data_dir).is_dir():
            raise UserError(
                f"there is no data folder {data_dir}",
                hint="use --shards with the data folder that prep made",
                flags=("--shards",),
            )
        self._data_dir, self.split = data_dir, split or ""
        self._variant = Variant.open(data_dir, tars=tars).require_complete()
        self.variant_name = self._variant.directory.name
        self.rule = rule
        self.tars = tars
        self.num_readers: int = 0 if tars is None else tars.num_readers
        self.decoder = ChunkDecoder()
        self.videos: tuple[object, ...] = (split, *manifest_mark(data_dir))
        self.depends_on: tuple[object, ...] = (
            *self.videos,
            *variant_state(self._variant.directory, self._variant.commits),
        )
        self.num_rows: int = self._variant.num_samples
        opened = open_shared(
            lambda: _open_chunks(self._variant, data_dir, split=split),
            depends_on=self.depends_on,
            num_rows=self.num_rows,
            types=(_OpenedChunks, ChunkTable, DividedVideos),
            prefix="chunks",
        )
        self.video_ids: pa.Array = opened.video_ids
        self.table: ChunkTable = opened.table
        self.divided: DividedVideos | None = opened.divided
        self._stored_num_open = opened.num_open
        self.selection: Selection = Selection(
            where,
            data_dir,
            split=self.split,
            chunks=ChunkRows(self.video_ids, self.table.video_row, self.table.start_ms),
            has_captions=has_captions,
            tars=tars,
            depends_on=self.depends_on,
        )

    def are_entirely_in_split(
        self, *, video_row: NDArray[np.integer], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Return a mask of the spans that do not overlap other splits; None if no video is divided."""
        if self.divided is None:
            return None
        begin_us, end_us = to_whole_us(begin_s), to_whole_us(end_s)
        return self.divided.is_entirely_in(self.split, video=video_row, begin_us=begin_us, end_us=end_us)

    def require_same_manifest(self) -> None:
        """Raise a UserError if the manifest has changed since the chunks were opened. Tables must not mix versions."""
        _, *mark = self.videos
        require_same_manifest(self._data_dir, tuple(mark))

    def key(self, chunk: int) -> str:
        """Return the key of a chunk."""
        video_id = self.video_ids[int(self.table.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self.table.start_ms[chunk]))

    def read(self, chunk: int, frames: Collection[int]) -> ChunkBytes:
        """Read the bytes that are needed to decode `frames` of a chunk; raise SampleFailed if this fails."""
        shard, row = self._variant.shard(int(self.table.shard[chunk])), int(self.table.row[chunk])
        video = int(self.table.video_row[chunk])
        return read_chunk(
            shard,
            row,
            frames,
            rule=self.rule,
            key=self.key(chunk),
            source=lambda: SourceFile(str(self.source_paths[video].as_py())),
        )

    def times(self, chunk: int) -> ChunkTimes:
        """Return the times of a chunk and of its frames in the video.

        Raises:
            SampleFailed: The frames are in a source file, and their times cannot be read.
        """
        times = self.table.times(chunk)
        if not self.table.is_in_sources:
            return times
        shard, row = self._variant.shard(int(self.table.shard[chunk])), int(self.table.row[chunk])
        try:
            source = shard.packet_tables.source(row)
        except (OSError, Damaged, Inaccessible, ValueError) as error:
            raise SampleFailed(self.key(chunk), reason="shard_unreadable", detail=str(error)) from error
        assert source is not None, "either all chunks of a variant are in source files, or none"
        return SourceTimes(**vars(times), source=source)

    def describe(self) -> str:
        """Return a remark on the shards that are not decoded by `rule`; '' if there are none."""
        if not self._num_open:
            return ""
        return (
            f"{self._num_open} of {count_noun(self._variant.num_shards, 'shard')} "
            "decoded through the container because of open GOPs"
        )

    @cached_property
    def source_paths(self) -> pa.Array:
        """Path or URL of each video's source file, in the order of `video_ids`."""
        videos = read_videos(self._data_dir)
        rows = pc.index_in(self.video_ids.cast(pa.string()), value_set=videos["video_id"].combine_chunks())
        return videos["path"].combine_chunks().take(rows)

    @cached_property
    def _num_open(self) -> int:
        """Number of shards whose chunks cannot be decoded from packets, because their GOPs are open.

        Only the first chunk of each shard is examined, because all chunks of a shard have the same encoder settings.
        """
        if self.rule != "packets":
            return 0
        if self._stored_num_open is not None:
            return self._stored_num_open
        return sum(not _has_closed_gops(shard) for shard in self._variant.shards())


def _has_closed_gops(shard: CommittedShard) -> bool:
    try:
        return shard.packet_tables.has_closed_gops(0)
    except (OSError, Damaged, Inaccessible, ValueError):
        return True  # the damage is reported when the chunk is read


@dataclass(frozen=True)
class ClipQuery:
    """Description of the clips to open from a data folder.

    Attributes:
        data_dir: Data folder, or the local copy of its small files if the tars are elsewhere.
        split: Split of the videos.
        shape: Rules for sampling, cropping and resizing the frames of clips.
        loading: Settings of the loader: batches, threads and this rank's share.
        decode: Rule for decoding frames.
        tars: Reader of the tars; None if they are in `data_dir`.
        where: Expression that selects samples (`clipmill.shards.where`); None for all samples.
        views: Names of the cameras that show the moment of a caption; empty for clips from a single camera.
    """

    data_dir: Path
    split: str
    shape: ClipShape
    loading: LoaderSettings
    decode: DecodeRule = "packets"
    tars: "RemoteTars | None" = None
    where: str | None = None
    views: tuple[str, ...] = ()

    def open_chunks(self, *, has_captions: bool = False) -> ChunkSet:
        """Open the chunks of the split for these clips.

        Args:
            has_captions: True if the clips have captions, so that `where` may refer to captions.

        Raises:
            UserError: See `ChunkSet`.
        """
        return ChunkSet(
            self.data_dir,
            split=self.split,
            rule=self.decode,
            tars=self.tars,
            where=self.where,
            has_captions=has_captions,
        )

    def empty_error(self, chunks: ChunkSet) -> tuple[str, str]:
        """Return the message and the hint of the error for a split without usable clips."""
        hint = (
            "run prep status to see the chunks, and prep manifest to add captions and labels"
            if not chunks.selection.text
            else "use a weaker condition: the condition must hold for all chunks that a clip touches, and a caption "
            "without times touches all chunks of its video"
        )
        return f"no clip of split {self.split!r} is usable", hint


def clip_query(settings: ClipSettings, folder: DataFolder, *, split: str, loading: LoaderSettings) -> ClipQuery:
    """Return the query that these settings define for the clips of a folder, with the shape for training."""
    return ClipQuery(
        folder.path,
        split=split,
        shape=clip_shape(settings, views=Views()),
        loading=loading,
        decode=settings.decode,
        tars=folder.tars,
        where=settings.selection,
        views=settings.view_names,
    )


def query_clips(query: DataQuery) -> ClipQuery:
    """Return the query for the clips that a task needs; raise UserError if the data folder cannot be read."""
    folder = query.open_folder(column=VIDEO)
    clips = clip_query(query.settings, folder, split=query.split, loading=query.loading)
    return replace(clips, shape=query.shape)


@dataclass(frozen=True)
class ClipPlan:
    """Frames to read for a requested clip.

    Attributes:
        request: Request for the clip. `request.sample` is the row of the clip in the table.
        key: Key of the first chunk.
        frames: Frames in order, as pairs of a chunk and a frame of this chunk.
        rng: Random number generator for the crop; None in an evaluation.
        failure: Reason why the clip cannot be read; `frames` is then empty.
        time_s: Time in the video at which each frame appears, in seconds.
    """

    request: SampleRequest
    key: str
    frames: tuple[tuple[int, int], ...]
    rng: np.random.Generator | None
    failure: SampleFailed | None = None
    time_s: Sequence[float] = ()

    @cached_property
    def indices_by_chunk(self) -> dict[int, dict[int, list[int]]]:
        """Indices of each frame in the clip, by chunk and frame."""
        indices_by_chunk: dict[int, dict[int, list[int]]] = {}
        for index, (chunk, frame) in enumerate(self.frames):
            indices_by_chunk.setdefault(chunk, {}).setdefault(frame, []).append(index)
        return indices_by_chunk


@dataclass(frozen=True)
class ReadClips:
    """Bytes that are needed to decode the clips of a group of requests.

    Attributes:
        plans: Frames of each clip.
        shared_chunks: Bytes of each chunk that several clips need, or the reason why the chunk cannot be read.
        other_chunks: Bytes of the other chunks of each clip, or the reasons why they cannot be read.
    """

    plans: list[ClipPlan]
    shared_chunks: dict[int, ChunkBytes | SampleFailed]
    other_chunks: list[dict[int, ChunkBytes | SampleFailed]]


MomentsFunction = Callable[[int, np.random.Generator | None], Moments]
_BytesOfChunks = Mapping[int, ChunkBytes | SampleFailed]


class ClipReader(ThreadedReader):
    """Reader that decodes and crops the clips of a table. Thread-safe.

    Sample i shows row i // repeats of the table.

    Args:
        chunks: Chunks that contain the clips. The parts in the table are rows of `chunks.table`.
        table: Table with the spans of the clips.
        shape: Rules for sampling, cropping and resizing the frames of clips.
        annotations: Annotations that are added to samples, such as captions.
        repeats: Number of samples per clip in an epoch. The samples of a clip are consecutive, so that their chunks are
            read and decoded only once if the samples are loaded as a group.
        same_frames: Number of consecutive samples of a clip that show the same moments in training.
        moments: Function that takes a row and a random number generator (None in an evaluation), and returns the
            moments to show, or raises ValueError. None to sample moments from the span of the row.
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
        moments: MomentsFunction | None = None,
    ) -> None:
        assert table.begin_us is not None and table.end_us is not None
        self.chunks, self.decoder = chunks, chunks.decoder
        self._shape, self._annotations = shape, annotations
        self._begin_us, self._end_us, self._first_chunk = table.begin_us, table.end_us, table.first_part
        self._last_chunk = table.first_part if table.last_part is None else table.last_part
        self._repeats, self._num_same_frames, self._moments = repeats, same_frames, moments

    def key(self, sample: int) -> str:
        """Return the key of the chunk in which the clip begins."""
        return self.chunks.key(int(self._first_chunk[sample // self._repeats]))

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end of clips in their videos, in microseconds."""
        return self._begin_us[rows], self._end_us[rows]

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each clip's video."""
        return self.chunks.table.video_row[self._first_chunk[rows]].astype(np.int64)

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Return the start of the first frame and the end of the last frame that an evaluation shows, in seconds."""
        frames = self.plan(SampleRequest(sample, sample, None)).frames
        (first, first_frame), (last, last_frame) = (
            (self.chunks.times(chunk), frame) for chunk, frame in (frames[0], frames[-1])
        )
        end_us = last.frame_begin_us(last_frame) + Fraction(last.fps_den * US_PER_S, last.fps_num)
        return to_seconds(first.frame_begin_us(first_frame)), to_seconds(end_us)

    def deviations(self) -> list[str]:
        """Return remarks on repeated samples, and on the number of samples that deviate from the settings."""
        parts = [self.chunks.describe()]
        if self._repeats > 1:
            noun = "crops of the same frames" if self._num_same_frames > 1 else "samples"
            parts.append(f"{self._repeats} {noun} of each clip per epoch")
        sampling, table = self._shape.sampling, self.chunks.table
        if sampling.rule == "stride":
            fps_den = table.fps_den[self._first_chunk].astype(np.int64)
            window = sampling.num_frames * sampling.stride * US_PER_S * fps_den
            is_shrunk = (self._end_us - self._begin_us) * table.fps_num[self._first_chunk] < window
            if num_shrunk := int(is_shrunk.sum()):
                parts.append(f"{num_shrunk:,} shorter than {sampling.window} and sampled with a smaller stride")
        return parts

    @property
    def read_ahead(self) -> ReadAhead | None:
        """Functions that read and decode the clips of a remote folder in two steps; None for a local folder."""
        num_readers = self.chunks.num_readers
        return ReadAhead(self.read, self.load_read, num_readers) if num_readers else None

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the clips of a group of requests. A chunk that several clips need is decoded once."""
        return self._load([self.plan(request) for request in requests], None)

    def read(self, requests: Sequence[SampleRequest]) -> ReadClips:
        """Read the bytes for the clips of a group of requests, so that `load_read` can decode them."""
        plans = [self.plan(request) for request in requests]
        shared_chunks = {chunk: self._try_read(chunk, frames) for chunk, frames in _shared_chunks(plans).items()}
        other_chunks = [
            {
                chunk: self._try_read(chunk, frames)
                for chunk, frames in plan.indices_by_chunk.items()
                if chunk not in shared_chunks
            }
            for plan in plans
        ]
        return ReadClips(plans, shared_chunks, other_chunks)

    def load_read(self, clips: ReadClips) -> list[Sample | FailedSample]:
        """Decode and crop the clips that `read` returned; return the same samples as `load`."""
        return self._load(clips.plans, clips)

    def _load(self, plans: Sequence[ClipPlan], clips: ReadClips | None) -> list[Sample | FailedSample]:
        # A chunk that several plans need is decoded once. If this fails, `_make` decodes the chunk again for each plan,
        # so that the failure is reported for each plan.
        decoded_chunks: dict[int, ChunkFrames] = {}
        shared_bytes = {} if clips is None else clips.shared_chunks
        for chunk, frames in _shared_chunks(plans).items() if len(plans) > 1 else ():
            with suppress(SampleFailed):
                decoded_chunks[chunk] = self.decoder.decode(self._bytes(chunk, frames, shared_bytes))
        samples: list[Sample | FailedSample] = []
        for index, plan in enumerate(plans):
            chunk_bytes = {} if clips is None else {**shared_bytes, **clips.other_chunks[index]}
            try:
                if plan.failure is not None:
                    raise plan.failure
                clip = self._make(plan, decoded_chunks, chunk_bytes)
                sample = Sample(
                    position=plan.request.position,
                    key=plan.key,
                    clip_id=plan.request.sample,
                    video=clip.video,
                    time_s=plan.time_s,
                    colour=clip.colour,
                )
                self.annotate(sample, plan.request)
                samples.append(sample)
            except SampleFailed as error:
                samples.append(error.at(plan.request.position))
        return samples

    def plan(self, request: SampleRequest) -> ClipPlan:
        """Choose the frames for a request."""
        request = replace(request, sample=request.sample // self._repeats) if self._repeats > 1 else request
        row = request.sample
        first, last = int(self._first_chunk[row]), int(self._last_chunk[row])
        key, rng = self.chunks.key(first), request.generator("frames", num_repeats=self._num_same_frames)
        begin_us, end_us, num_views = int(self._begin_us[row]), int(self._end_us[row]), self._shape.views.num_clips
        try:
            chunks = [self.chunks.times(chunk) for chunk in range(first, last + 1)]
            if self._moments is None:
                frames = frame_indices(begin_us, end_us, self._shape.sampling, chunks, rng=rng, num_views=num_views)
            else:
                frames = locate_frames(self._moments(row, rng), chunks)
        except SampleFailed as failure:
            return ClipPlan(request, key, (), None, failure)
        except ValueError as error:
            if self._moments is None:
                raise
            return ClipPlan(request, key, (), None, SampleFailed(key, reason="chunk_missing", detail=str(error)))
        chunk_frames = tuple((first + index.chunk, index.frame) for index in frames)
        time_s = [to_seconds(chunks[index.chunk].frame_begin_us(index.frame)) for index in frames]
        return ClipPlan(request, key, chunk_frames, request.generator("crop"), time_s=time_s)

    def clip(self, plan: ClipPlan, decoded_chunks: Mapping[int, ChunkFrames]) -> Clip:
        """Crop and resize the frames of a plan; raise SampleFailed if they differ in resolution or colour.

        Args:
            decoded_chunks: Decoded frames of each chunk.
        """
        frames = [decoded_chunks[chunk][frame] for chunk, frame in plan.frames]
        in_graph = self.chunks.rule == "filter"
        return make_clip(frames, self._shape, rng=plan.rng, in_graph=in_graph, key=plan.key)

    def annotate(self, sample: Sample, request: SampleRequest) -> None:
        """Add the annotations to a sample."""
        for annotations in self._annotations:
            annotations.add(sample, request)

    def _make(self, plan: ClipPlan, decoded_chunks: Mapping[int, ChunkFrames], chunk_bytes: _BytesOfChunks) -> Clip:
        """Make a clip. Each frame is cropped as soon as it is decoded.

        Args:
            decoded_chunks: Frames of chunks that have already been decoded.
            chunk_bytes: Bytes of chunks that have already been read, or the reasons why they cannot be read. Other
                chunks are read now.
        """
        chunks = self.chunks
        if chunks.rule == "filter":
            all_chunks = {
                chunk: decoded_chunks.get(chunk) or self.decoder.decode(self._bytes(chunk, frames, chunk_bytes))
                for chunk, frames in plan.indices_by_chunk.items()
            }
            return self.clip(plan, all_chunks)
        builder = ClipBuilder(self._shape, num_frames=len(plan.frames), rng=plan.rng, key=plan.key)
        for chunk, indices in plan.indices_by_chunk.items():

            def add(frame: int, picture: "av.VideoFrame", indices: dict[int, list[int]] = indices) -> None:
                builder.add(picture, indices[frame])

            if chunk in decoded_chunks:
                for frame in indices:
                    add(frame, decoded_chunks[chunk][frame])
            else:
                self.decoder.decode_each(self._bytes(chunk, indices, chunk_bytes), add)
        return builder.clip()

    def _try_read(self, chunk: int, frames: Collection[int]) -> ChunkBytes | SampleFailed:
        try:
            return self.chunks.read(chunk, frames)
        except SampleFailed as error:
            return error

    def _bytes(self, chunk: int, frames: Collection[int], chunk_bytes: _BytesOfChunks) -> ChunkBytes:
        content = chunk_bytes[chunk] if chunk in chunk_bytes else self.chunks.read(chunk, frames)
        if isinstance(content, SampleFailed):
            raise content
        return content


def _shared_chunks(plans: Sequence[ClipPlan]) -> dict[int, set[int]]:
    """Return the chunks that several plans need, each with all frames that the plans need."""
    needed_frames: dict[int, set[int]] = {}
    for plan in plans:
        for chunk, frames in plan.indices_by_chunk.items():
            needed_frames.setdefault(chunk, set()).update(frames)
    return {
        chunk: frames
        for chunk, frames in needed_frames.items()
        if sum(chunk in plan.indices_by_chunk for plan in plans) > 1
    }
