"""What the manifest wants of a recipe, from what is stored alone: no source is looked at, nothing is planned.

It serves commands that look after a shard set. A plan (prep.video.planning) also sees sources that have changed.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prep.core.layout import layout_path, read_layout, wanted_rows
from prep.video.settings import ChunkSettings
from prep.video.spans import num_chunks_of, num_output_frames


@dataclass(frozen=True)
class Wanted:
    """Chunks and shards that the manifest wants.

    Attributes:
        num_chunks: of all videos whose probe is known.
        shard_ids: of the layout, with anything in them that is wanted. A video that was not probed yet counts as long.
    """

    num_chunks: int
    shard_ids: frozenset[int]


def wanted(data_dir: Path, settings: ChunkSettings, *, videos: pa.Table, probes: pa.Table) -> Wanted:
    """What `videos` (manifests.schema.VIDEOS) make, as far as `probes` (prep.video.sources.PROBES) know them.

    Raises:
        UserError: the layout is damaged.
    """
    rows = np.asarray(pc.fill_null(pc.index_in(videos["path"].combine_chunks(), value_set=probes["path"]), -1))
    is_known = rows >= 0
    ends_s = probes["end_s"].take(pa.array(rows[is_known])).combine_chunks()
    is_usable = np.asarray(pc.is_valid(probes["fingerprint"].take(pa.array(rows[is_known]))))
    frames = num_output_frames(np.asarray(pc.fill_null(ends_s, 0.0)), fps=settings.fps_exact)
    num_chunks = np.zeros(len(videos), np.int64)
    num_chunks[is_known] = num_chunks_of(
        np.where(is_usable, frames, 0), chunk_frames=settings.chunk_frames, tail=settings.tail
    )
    layout = read_layout(layout_path(data_dir, settings))
    ids, splits = videos["video_id"].combine_chunks(), videos["split"].combine_chunks()
    for_ever = np.where(is_known, num_chunks, np.iinfo(np.int64).max)
    layout_rows, _ = wanted_rows(layout, video_ids=ids, splits=splits, num_chunks=for_ever)
    return Wanted(
        num_chunks=int(num_chunks.sum()),
        shard_ids=frozenset(np.asarray(layout["shard_id"])[layout_rows].tolist()),
    )
