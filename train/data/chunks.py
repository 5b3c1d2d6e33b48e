"""Chunks of a split in the `video` column, and the clips that training makes from them.

`ClipQuery` describes the clips. `ChunkSet` opens, reads and decodes the chunks. `ClipReader` makes clips from them.
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
    """Videos and chunks of a split, which the processes of a node share.

    Attributes:
        video_ids: Videos of the split.
        table: Chunks of these videos.
        divided: Videos with seconds of several splits; None if there are none.
        num_open: Number of shards with open GOPs; None if it is unknown.
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
    """Return values that identify a version of the manifest: its fingerprint and the checksums of its tables."""
    manifest = read_manifest(data_dir)
    tables = manifest.get("tables") or [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(manifest_dir(data_dir).iterdir())
    ]
    return manifest["fingerprint"], repr(tables)


def require_same_manifest(data_dir: Path, mark: tuple[object, ...]) -> None:
    """Raise a UserError if a manifest has changed since `manifest_mark` returned `mark`."""
    if manifest_mark(data_dir) != mark:
        raise UserError(
            f"the manifest of {data_dir} was replaced while it was read",
            hint="run the command again",
        )


class ChunkSet:
    """The chunks of a split in the `video` column, which can be read and decoded. Thread-safe.

    Args:
        split: Split of the videos; None for all.
        rule: Rule by which frames are decoded.
        tars: Reader of the tars, if they are not in `data_dir`.
        where: Expression that selects samples (clipmill.shards.where); None for all.
        has_captions: True if the samples have captions.

    Attributes:
        video_ids: Videos of the split, including videos that belong to it only in part.
        table: Table of chunks. A chunk's video row is an index into `video_ids`.
        divided: Videos with seconds of several splits, by their rows in `video_ids`; None if there are none.
        selection: Chunks and captions that `where` selects. `table` still has all chunks.
        decoder: Decoder for chunks that were read.
        num_readers: Number of threads that read ahead of decoding; 0 for a local folder, which the decoding threads
            read themselves.

    Raises:
        UserError: The data folder does not exist or has no shards, the split has no videos, or `where` is not a valid
            expression, selects nothing, or uses scores that the chunks do not have.
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
        self._known_open = opened.num_open
        self.selection: Selection = Selection(
            where,
            data_dir,
            split=self.split,
            chunks=ChunkRows(self.video_ids, self.table.video_row, self.table.start_ms),
            has_captions=has_captions,
            tars=tars,
            depends_on=self.depends_on,
        )

    def shows_only_split(
        self, *, video_row: NDArray[np.integer], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Return a mask of the spans that do not overlap other splits; None if no video is divided."""
        if self.divided is None:
            return None
        begin_us, end_us = to_whole_us(begin_s), to_whole_us(end_s)
        return self.divided.shows_only(self.split, video=video_row, begin_us=begin_us, end_us=end_us)

    def require_same_manifest(self) -> None:
        """Raise a UserError if the manifest has changed since the chunks were opened; a table must not mix versions."""
        _, *mark = self.videos
        require_same_manifest(self._data_dir, tuple(mark))

    def key(self, chunk: int) -> str:
        """Return the key of a chunk."""
        video_id = self.video_ids[int(self.table.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self.table.start_ms[chunk]))

    def read(self, chunk: int, frames: Collection[int]) -> ChunkBytes:
        """Read the bytes that are needed to decode `frames` of a chunk; raise SampleFailed if they cannot be read."""
        shard, row = self._variant.shard(int(self.table.shard[chunk])), int(self.table.row[chunk])
        video = int(self.table.video_row[chunk])
        return read_chunk(
            shard,
            row,
            frames,
            rule=self.rule,
            key=self.key(chunk),
            source=lambda: SourceFile(str(self._source_paths[video].as_py())),
        )

    def times(self, chunk: int) -> ChunkTimes:
        """Return the times of a chunk and of its frames in the video.

        Raises:
            SampleFailed: The frames are in a source file, but their times cannot be read.
        """
        times = self.table.times(chunk)
        if not self.table.is_in_sources:
            return times
        shard, row = self._variant.shard(int(self.table.shard[chunk])), int(self.table.row[chunk])
        try:
            source = shard.packet_tables.source(row)
        except (OSError, Damaged, Inaccessible, ValueError) as error:
            raise SampleFailed(self.key(chunk), reason="shard_unreadable", detail=str(error)) from error
        assert source is not None, "a variant holds chunks of one kind"
        return SourceTimes(**vars(times), source=source)

    @cached_property
    def _source_paths(self) -> pa.Array:
        return self.source_paths()

    def describe(self) -> str:
        """Report how many shards are not decoded by `rule`; '' if there are none."""
        if not self._num_open:
            return ""
        return (
            f"{self._num_open} of {count_noun(self._variant.num_shards, 'shard')} "
            "decoded through the container: open GOPs"
        )

    def source_paths(self) -> pa.Array:
        """Return the path or URL of each video's source file, in the order of `video_ids`."""
        videos = read_videos(self._data_dir)
        rows = pc.index_in(self.video_ids.cast(pa.string()), value_set=videos["video_id"].combine_chunks())
        return videos["path"].combine_chunks().take(rows)

    @cached_property
    def _num_open(self) -> int:
        """Number of shards whose chunks cannot be decoded from packets, because their GOPs are open.

        Only the first chunk is examined: all chunks of a shard have the same recipe.
        """
        if self.rule != "packets":
            return 0
        if self._known_open is not None:
            return self._known_open
        return sum(not _has_closed_gops(shard) for shard in self._variant.shards())


