"""Which span goes into which shard. An assignment, once made, stands: adding videos never moves what is there.

The layout lies in `<data>/layout/<len>-<tail>.parquet` and serves every recipe with that chunk length, so that
variants of a column have the same shards. New spans go into new shards, in manifest order, split by split.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import UserError
from prep.core.arrays import as_array
from prep.core.table_file import read_table_file, write_table_file
from prep.video.recipe import SPAN_CHUNKS
from prep.video.settings import ChunkSettings

LAYOUT_FOLDER = "layout"
MAX_SHARD_CHUNKS = 256  # about half a gigabyte at the default recipe
MIN_SHARDS = 16  # a small set still gives every core of a server something to do

LAYOUT = pa.schema(
    [
        pa.field("shard_id", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("video_id", pa.string(), nullable=False),
        pa.field("span_index", pa.int32(), nullable=False),
    ]
)


def layout_path(data_dir: Path, settings: ChunkSettings) -> Path:
    """Where the layout for the recipe's chunk length lies."""
    return data_dir / LAYOUT_FOLDER / f"{settings.len}-{settings.tail}.parquet"


class DamagedLayout(UserError):
    """The file of a layout is damaged."""

    def __init__(self, path: Path, why: str) -> None:
        command = "prep text" if path.name == "text.parquet" else "prep chunk"
        super().__init__(
            f"the layout {path} is damaged: {why}",
            hint=f"run `{command}` again with the settings of before: it makes the layout anew from the commits",
        )


def read_layout(path: Path) -> pa.Table:
    """The layout at `path`, empty where there is none yet.

    Raises:
        DamagedLayout: the file is damaged.
    """
    try:
        return read_table_file(path, schema=LAYOUT)
    except FileNotFoundError:
        return LAYOUT.empty_table()
    except ValueError as error:
        raise DamagedLayout(path, str(error)) from None


def stored_or_rebuilt_layout(path: Path, rebuild: Callable[[], pa.Table]) -> pa.Table:
    """The layout at `path`, or what `rebuild` finds in the commits where the file is damaged or missing."""
    try:
        if path.exists():
            return read_layout(path)
        layout, why = rebuild(), f"the layout {path} is missing"
    except DamagedLayout as damage:
        layout, why = rebuild(), str(damage)
    if len(layout):
        sys.stderr.write(f"{why}; taken from the commits instead\n")
    return layout


def write_layout(path: Path, layout: pa.Table) -> None:
    """Publishes the layout, unless it is there already; done before any work that relies on it."""
    try:
        if path.exists() and read_layout(path).equals(layout):
            return
    except DamagedLayout:
        pass  # replaced by the one that was rebuilt
    path.parent.mkdir(exist_ok=True)
    write_table_file(path, layout)


def extend_layout(layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_chunks: np.ndarray) -> pa.Table:
    """Assigns every span of the given videos that has no shard yet.

    Args:
        layout: schema LAYOUT.
        video_ids: of the videos, in manifest order.
        splits: of the videos, same order.
        num_chunks: chunks of each video (0 for one that cannot be used), int64.

    Returns:
        `layout` with new rows at its end; itself when nothing is new.
    """
    spans_per_video = -(-num_chunks // SPAN_CHUNKS)
    video_rows = np.repeat(np.arange(len(num_chunks)), spans_per_video)
    first = np.cumsum(spans_per_video) - spans_per_video
    span_index = np.arange(len(video_rows)) - first[video_rows]
    span_chunks = np.minimum(num_chunks[video_rows] - span_index * SPAN_CHUNKS, SPAN_CHUNKS)
    is_new = ~np.isin(_codes(video_rows, span_index), _assigned_codes(layout, video_ids=video_ids, splits=splits))
    if not is_new.any():
        return layout
    target = int(np.clip(-(-span_chunks[is_new].sum() // MIN_SHARDS), SPAN_CHUNKS, MAX_SHARD_CHUNKS))
    next_shard = pc.max(layout["shard_id"]).as_py() + 1 if len(layout) else 0
    added = []
    for split in sorted(pc.unique(splits).to_pylist()):
        mine = np.flatnonzero(is_new & np.asarray(pc.equal(splits, split))[video_rows])
        shard_of, next_shard = _pack(span_chunks[mine], target=target, first_shard=next_shard)
        added.append(
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
    return pa.concat_tables([layout, *added]).combine_chunks()


def wanted_rows(
    layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `layout` whose span is wanted still, in layout order, and for each the row of its video.

    A span is wanted while its video is in the manifest with the shard's split, and long enough to have it.
    """
    if not len(layout):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    video_rows = _video_rows(layout, video_ids=video_ids)
    known = video_rows >= 0
    same_split = np.zeros(len(layout), bool)
    same_split[known] = np.asarray(
        pc.equal(as_array(layout["split"]).filter(pa.array(known)), splits.take(pa.array(video_rows[known])))
    )
    exists = np.zeros(len(layout), bool)
    exists[known] = np.asarray(layout["span_index"])[known] * SPAN_CHUNKS < num_chunks[video_rows[known]]
    rows = np.flatnonzero(same_split & exists)
    return rows, video_rows[rows]


def _assigned_codes(layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array) -> np.ndarray:
    everything = np.full(len(video_ids), np.iinfo(np.int64).max)
    rows, video_rows = wanted_rows(layout, video_ids=video_ids, splits=splits, num_chunks=everything)
    return _codes(video_rows, np.asarray(layout["span_index"])[rows])


def _video_rows(layout: pa.Table, *, video_ids: pa.Array) -> np.ndarray:
    found = pc.index_in(as_array(layout["video_id"]), value_set=video_ids)
    return np.asarray(pc.fill_null(found, -1)).astype(np.int64)


def _codes(video_rows: np.ndarray, span_index: np.ndarray) -> np.ndarray:
    return video_rows.astype(np.int64) << 32 | span_index.astype(np.int64)


def _pack(span_chunks: np.ndarray, *, target: int, first_shard: int) -> tuple[np.ndarray, int]:
    """Fills shards one after another up to `target` chunks; (shard of each span, next free shard id)."""
    shard_of = np.empty(len(span_chunks), np.int64)
    shard, held = first_shard, 0
    for row, chunks in enumerate(span_chunks.tolist()):
        if held and held + chunks > target:
            shard, held = shard + 1, 0
        shard_of[row] = shard
        held += chunks
    return shard_of, shard + 1 if held else shard
