"""The layout of `video`: the assignment of spans to shards.

It is stored in `<data>/layout/<len>-<tail>.parquet`, or `<len>-shots-<hash>.parquet` with `--cut shots`, where the hash
stands for the settings that determine the chunks. New spans are assigned to new shards, in manifest order, one split
after another.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

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
from clipmill.prep.video.cutting import Cutting, ShotCutting
from clipmill.prep.video.settings import SPAN_CHUNKS, ChunkSettings
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Failure
from clipmill.shards.reader import Variant

MAX_SHARD_CHUNKS = 256  # about half a gigabyte at the default settings
MIN_SHARDS = 16  # so that even a small set keeps all cores of a server busy


def layout_path(data_dir: Path, settings: ChunkSettings) -> Path:
    """Return the path of the layout for the recipe's chunks."""
    return data_dir / LAYOUT_FOLDER / layout_file(settings)


def layout_file(settings: ChunkSettings) -> str:
    """Return the file name of the layout for the recipe's chunks."""
    if settings.cut == "even":
        return f"{settings.len}-{settings.tail}.parquet"
    names = ("min_len", "detector", "threshold", "min_scene_len", "fps")
    values = " ".join(f"{name}={getattr(settings, name)}" for name in names)
    return f"{settings.len}-{settings.cut}-{hashlib.sha256(values.encode()).hexdigest()[:8]}.parquet"


@dataclass(frozen=True)
class ExtendedLayout:
    """A layout in which every wanted span has a shard.

    Attributes:
        table: schema LAYOUT; the table that was extended, if it had all of them.
        video_rows: the video of each of its rows in the manifest, int64; -1 if it is not there.
        wanted: its rows with wanted spans, ascending, int64.
    """

    table: pa.Table
    video_rows: np.ndarray
    wanted: np.ndarray