def _has_closed_gops(shard: CommittedShard) -> bool:
    try:
        return shard.packet_tables.has_closed_gops(0)
    except (OSError, Damaged, Inaccessible, ValueError):
        return True  # reading the chunk reports the damage


def evenly_of_each(videos: NDArray[np.int64], *, at_most: int) -> NDArray[np.int64]:
    """Return the rows of at most `at_most` evenly spaced samples per video. `videos` must be ascending."""
    _, first, count = np.unique(videos, return_index=True, return_counts=True)
    count, number = np.repeat(count, count), np.arange(len(videos)) - np.repeat(first, count)
    num_taken = np.minimum(count, at_most)
    return np.flatnonzero((number + 1) * num_taken // count > number * num_taken // count)


@dataclass(frozen=True)
class ClipQuery:
    """Query for the clips of a data folder.

    Attributes:
        data_dir: Data folder, or the local copy of its small files if the tars are elsewhere.
        split: Split of the videos.
        shape: Rules by which clips are sampled, cropped and resized.
        loading: Batches, threads and this rank's share.
        decode: Rule by which frames are decoded.
        tars: Reader of the tars, if they are not in `data_dir`.
        where: Expression that selects samples (`clipmill.shards.where`); None for all.
        views: Cameras that show the moment of a caption; empty for clips from a single camera.
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
        """Return the message and the hint of the error that no clip is usable."""
        hint = (
            "see prep status; captions and labels come from prep manifest"
            if not chunks.selection.text
            else "use a weaker condition: it must hold for all chunks that a clip touches, and a caption without times "
            "touches all chunks of its video"
        )
        return f"no clip of split {self.split!r} is usable", hint


def clip_query(settings: ClipSettings, folder: DataFolder, *, split: str, loading: LoaderSettings) -> ClipQuery:
    """Return the query for the clips of a folder that the settings describe, with the shape for training."""
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
    """The frames to read for a requested clip.

    Attributes:
        request: Request, whose `sample` is the row of the clip.
        key: Key of the first chunk.
        frames: Frames in order, as (chunk, frame).
        rng: Generator that draws the crop; None in evaluation.
        failure: Reason why the clip cannot be read; it then has no frames.
        time_s: Start of each frame in the video, seconds.
    """

    request: SampleRequest
    key: str
    frames: tuple[tuple[int, int], ...]
    rng: np.random.Generator | None
    failure: SampleFailed | None = None
    time_s: Sequence[float] = ()

    @cached_property
    def by_chunk(self) -> dict[int, dict[int, list[int]]]:
        """Indices in the clip of each frame, by chunk and frame."""
        by_chunk: dict[int, dict[int, list[int]]] = {}
        for index, (chunk, frame) in enumerate(self.frames):
            by_chunk.setdefault(chunk, {}).setdefault(frame, []).append(index)
        return by_chunk


@dataclass(frozen=True)
class ReadClips:
    """Clips for a group of requests, read ahead of decoding: the bytes of each chunk, or the reason for a failed read.

    Attributes:
        plans: Frames of each clip.
        shared: Chunks that several of the clips need.
        others: Other chunks of each clip.
    """

    plans: list[ClipPlan]
    shared: dict[int, ChunkBytes | SampleFailed]
    others: list[dict[int, ChunkBytes | SampleFailed]]


MomentsOf = Callable[[int, np.random.Generator | None], Moments]


class ClipReader(ThreadedReader):
    """Reader that decodes and crops the clips of a table from chunks. Thread-safe.

    Sample i shows row i // repeats.

    Args:
        chunks: Chunks to which the parts in the table refer.
        table: Spans of the clips.
        shape: Rules by which clips are made.
        annotations: Entries that samples get in addition to frames.
        repeats: Number of samples per clip in an epoch. They are consecutive, so that their chunks are read and decoded
            once if they are loaded as a group.
        same_frames: Number of consecutive requests for one clip that draw the same moments in training.
        moments: Function that takes a row and the generator for its draws in training, and returns its moments; it
            raises ValueError if there are none. By default, moments are sampled from the row's span by the rule of
            `shape`.
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
        moments: MomentsOf | None = None,
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
        """Return the start and end of clips in their videos, microseconds."""
        return self._begin_us[rows], self._end_us[rows]

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the video row of each clip."""
        return self.chunks.table.video_row[self._first_chunk[rows]].astype(np.int64)

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Return the start of the first and end of the last frame of an evaluated clip in its video, seconds."""
        frames = self.plan(SampleRequest(sample, sample, None)).frames
        (first, first_frame), (last, last_frame) = (
            (self.chunks.times(chunk), frame) for chunk, frame in (frames[0], frames[-1])
        )
        end_us = last.frame_begin_us(last_frame) + Fraction(last.fps_den * US_PER_S, last.fps_num)
        return to_seconds(first.frame_begin_us(first_frame)), to_seconds(end_us)

    def deviations(self) -> list[str]:
        """Return deviations from the settings, with their counts, as text."""
        parts = [self.chunks.describe()]
        if self._repeats > 1:
            noun = "crops of the same frames" if self._num_same_frames > 1 else "samples"
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
        """Functions that read clips of a remote folder ahead of decoding; None for a local folder."""
        num_readers = self.chunks.num_readers
        return ReadAhead(self.read, self.load_read, num_readers) if num_readers else None

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the clips of a group of requests. Shared chunks are decoded once."""
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
        """Decode and crop clips that `read` has read; return the same samples as `load`."""
        return self._load(read.plans, read)

    def _load(self, plans: Sequence[ClipPlan], read: ReadClips | None) -> list[Sample | FailedSample]:
        # A chunk that several plans need is decoded once. If that fails, `_make` decodes the chunk again for each plan,
        # which then fails by itself.
        shared: dict[int, ChunkFrames] = {}
        for chunk, needed in _shared_chunks(plans).items() if len(plans) > 1 else ():
            with suppress(SampleFailed):
                shared[chunk] = self.decoder.decode(self._bytes(chunk, needed, {} if read is None else read.shared))
        loaded: list[Sample | FailedSample] = []
        for number, plan in enumerate(plans):
            contents = {} if read is None else {**read.shared, **read.others[number]}
            try:
                if plan.failure is not None:
                    raise plan.failure
                clip = self._make(plan, shared, contents)
                sample = Sample(
                    position=plan.request.position,
                    key=plan.key,
                    clip_id=plan.request.sample,
                    video=clip.video,
                    time_s=plan.time_s,
                    colour=clip.colour,
                )
                self.annotate(sample, plan.request)
                loaded.append(sample)
            except SampleFailed as error:
                loaded.append(error.at(plan.request.position))
        return loaded

    def plan(self, request: SampleRequest) -> ClipPlan:
        """Choose the frames of a requested sample."""
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
        numbers = tuple((first + index.chunk, index.frame) for index in frames)
        time_s = [to_seconds(chunks[index.chunk].frame_begin_us(index.frame)) for index in frames]
        return ClipPlan(request, key, numbers, request.generator("crop"), time_s=time_s)

    def clip(self, plan: ClipPlan, decoded: Mapping[int, ChunkFrames]) -> Clip:
        """Crop the frames of a plan, given each chunk's decoded frames; raise SampleFailed if their formats differ."""
        frames = [decoded[chunk][frame] for chunk, frame in plan.frames]
        in_graph = self.chunks.rule == "filter"
        return make_clip(frames, self._shape, rng=plan.rng, in_graph=in_graph, key=plan.key)

    def annotate(self, sample: Sample, request: SampleRequest) -> None:
        """Add the entries other than frames to a sample."""
        for annotations in self._annotations:
            annotations.add(sample, request)

    def _make(
        self, plan: ClipPlan, shared: Mapping[int, ChunkFrames], read: Mapping[int, ChunkBytes | SampleFailed]
    ) -> Clip:
        """Make a clip: decode the chunks that are not in `shared`, after reading those that are not in `read`.

        Each frame is cropped as soon as it is decoded.
        """
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
    """Return the chunks that several plans need, and the frames that the plans need of each chunk."""
    needed: dict[int, set[int]] = {}
    for plan in plans:
        for chunk, frames in plan.by_chunk.items():
            needed.setdefault(chunk, set()).update(frames)
    return {chunk: frames for chunk, frames in needed.items() if sum(chunk in plan.by_chunk for plan in plans) > 1}
