"""Divide the videos of a plan into chunks, evenly or at shot boundaries, and assign spans to shards.

A span consists of consecutive chunks of a video that one encoder pass makes. The division depends only on frame counts
and shot boundaries. `shot_chunks` defines what happens to shots that are too long or too short.

The layout, which assigns spans to shards, is stored in `<data>/layout/<len>-<tail>.parquet` or, with `--cut shots`, in
`<len>-shots-<hash>.parquet`, where the hash identifies the settings that determine the chunks. New spans are
assigned to new shards, in manifest order, one split after another.
"""

import hashlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.prep.core.tables import (
    LAYOUT,
    LAYOUT_FOLDER,
    SpanId,
    as_array,
    layout_of_commits,
    variants_of,
    video_rows_of,
    wanted_spans,
)
from clipmill.prep.video.column import COLUMN
from clipmill.prep.video.encode import Span, chunks_of, num_chunks_of, num_output_frames, span_of
from clipmill.prep.video.settings import SPAN_CHUNKS, ChunkSettings, ResolvedRecipe
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Failure

MAX_SHARD_CHUNKS = 256  # about half a gigabyte at the default settings
MIN_SHARDS = 16  # target for the number of new shards, so that even a small dataset keeps all cores of a server busy


@dataclass(frozen=True)
class ShotChunks:
    """The chunks of one video with `--cut shots`.

    Attributes:
        chunks: First frame and number of frames of each chunk, in ascending order.
        num_left_out: Number of shots that are too short for a chunk and do not fit into a neighbour.
    """

    chunks: list[tuple[int, int]]
    num_left_out: int