def extend_layout(layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_chunks: np.ndarray) -> ExtendedLayout:
    """Assign every span of the given videos that has no shard yet, in rows behind those of `layout`.

    Args:
        layout: table with schema LAYOUT.
        video_ids: ids of the videos, in manifest order.
        splits: splits of the videos, in the same order.
        num_chunks: number of chunks of each video (0 if it is unusable), int64.
    """
    rows_of_layout = video_rows_of(layout, video_ids)
    wanted, videos = wanted_rows(layout, video_rows=rows_of_layout, splits=splits, num_chunks=num_chunks)
    spans_per_video = -(-num_chunks // SPAN_CHUNKS)
    first = np.cumsum(spans_per_video) - spans_per_video
    is_new = np.ones(int(spans_per_video.sum()), bool)
    is_new[first[videos] + np.asarray(layout["span_index"])[wanted]] = False
    if not is_new.any():
        return ExtendedLayout(layout, rows_of_layout, wanted)
    video_rows = np.repeat(np.arange(len(num_chunks)), spans_per_video)[is_new]
    span_index = np.flatnonzero(is_new) - first[video_rows]
    span_chunks = np.minimum(num_chunks[video_rows] - span_index * SPAN_CHUNKS, SPAN_CHUNKS)
    target = int(np.clip(-(-span_chunks.sum() // MIN_SHARDS), SPAN_CHUNKS, MAX_SHARD_CHUNKS))
    next_shard = pc.max(layout["shard_id"]).as_py() + 1 if len(layout) else 0
    tables, rows = [layout], [rows_of_layout]
    for split in sorted(pc.unique(splits).to_pylist()):
        mine = np.flatnonzero(np.asarray(pc.equal(splits, split))[video_rows])
        shard_of, next_shard = _pack(span_chunks[mine], target=target, first_shard=next_shard)
        tables.append(
            pa.table(
                [
                    pa.array(shard_of, pa.int32()),
                    pa.repeat(split, len(mine)),
                    video_ids.take(pa.array(video_rows[mine])),
                    pa.array(span_index[mine], pa.int32()),
                ],
                schema=LAYOUT,
            )
        )
        rows.append(video_rows[mine])
    extended = pa.concat_tables(tables).combine_chunks()
    wanted = np.concatenate([wanted, np.arange(len(layout), len(extended))])
    return ExtendedLayout(extended, np.concatenate(rows), wanted)


def wanted_rows(
    layout: pa.Table, *, video_rows: np.ndarray, splits: pa.Array, num_chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `wanted_spans` for videos with the given numbers of chunks, int64."""
    num_spans = num_chunks // SPAN_CHUNKS + (num_chunks % SPAN_CHUNKS > 0)
    return wanted_spans(layout, video_rows=video_rows, splits=splits, num_spans=num_spans)


def shards_of_moved_videos(
    layout: pa.Table, *, video_rows: np.ndarray, splits: pa.Array, stored: Collection[int]
) -> dict[int, bool]:
    """Find the shards that videos leave or enter because their split has changed.

    Args:
        layout: table with schema LAYOUT, with the shards that they enter.
        video_rows: result of `clipmill.prep.core.tables.video_rows_of`.
        splits: splits of the videos, in manifest order.
        stored: ids of the shards that were written.

    Returns:
        shard id -> whether all of its videos do.
    """
    is_known = video_rows >= 0
    has_other_split = np.zeros(len(layout), bool)
    has_other_split[is_known] = np.asarray(
        pc.not_equal(as_array(layout["split"]).filter(pa.array(is_known)), splits.take(pa.array(video_rows[is_known])))
    )
    if not has_other_split.any():
        return {}
    shards, shard_of_row = np.unique(np.asarray(layout["shard_id"]), return_inverse=True)
    leaves = has_other_split & np.isin(shards, list(stored))[shard_of_row]
    enters = is_known & ~has_other_split & np.isin(video_rows, video_rows[leaves])
    num_moved = np.bincount(shard_of_row, weights=leaves | enters, minlength=len(shards))
    is_whole = num_moved == np.bincount(shard_of_row, minlength=len(shards))
    return dict(zip(shards[num_moved > 0].tolist(), is_whole[num_moved > 0].tolist(), strict=True))


def video_layout_of_commits(
    data_dir: Path, settings: ChunkSettings, *, video_ids: pa.Array, cutting: Cutting
) -> pa.Table:
    """Rebuild the layout (schema LAYOUT) for the recipe's chunks from all variants that share it.

    Args:
        video_ids: ids of the manifest's videos, in its order.
        cutting: chunks of these videos. With `--cut shots`, chunks that are not among them are left out.
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
        of_rows = span_indexes(ids, index["start_ms"].to_numpy()).tolist()
        both = zip(ids.to_pylist(), of_rows, strict=True)
        return list(dict.fromkeys(span for span in both if span[1] >= 0))

    def span_of_failure(failure: Failure) -> SpanId | None:
        if failure.key is None:
            return None
        start_ms = int(failure.key.rpartition("_")[2])
        found = int(span_indexes(pa.array([failure.video_id], pa.string()), np.array([start_ms]))[0])
        return (failure.video_id, found) if found >= 0 else None

    def shares_layout(variant: Variant) -> bool:
        try:
            other = COLUMN.stored_settings(variant.recipe).settings()
        except UserError:
            return False
        return (layout_file(other), other.fps_exact) == (layout_file(settings), settings.fps_exact)

    variants = [variant for variant in variants_of(data_dir, VIDEO) if shares_layout(variant)]
    return layout_of_commits(variants, video_ids, spans=spans, span_of_failure=span_of_failure)


def _pack(span_chunks: np.ndarray, *, target: int, first_shard: int) -> tuple[np.ndarray, int]:
    """Fill shards one after another with up to `target` chunks; return (shard of each span, next free shard id)."""
    behind = np.cumsum(span_chunks)
    begins, begin = [], 0
    while begin < len(behind):
        begins.append(begin)
        most = behind[begin] - span_chunks[begin] + target
        begin = max(begin + 1, int(np.searchsorted(behind, most, side="right")))
    sizes = np.diff([*begins, len(behind)])
    return first_shard + np.repeat(np.arange(len(begins)), sizes), first_shard + len(begins)
