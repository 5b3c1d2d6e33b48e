"""Locations of the latents of all chunks, as arrays that take up to 40 bytes per chunk, and the segments of chunks.

A segment consists of `num_frames` frames of a chunk; segment i of a chunk begins at frame i * num_frames. The rest of a
chunk is a tail: a shorter segment, which is either omitted or zero-padded. Latents from a video VAE keep the segments
that the VAE encoded, and have no tails. Their frames are latent frames, at the lower rate of the VAE.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.divided_videos import DividedVideos
from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key
from clipmill.shards.columns import LATENTS, command_for
from clipmill.shards.reader import Variant
from clipmill.train.data.classes import ClassList
from clipmill.train.data.data_folder import index_in, rows_with_video
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mapped_tars import MappedTars, Payload, member_rows, places_of

if TYPE_CHECKING:
    from clipmill.train.data.remote import RemoteTars
    from clipmill.train.data.stored_text import TextMembers


Tails = Literal["drop", "pad"]

_COMPRESSED = "latents.npy.zst"
_ITEM_BYTES = 2  # size of a float16 or bfloat16
_SHAPE_COLUMNS = ("channels", "height", "width", "dtype", "fps_num", "fps_den")
DEFAULT_SEGMENT = "5s"
FALSE_COLOUR_STDS = 2.0  # distance from grey to black and white in false colours, in standard deviations
# Tolerance for lengths that decimal seconds cannot express: 80 frames at 30000/1001 frames per second.
_TOLERANCE_S = 1e-3
_MS_PER_S = 1000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*s?")


@dataclass(frozen=True)
class FrameShape:
    """Shape that all latents of a variant have in common.

    Attributes:
        channels, height, width: Channels C, height h and width w of a latent.
        dtype: Name of the dtype, float16 or bfloat16.
        fps: Latent frames per second.
        is_compressed: True if the members are compressed.
        segment_frames: Number T' of latent frames per segment if a video VAE encoded complete segments, stored as
            [C, T', h, w]; 0 if the VAE encoded single frames, stored as [C, h, w].
    """

    channels: int
    height: int
    width: int
    dtype: str
    fps: Fraction
    is_compressed: bool = False
    segment_frames: int = 0

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.height * self.width * _ITEM_BYTES

    def __str__(self) -> str:
        suffix = f", in segments of {self.segment_frames}" if self.segment_frames else ""
        suffix += ", compressed" if self.is_compressed else ""
        return f"{self.channels} x {self.height} x {self.width} {self.dtype} at {self.fps} frames a second{suffix}"


@dataclass(frozen=True)
class LatentRecords:
    """Chunks with latents, ordered by video and start. Each array has one entry per chunk.

    Attributes:
        shape: Shape of all latents.
        video_row: Row of the chunk's video in the list of videos.
        start_ms: Start in the video, in milliseconds.
        num_frames: Number of latent frames.
        array_place: Place of the array, or of the member if it is compressed (clipmill.train.data.mapped_tars).
        header_bytes: Size of the npy header before the array; 0 for a compressed member.
        crc32: CRC-32 checksum of header and array, or of the compressed member.
        num_unknown: Number of chunks that are omitted because their videos are not in the manifest.
        packed_bytes: Size of the compressed member; None if members are not compressed.
    """

    shape: FrameShape
    video_row: NDArray[np.int32]
    start_ms: NDArray[np.int64]
    num_frames: NDArray[np.int32]
    array_place: NDArray[np.int64]
    header_bytes: NDArray[np.int32]
    crc32: NDArray[np.uint32]
    num_unknown: int
    packed_bytes: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.video_row)

    def take(self, rows: NDArray[np.int64]) -> "LatentRecords":
        """Return the records of the chunks in these rows, which must be ascending."""
        arrays: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, **arrays)

    def key(self, chunk: int, video_ids: pa.Array) -> str:
        """Return the key of a chunk."""
        return chunk_key(video_ids[int(self.video_row[chunk])].as_py(), int(self.start_ms[chunk]))

    def payload(self, chunk: int) -> Payload:
        """Return the place, size and checksum of a chunk's member."""
        header_bytes = int(self.header_bytes[chunk])
        size_bytes = header_bytes + int(self.num_frames[chunk]) * self.shape.frame_bytes
        if self.packed_bytes is not None:
            size_bytes = int(self.packed_bytes[chunk])
        return Payload(int(self.array_place[chunk]) - header_bytes, size_bytes, int(self.crc32[chunk]))


def read_records(
    variant: Variant, *, starts: NDArray[np.int64], video_ids: pa.Array, known_ids: pa.Array
) -> LatentRecords | None:
    """Return the chunks of a variant that belong to these videos.

    The chunks come from the variant's merged table or, if there is none, from the indexes of its shards.

    Args:
        starts: Place of each shard's tar.
        video_ids: IDs of the requested videos. The row of a video is its index in this array.
        known_ids: IDs of all videos of the manifest.

    Returns:
        records: The records; None if none of the videos has latents.

    Raises:
        UserError: Latents of chunks differ in shape, or an index does not match its tar.
    """
    if not variant.num_shards:
        return None
    rows = member_rows(variant)
    entries, codes = rows.dictionary_codes("video_id")
    table, member = rows.table.drop_columns("video_id"), rows.member
    num_unknown = int((index_in(entries, known_ids) < 0)[codes].sum())
    video_row = index_in(entries, video_ids).astype(np.int32)[codes]
    kept_rows, order = rows_with_video(video_row, table["start_ms"].to_numpy())
    if kept_rows is not None:
        table, video_row = table.take(pa.array(kept_rows)), video_row[kept_rows]
    if not len(table):
        return None
    shard_of = np.searchsorted(variant.tar_files.shard_ids, table["shard"].to_numpy())
    shape = _shape(variant, table, shard_of, is_compressed=member == _COMPRESSED)
    num_frames = table["num_frames"].to_numpy()
    array_bytes = None if shape.is_compressed else num_frames.astype(np.int64) * shape.frame_bytes
    place, header_bytes = places_of(variant, table, starts=starts, shard_of=shard_of, array_bytes=array_bytes)
    columns = {
        "video_row": video_row,
        "start_ms": table["start_ms"].to_numpy(),
        "num_frames": num_frames,
        "array_place": place,
        "header_bytes": header_bytes,
        "crc32": table["crc32"].to_numpy(),
    }
    if shape.is_compressed:
        columns["packed_bytes"] = table["size"].to_numpy().astype(np.int64)
    if order is not None:
        columns = {name: columns.pop(name)[order] for name in list(columns)}
    return LatentRecords(shape=shape, num_unknown=num_unknown, **columns)


def _shape(variant: Variant, table: pa.Table, shard_of: NDArray[np.int64], *, is_compressed: bool) -> FrameShape:
    """Return the shape of all latents; raise UserError if shapes differ."""
    distinct_rows = table.select([*_SHAPE_COLUMNS]).group_by(list(_SHAPE_COLUMNS), use_threads=False).aggregate([])
    shapes, segment_frames = [], int(variant.recipe.get("latent_frames") or 0)
    for row in distinct_rows.to_pylist():
        is_same = np.ones(len(table), bool)
        for name, value in row.items():
            is_same &= pc.equal(table[name], value).to_numpy()
        fps = Fraction(row.pop("fps_num"), row.pop("fps_den"))
        shape = FrameShape(fps=fps, is_compressed=is_compressed, segment_frames=segment_frames, **row)
        shapes.append((int(shard_of[is_same].min()), shape))
    (first_shard, shape), *other_shapes = sorted(shapes, key=lambda pair: pair[0])
    for other_shard, other_shape in other_shapes:
        tars = variant.tar_files
        raise UserError(
            f"latents differ in shape: {shape} in {tars.path(first_shard)}, {other_shape} in {tars.path(other_shard)}",
            hint=f"run prep {command_for(LATENTS)} to make a new variant: all latents of a variant must have the "
            "same shape",
        )
    return shape


@dataclass(frozen=True)
class Segments:
    """Segments of chunks, in the order of the chunks.

    Attributes:
        num_frames: Number of frames of a full segment.
        first_segment: Index of the first segment of each chunk, followed by the number of segments, int64 [chunks + 1].
        num_tails: Number of chunks that end with a shorter segment.
        tails: Treatment of shorter segments: "pad" to include them with zero padding, or "drop" to omit them.
    """

    num_frames: int
    first_segment: NDArray[np.int64]
    num_tails: int
    tails: Tails

    def __len__(self) -> int:
        return int(self.first_segment[-1])

    def chunk_of(self, segments: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunk of each segment."""
        return np.searchsorted(self.first_segment, segments, side="right") - 1


def divide(records: LatentRecords, *, num_frames: int, tails: Tails) -> Segments:
    """Divide chunks into segments of `num_frames` frames."""
    per_chunk, rest = np.divmod(records.num_frames.astype(np.int64), num_frames)
    if tails == "pad":
        per_chunk += rest > 0
    first_segment = np.concatenate([[0], np.cumsum(per_chunk)])
    return Segments(num_frames=num_frames, first_segment=first_segment, num_tails=int((rest > 0).sum()), tails=tails)


def times_us(
    records: LatentRecords, segments: Segments, indices: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and end of segments in their videos, microseconds, rounded down. A tail ends with its chunk."""
    chunk = segments.chunk_of(indices)
    frame = (indices - segments.first_segment[chunk]) * segments.num_frames
    return frame_times_us(records, chunk, frame, num_frames=segments.num_frames)


def frame_times_us(
    records: LatentRecords, chunk: NDArray[np.integer], begin: NDArray[np.integer], *, num_frames: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and end of segments, as `times_us` does, given their chunks and first frames.

    Args:
        begin: First frame of each segment in its chunk.
    """
    begin = begin.astype(np.int64)
    end = np.minimum(begin + num_frames, records.num_frames[chunk])
    fps = records.shape.fps
    start_us = records.start_ms[chunk] * 1000
    frame_us = US_PER_S * fps.denominator
    return start_us + begin * frame_us // fps.numerator, start_us + end * frame_us // fps.numerator


def frame_starts_s(
    records: LatentRecords, chunk: NDArray[np.integer], begin: NDArray[np.integer], *, num_frames: int
) -> NDArray[np.float64]:
    """Return the start of each frame of the segments in the video, seconds [N, num_frames]; nan after a chunk's end.

    Args:
        begin: First frame of each segment in its chunk.
    """
    frame = begin.astype(np.int64)[:, None] + np.arange(num_frames)
    fps = records.shape.fps
    start = records.start_ms[chunk].astype(np.int64)[:, None] * fps.numerator
    times_s = (start + frame * (fps.denominator * _MS_PER_S)) / (fps.numerator * _MS_PER_S)
    return np.where(frame < records.num_frames[chunk][:, None], times_s, np.nan)


def frames_of(segment: str | None, shape: FrameShape) -> int:
    """Return the number of frames in a segment.

    Args:
        segment: Length such as `5s`; None for the default length.

    Raises:
        UserError: `segment` is not a duration, is not a whole number of frames, or differs from the segments that a
            video VAE encoded.
    """
    if shape.segment_frames:
        stored_s = float(shape.segment_frames / shape.fps)
        if segment is not None and abs(float(seconds_of(segment)) - stored_s) > _TOLERANCE_S:
            raise UserError(
                f"a segment of {segment!r} cannot be cut from these latents: a video VAE encoded complete "
                f"segments of {stored_s:g} s",
                hint=f"omit the length, use {stored_s:g}s, or make latents with a different --segment of prep "
                f"{command_for(LATENTS)}",
            )
        return shape.segment_frames
    segment = DEFAULT_SEGMENT if segment is None else segment
    num_frames = seconds_of(segment) * shape.fps
    if num_frames < 1 or num_frames.denominator != 1:
        raise UserError(
            f"a segment of {segment!r} is {float(num_frames):g} frames at {shape.fps} frames a second, not a positive "
            "whole number of frames",
            hint="use a length that contains a whole number of frames, such as 5s",
        )
    return int(num_frames)


def seconds_of(segment: str) -> Fraction:
    """Convert a duration such as `5s` or `2.5` to seconds; raise UserError for any other text."""
    match = _DURATION.fullmatch(segment)
    if match is None:
        raise UserError(f"{segment!r} is not a segment length", hint="use seconds, such as 5s")
    return Fraction(match[1])


@dataclass(frozen=True)
class StoredLatents:
    """Chunks of a split that have latents.

    Attributes:
        video_ids: IDs of the videos of the split.
        records: Chunks with latents.
        divided: Videos that are divided among several splits; None if no video is divided.
    """

    video_ids: pa.Array
    records: LatentRecords
    divided: DividedVideos | None


@dataclass(frozen=True, kw_only=True)
class LatentSegments:
    """Opened data from which segments are read.

    Attributes:
        records: Chunks with latents. A segment table refers to them as parts.
        video_ids: IDs of the videos of the split.
        maps: Maps of the tars of latents and stored texts.
        text: Members that contain stored texts; None if samples have no stored texts.
        num_frames: Number of frames of a full segment.
        has_tails: True if samples may include shorter segments.
        source_remark: Remark for the log if the latents were made from outdated chunks; otherwise empty.
    """

    records: LatentRecords
    video_ids: pa.Array
    maps: MappedTars
    text: "TextMembers | None"
    num_frames: int
    has_tails: bool
    source_remark: str

    def key(self, chunk: int) -> str:
        """Return the key of a chunk."""
        return self.records.key(chunk, self.video_ids)


ShownCaptions = Literal["none", "stored", "words"]


@dataclass(frozen=True, kw_only=True)
class SegmentQuery:
    """Description of the segments to open from a data folder.

    Attributes:
        data_dir: Data folder, or the local copy of its small files if the tars are elsewhere.
        split: Split of the manifest.
        segment: Length of a segment, such as "5s"; it must be a whole number of frames. Default: the length of the
            segments that a video VAE encoded, or DEFAULT_SEGMENT for latents of single frames.
        captions: Form of captions: "none", "stored" for embeddings, or "words" for text. Segments without captions are
            omitted unless the form is "none".
        loading: Settings of the loader. Its threads read members that must be verified, downloaded or decompressed.
            Four threads keep a disk busy, and one thread verifies several gigabytes per second. Memory is pinned if
            there is a GPU, unless the caller keeps batches.
        tails: Treatment of the frames after the last full segment of a chunk: "drop", or "pad" with zeros (batches then
            contain `num_frames`).
        sources: Sampling weights of caption sources (clipmill.train.config.clips).
        classes: Class lists of the labels, for samples with labels instead of captions. Segments without any of the
            labels are omitted (clipmill.train.data.latents.segment_table).
        max_segments: Maximum number of segments per video, evenly spaced; None for all.
        where: Expression that selects segments by chunks and captions (clipmill.shards.where); None for all segments.
        tars: Reader of the tars of a remote data folder; None if they are in `data_dir`.
    """

    data_dir: Path = field(kw_only=False)
    split: str
    segment: str | None = None
    captions: ShownCaptions = "stored"
    loading: LoaderSettings = field(default_factory=LoaderSettings)
    tails: Tails = "drop"
    sources: str | None = None
    classes: Sequence[ClassList] = ()
    max_segments: int | None = None
    where: str | None = None
    tars: "RemoteTars | None" = None

    def __post_init__(self) -> None:
        if self.classes and self.captions != "none":
            raise ValueError(f"samples with labels have no captions: {self.captions}")