def shot_chunks(cuts: Sequence[int], num_frames: int, *, max_frames: int, min_frames: int) -> ShotChunks:
    """Divide a video at its shot boundaries into chunks of `min_frames` to `max_frames` frames.

    1. A shot longer than `max_frames` is divided into as few chunks as possible. Their lengths differ by at most one
       frame, so there is no short remainder.
    2. In video order, each shot shorter than `min_frames` is merged with its shorter neighbour (the previous chunk or
       the next shot) until the result is long enough. A merge that would exceed `max_frames` is not made.
    3. A shot that is still too short is omitted.

    Args:
        cuts: First frame of every shot except the first, in ascending order.
        max_frames: Maximum length of a chunk.
        min_frames: Minimum length of a chunk; at most half of `max_frames`, rounded up, so that the parts of a long
            shot are long enough.
    """
    parts: list[tuple[int, int]] = []  # (first frame, number of frames) of each shot, or of each part of a long shot
    for shot_begin, shot_end in zip([0, *cuts], [*cuts, num_frames], strict=True):
        length, num_parts = shot_end - shot_begin, -(-(shot_end - shot_begin) // max_frames)
        bounds = [shot_begin + length * part // num_parts for part in range(num_parts + 1)]
        parts += [(begin, end - begin) for begin, end in pairwise(bounds)]
    chunks: list[tuple[int, int]] = []
    num_left_out, index = 0, 0
    while index < len(parts):
        first, frames = parts[index]
        first_index = index
        index += 1
        while frames < min_frames:
            # The last chunk is adjacent, because the shot after an omitted shot is longer than half of `max_frames`.
            previous_frames = chunks[-1][1] if chunks else max_frames
            next_frames = parts[index][1] if index < len(parts) else max_frames
            if frames + min(previous_frames, next_frames) > max_frames:
                break
            if previous_frames <= next_frames:
                first, frames = chunks.pop()[0], previous_frames + frames
            else:
                frames += next_frames
                index += 1
        if frames >= min_frames:
            chunks.append((first, frames))
        else:
            num_left_out += index - first_index
    return ShotChunks(chunks, num_left_out)


@dataclass(frozen=True)
class EvenCutting:
    """Division of videos into chunks of equal length. An unusable video has no chunks.

    Attributes:
        num_frames: Number of frames in each video, int64; 0 if it is unusable.
        chunk_frames: Number of frames in a full chunk.
        tail: Handling of the remainder of a video: keep, drop or merge.
        span_chunks: Number of chunks in a full span.
    """

    num_frames: np.ndarray
    chunk_frames: int
    tail: str
    span_chunks: int

    @property
    def num_chunks(self) -> np.ndarray:
        """Number of chunks of each video, int64."""
        return num_chunks_of(self.num_frames, chunk_frames=self.chunk_frames, tail=self.tail)

    @property
    def num_left_out(self) -> int:
        """Number of tails that no chunk contains."""
        return len(self.videos_left_out)

    @property
    def frames_left_out(self) -> int:
        """Number of frames that no chunk contains."""
        return int(self._rests[self.videos_left_out].sum())

    @cached_property
    def videos_left_out(self) -> list[int]:
        """Rows of the videos whose tail no chunk contains."""
        rows: list[int] = np.flatnonzero(self._rests).tolist() if self.tail == "drop" else []
        return rows

    @property
    def _rests(self) -> np.ndarray:
        return self.num_frames % self.chunk_frames

    def short_tails(self, *, max_frames: int) -> dict[int, int]:
        """Return the number of frames in each kept tail that is shorter than `max_frames`, by the row of its video."""
        tail_frames = self._rests if self.tail == "keep" else np.zeros_like(self.num_frames)
        rows = np.flatnonzero((tail_frames > 0) & (tail_frames < max_frames) & (self.num_frames > self.chunk_frames))
        return dict(zip(rows.tolist(), tail_frames[rows].tolist(), strict=True))

    def span(self, video: int, index: int) -> Span:
        """Return one span of a video."""
        chunks = chunks_of(int(self.num_frames[video]), chunk_frames=self.chunk_frames, tail=self.tail)
        return span_of(chunks, index=index, span_chunks=self.span_chunks)

    def span_frames(self, videos: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the approximate number of frames in each span, int64; used for cost estimates."""
        frames_per_span = self.span_chunks * self.chunk_frames
        return np.minimum(self.num_frames[videos] - index * frames_per_span, frames_per_span)

    def identities(self, videos: np.ndarray) -> pa.Array:
        """Return, for each video, a string that identifies all its chunks; `videos` may contain duplicates.

        The strings are part of the fingerprints of shards.
        """
        return pa.array(self.num_frames[videos]).cast(pa.string())


@dataclass(frozen=True)
class ShotCutting:
    """Division of videos into chunks that start and end at shot boundaries, with the interface of `EvenCutting`.

    A video has no chunks if it is unusable, if its shots are unknown, or if all its shots are omitted.

    Attributes:
        begins: Index of the first chunk of each video, followed by the total number of chunks, int64 [videos + 1].
        first_frame: First frame of each chunk in its video, int64 [chunks].
        chunk_frames: Number of frames in each chunk, int64 [chunks].
        span_chunks: Number of chunks in a full span.
        num_left_out: Number of shots, in all videos, that no chunk contains.
        frames_left_out: Number of frames in these shots.
        videos_left_out: Rows of the videos with such shots.
    """

    begins: np.ndarray
    first_frame: np.ndarray
    chunk_frames: np.ndarray
    span_chunks: int
    num_left_out: int
    frames_left_out: int
    videos_left_out: Sequence[int]

    @property
    def num_chunks(self) -> np.ndarray:
        return np.diff(self.begins)

    def span(self, video: int, index: int) -> Span:
        begin, end = self._rows(video, index)
        first, frames = self.first_frame[begin:end].tolist(), self.chunk_frames[begin:end].tolist()
        ends = [start + length for start, length in zip(first, frames, strict=True)]
        gaps = (0, *(start - end for start, end in zip(first[1:], ends[:-1], strict=True)))
        return Span(
            index=index,
            first_frame=first[0],
            chunk_frames=tuple(frames),
            is_last=end == self.begins[video + 1],
            gaps=gaps if any(gaps) else (),
        )

    def span_frames(self, videos: np.ndarray, index: np.ndarray) -> np.ndarray:
        offsets = np.concatenate([[0], np.cumsum(self.chunk_frames)])
        begin, end = self._rows(videos, index)
        return offsets[end] - offsets[begin]

    def identities(self, videos: np.ndarray) -> pa.Array:
        distinct_videos, positions = np.unique(videos, return_inverse=True)
        identities = []
        for video in distinct_videos.tolist():
            rows = slice(self.begins[video], self.begins[video + 1])
            content = np.stack([self.first_frame[rows], self.chunk_frames[rows]]).astype("<i8").tobytes()
            identities.append(hashlib.sha256(content).hexdigest())
        return pa.array(identities, pa.string()).take(pa.array(positions))

    def left_out(self, video: int, *, num_frames: int) -> list[tuple[int, int]]:
        """Return (first frame, frame after the last frame) of each part of a video that no chunk contains."""
        rows = slice(self.begins[video], self.begins[video + 1])
        begins = [*self.first_frame[rows].tolist(), num_frames]
        ends = [0, *(self.first_frame[rows] + self.chunk_frames[rows]).tolist()]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]

    def span_index(self, videos: np.ndarray, first_frame: np.ndarray) -> np.ndarray:
        """Return the span index of the chunk that starts at each frame, int64; -1 if no chunk starts there."""
        from clipmill.shards.chunk_table import Moments

        owners = np.repeat(np.arange(len(self.begins) - 1), self.num_chunks)
        moments = Moments.build(owners, self.first_frame)
        codes, keys = moments.numbers(owners, self.first_frame), moments.numbers(videos, first_frame)
        rows = np.minimum(np.searchsorted(codes, keys), max(0, len(codes) - 1))
        is_known = codes[rows] == keys if len(codes) else np.zeros(len(keys), bool)
        return np.where(is_known, (rows - self.begins[videos]) // self.span_chunks, -1)

    def _rows(self, videos: Any, index: Any) -> tuple[Any, Any]:
        """Return (first chunk, chunk after the last chunk) of a span; for arrays, of each span."""
        begin = self.begins[videos] + index * self.span_chunks
        return begin, np.minimum(begin + self.span_chunks, self.begins[videos + 1])


Cutting = EvenCutting | ShotCutting


def shot_cutting(
    cuts: Sequence[Sequence[int] | None], num_frames: np.ndarray, *, max_frames: int, min_frames: int, span_chunks: int
) -> ShotCutting:
    """Divide all videos at their shots, as `shot_chunks` does.

    Args:
        cuts: Cuts of each video; None if they are unknown, in which case the video has no chunks.
        num_frames: Number of frames of each video, int64.
    """
    chunks: list[tuple[int, int]] = []
    begins, num_left_out, frames_left_out = [0], 0, 0
    videos_left_out: list[int] = []
    for video, (video_cuts, frames) in enumerate(zip(cuts, num_frames.tolist(), strict=True)):
        if video_cuts is not None:
            video_chunks = shot_chunks(video_cuts, frames, max_frames=max_frames, min_frames=min_frames)
            chunks += video_chunks.chunks
            num_left_out += video_chunks.num_left_out
            videos_left_out += [video] if video_chunks.num_left_out else []
            frames_left_out += frames - sum(length for _, length in video_chunks.chunks)
        begins.append(len(chunks))
    table = np.array(chunks, np.int64).reshape(-1, 2)
    return ShotCutting(
        begins=np.array(begins, np.int64),
        first_frame=table[:, 0],
        chunk_frames=table[:, 1],
        span_chunks=span_chunks,
        num_left_out=num_left_out,
        frames_left_out=frames_left_out,
        videos_left_out=videos_left_out,
    )


@dataclass(frozen=True)
class VideoShots:
    """Known shots of videos.

    Attributes:
        cuts: First frame of every shot except the first, list<int32> [videos]; null if they are unknown.
        failures: Code and message of each failed detection, by the row of the video.
        undetected_rows: Rows of the videos whose shots must be detected, in ascending order.
    """

    cuts: pa.ListArray
    failures: dict[int, tuple[str, str]]
    undetected_rows: np.ndarray

    @property
    def is_known(self) -> np.ndarray:
        """Mask of the videos whose shots are known, bool [videos]."""
        return np.asarray(pc.is_valid(self.cuts))


def frames_of(recipe: ResolvedRecipe, probes: pa.Table) -> np.ndarray:
    """Return the number of output frames of each video, int64; 0 if it is unusable.

    Args:
        probes: Probes of the videos (clipmill.prep.sources.table.PROBES).
    """
    ends_s = probes["end_s"]  # null if the video is unusable; its fingerprint is null too
    num_frames = num_output_frames(np.asarray(pc.fill_null(ends_s, 0.0)), fps=recipe.settings.fps_exact)
    return np.where(np.asarray(pc.is_valid(ends_s)), num_frames, 0)


def shots_of(
    recipe: ResolvedRecipe, probes: pa.Table, *, shots: pa.Table | None, retry_failed: bool
) -> VideoShots | None:
    """Look up the shots of videos; return None with `--cut even`.

    Args:
        probes: Probes of the videos (clipmill.prep.sources.table.PROBES).
        shots: Stored shots (clipmill.prep.sources.shot_table.SHOTS); None with `--cut even`.
        retry_failed: True to repeat a failed detection.
    """
    if shots is None:
        return None
    from clipmill.prep.sources.shot_table import shot_rows

    fingerprints = as_array(probes["fingerprint"])
    rows = shot_rows(shots, key=detector_key(recipe), fingerprints=fingerprints, num_frames=frames_of(recipe, probes))
    video_shots = shots.take(pa.array(rows, mask=rows < 0))
    has_failed = np.asarray(pc.is_valid(video_shots["code"]))
    is_undetected = np.asarray(pc.is_valid(fingerprints)) & ((rows < 0) | (has_failed & retry_failed))
    failed_rows = np.flatnonzero(has_failed & ~is_undetected)
    reasons = video_shots.select(["code", "message"]).take(pa.array(failed_rows)).to_pylist()
    return VideoShots(
        cuts=as_array(video_shots["cuts"]),
        failures={
            row: (reason["code"], reason["message"]) for row, reason in zip(failed_rows.tolist(), reasons, strict=True)
        },
        undetected_rows=np.flatnonzero(is_undetected),
    )


def detector_key(recipe: ResolvedRecipe) -> str:
    """Return the key that identifies the detector of a recipe in the stored shots."""
    return recipe.settings.shot_detector.key(recipe.values["scenedetect"])


def cutting_of(settings: ChunkSettings, num_frames: np.ndarray, shots: VideoShots | None) -> Cutting:
    """Return the division of all videos into chunks.

    Args:
        num_frames: Number of frames of each video, int64; 0 if it is unusable.
        shots: Known shots of the videos; required by `--cut shots`.
    """
    if settings.cut == "even":
        return EvenCutting(num_frames, settings.chunk_frames, settings.tail, SPAN_CHUNKS)
    assert shots is not None, "the shots of the videos are required"
    return shot_cutting(
        shots.cuts.to_pylist(),
        num_frames,
        max_frames=settings.chunk_frames,
        min_frames=settings.min_frames,
        span_chunks=SPAN_CHUNKS,
    )


def layout_path(data_dir: Path, settings: ChunkSettings) -> Path:
    """Return the path of the layout for chunks with these settings."""
    return data_dir / LAYOUT_FOLDER / layout_file(settings)


def layout_file(settings: ChunkSettings) -> str:
    """Return the file name of the layout for chunks with these settings."""
    if settings.cut == "even":
        return f"{settings.len}-{settings.tail}.parquet"
    names = ("min_len", "detector", "threshold", "min_scene_len", "fps")
    values = " ".join(f"{name}={getattr(settings, name)}" for name in names)
    return f"{settings.len}-{settings.cut}-{hashlib.sha256(values.encode()).hexdigest()[:8]}.parquet"


@dataclass(frozen=True)
class ExtendedLayout:
    """A layout in which every required span has a shard.

    Attributes:
        table: Layout with schema LAYOUT; the original table if it contained all spans.
        video_rows: For each row of `table`, the manifest row of its video, int64; -1 if the video is not in the
            manifest.
        required: Rows of `table` with required spans, in ascending order, int64.
    """

    table: pa.Table
    video_rows: np.ndarray
    required: np.ndarray


def extend_layout(layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_chunks: np.ndarray) -> ExtendedLayout:
    """Append rows to `layout` that assign a shard to every span without a shard.

    Args:
        layout: Table with schema LAYOUT.
        video_ids: IDs of the videos, in manifest order.
        splits: Splits of the videos, in the same order.
        num_chunks: Number of chunks of each video (0 if it is unusable), int64.
    """
    rows_of_layout = video_rows_of(layout, video_ids)
    required, videos = required_rows(layout, video_rows=rows_of_layout, splits=splits, num_chunks=num_chunks)
    # Spans stay in their shards, because a move would rewrite existing shards.
    spans_per_video = -(-num_chunks // SPAN_CHUNKS)
    first = np.cumsum(spans_per_video) - spans_per_video
    is_new = np.ones(int(spans_per_video.sum()), bool)
    is_new[first[videos] + np.asarray(layout["span_index"])[required]] = False
    if not is_new.any():
        return ExtendedLayout(layout, rows_of_layout, required)
    video_rows = np.repeat(np.arange(len(num_chunks)), spans_per_video)[is_new]
    span_index = np.flatnonzero(is_new) - first[video_rows]
    span_chunks = np.minimum(num_chunks[video_rows] - span_index * SPAN_CHUNKS, SPAN_CHUNKS)
    # Choose the shard size so that about MIN_SHARDS new shards are made. A shard holds at least one span, and at most
    # MAX_SHARD_CHUNKS chunks.
    target = int(np.clip(-(-span_chunks.sum() // MIN_SHARDS), SPAN_CHUNKS, MAX_SHARD_CHUNKS))
    next_shard = pc.max(layout["shard_id"]).as_py() + 1 if len(layout) else 0
    tables, rows = [layout], [rows_of_layout]
    for split in sorted(pc.unique(splits).to_pylist()):
        split_spans = np.flatnonzero(np.asarray(pc.equal(splits, split))[video_rows])
        # Fill one shard after another, up to `target` chunks.
        counts = span_chunks[split_spans]
        ends = np.cumsum(counts)
        begins, begin = [], 0
        while begin < len(ends):
            begins.append(begin)
            limit = ends[begin] - counts[begin] + target
            begin = max(begin + 1, int(np.searchsorted(ends, limit, side="right")))
        sizes = np.diff([*begins, len(ends)])
        shard_of, next_shard = next_shard + np.repeat(np.arange(len(begins)), sizes), next_shard + len(begins)
        tables.append(
            pa.table(
                [
                    pa.array(shard_of, pa.int32()),
                    pa.repeat(split, len(split_spans)),
                    video_ids.take(pa.array(video_rows[split_spans])),
                    pa.array(span_index[split_spans], pa.int32()),
                ],
                schema=LAYOUT,
            )
        )
        rows.append(video_rows[split_spans])
    extended_table = pa.concat_tables(tables).combine_chunks()
    required = np.concatenate([required, np.arange(len(layout), len(extended_table))])
    return ExtendedLayout(extended_table, np.concatenate(rows), required)


def required_rows(
    layout: pa.Table, *, video_rows: np.ndarray, splits: pa.Array, num_chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `wanted_spans` for videos with the given numbers of chunks, int64 [videos]."""
    num_spans = num_chunks // SPAN_CHUNKS + (num_chunks % SPAN_CHUNKS > 0)
    return wanted_spans(layout, video_rows=video_rows, splits=splits, num_spans=num_spans)


def shards_of_moved_videos(
    layout: pa.Table, *, video_rows: np.ndarray, splits: pa.Array, stored: Collection[int]
) -> dict[int, bool]:
    """Find the shards that lose or gain videos because the split of a video has changed.

    Args:
        layout: Table with schema LAYOUT, including the shards that videos move to.
        video_rows: Result of `clipmill.prep.core.tables.video_rows_of`.
        splits: Splits of the videos, in manifest order.
        stored: IDs of the shards that were written.

    Returns:
        For each of these shards, by shard ID: True if all its videos move, otherwise False.
    """
    is_known = video_rows >= 0
    has_other_split = np.zeros(len(layout), bool)
    has_other_split[is_known] = np.asarray(
        pc.not_equal(as_array(layout["split"]).filter(pa.array(is_known)), splits.take(pa.array(video_rows[is_known])))
    )
    if not has_other_split.any():
        return {}
    shards, shard_of_row = np.unique(np.asarray(layout["shard_id"]), return_inverse=True)
    is_leaving = has_other_split & np.isin(shards, list(stored))[shard_of_row]
    is_entering = is_known & ~has_other_split & np.isin(video_rows, video_rows[is_leaving])
    num_moved = np.bincount(shard_of_row, weights=is_leaving | is_entering, minlength=len(shards))
    have_all_moved = num_moved == np.bincount(shard_of_row, minlength=len(shards))
    return dict(zip(shards[num_moved > 0].tolist(), have_all_moved[num_moved > 0].tolist(), strict=True))


def video_layout_of_commits(
    data_dir: Path, settings: ChunkSettings, *, video_ids: pa.Array, cutting: Cutting
) -> pa.Table:
    """Rebuild the layout (schema LAYOUT) for chunks with `settings` from all variants that share this layout.

    Args:
        video_ids: IDs of the videos, in manifest order.
        cutting: Division of these videos into chunks. With `--cut shots`, other stored chunks are omitted.
    """
    chunk_ms = float(1000 * settings.chunk_frames / settings.fps_exact)

    def span_indexes(ids: pa.Array, start_ms: np.ndarray) -> np.ndarray:
        if not isinstance(cutting, ShotCutting):
            return np.rint(start_ms / chunk_ms).astype(np.int64) // SPAN_CHUNKS
        videos = np.asarray(pc.fill_null(pc.index_in(ids, value_set=video_ids), -1)).astype(np.int64)
        first_frame = np.rint(start_ms * float(settings.fps_exact) / 1000).astype(np.int64)
        return cutting.span_index(videos, first_frame)

    def spans(index: pa.Table) -> list[SpanId]:
        ids = as_array(index["video_id"].cast(pa.string()))
        indexes = span_indexes(ids, index["start_ms"].to_numpy()).tolist()
        return list(dict.fromkeys(span for span in zip(ids.to_pylist(), indexes, strict=True) if span[1] >= 0))

    def span_of_failure(failure: Failure) -> SpanId | None:
        if failure.key is None:
            return None
        start_ms = int(failure.key.rpartition("_")[2])
        index = int(span_indexes(pa.array([failure.video_id], pa.string()), np.array([start_ms]))[0])
        return (failure.video_id, index) if index >= 0 else None

    variants = []
    for variant in variants_of(data_dir, VIDEO):
        with suppress(UserError):  # the variant has a different schema
            stored = COLUMN.stored_settings(variant.recipe).settings()
            if (layout_file(stored), stored.fps_exact) == (layout_file(settings), settings.fps_exact):
                variants.append(variant)
    return layout_of_commits(variants, video_ids, spans=spans, span_of_failure=span_of_failure)
