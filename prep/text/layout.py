"""The layout of `text`: the assignment of videos to shards.

An assignment never changes: adding videos does not move existing ones. The layout is stored in
`<data>/layout/text.parquet` and shared by all text towers. The table has the same schema as that of `video`
(clipmill.prep.core.layout), with a single span per video. Only videos with captions are in it.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.prep.core.layout import (
    LAYOUT,
    LAYOUT_FOLDER,
    SpanId,
    layout_of_commits,
    variants_of,
    video_rows_of,
    wanted_spans,
)
from clipmill.prep.text.recipe import TEXT

LAYOUT_FILE = f"{TEXT}.parquet"

MAX_SHARD_VIDEOS = 4096
MAX_SHARD_CAPTIONS = 65_536  # about 100 MB; a video with more captions has its own shard


def text_layout_path(data_dir: Path) -> Path:
    """Return the path of the layout."""
    return data_dir / LAYOUT_FOLDER / LAYOUT_FILE


def extend_text_layout(
    layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_captions: np.ndarray
) -> pa.Table:
    """Assign every video with captions that has no shard yet; new videos go into new shards, one split after another.

    Args:
        layout: table with schema clipmill.prep.core.layout.LAYOUT.
        video_ids: ids of the videos, in manifest order.
        splits: splits of the videos, in the same order.
        num_captions: number of captions of each video, int.

    Returns:
        `layout` with the new rows appended; `layout` itself if there are none.
    """
    _, video_rows = wanted_text_rows(layout, video_ids=video_ids, splits=splits, num_captions=num_captions)
    is_new = num_captions > 0
    is_new[video_rows] = False
    next_shard = pc.max(layout["shard_id"]).as_py() + 1 if len(layout) else 0
    added = []
    for split in sorted(pc.unique(splits.filter(pa.array(is_new))).to_pylist()):
        of_split = np.flatnonzero(is_new & np.asarray(pc.equal(splits, split)))
        shard_ids = next_shard + _packed(num_captions[of_split])
        next_shard = int(shard_ids[-1]) + 1
        columns = [
            pa.array(shard_ids, pa.int32()),
            pa.repeat(split, len(of_split)),
            video_ids.take(pa.array(of_split)),
            pa.array(np.zeros(len(of_split)), pa.int32()),
        ]
        added.append(pa.table(columns, schema=LAYOUT))
    return pa.concat_tables([layout, *added]).combine_chunks() if added else layout


def wanted_text_rows(
    layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_captions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `layout` whose video is in the manifest with captions and the same split.

    The second array holds the row of the video for each of them.
    """
    rows = video_rows_of(layout, video_ids)
    return wanted_spans(layout, video_rows=rows, splits=splits, num_spans=(num_captions > 0).astype(np.int64))


def text_layout_of_commits(data_dir: Path, *, video_ids: pa.Array) -> pa.Table:
    """Rebuild the layout (schema LAYOUT) of `text` from the commits; each video is a single span."""

    def spans(index: pa.Table) -> list[SpanId]:
        return [(video_id, 0) for video_id in index["video_id"].to_pylist()]

    return layout_of_commits(
        list(variants_of(data_dir, TEXT)),
        video_ids,
        spans=spans,
        span_of_failure=lambda failure: (failure.video_id, 0),
    )


def _packed(num_captions: np.ndarray) -> np.ndarray:
    """Fill shards one after another; return the shard number of each video, counted from 0."""
    shard_of = np.empty(len(num_captions), np.int64)
    shard = num_videos = held = 0
    for row, captions in enumerate(num_captions.tolist()):
        if num_videos == MAX_SHARD_VIDEOS or (num_videos and held + captions > MAX_SHARD_CAPTIONS):
            shard, num_videos, held = shard + 1, 0, 0
        shard_of[row] = shard
        num_videos, held = num_videos + 1, held + captions
    return shard_of
