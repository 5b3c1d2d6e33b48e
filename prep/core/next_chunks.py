"""Which chunk follows each chunk in its video, for columns whose samples depend on the next chunk too.

The next chunk may be in another shard. It may also be missing, because encoding it failed or `prep chunk` is still
running. The sample of the chunk before it is then made as at the end of a video, and again once there is a next one.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.prep.core.chunk_input import FINGERPRINT_COLUMNS, Following, NextChunk, chunk_fingerprints
from clipmill.shards.commits import Commit
from clipmill.shards.index import open_index
from clipmill.shards.opening import DamagedIndex

_NUMBERS = ("start_ms", "num_frames", "fps_num", "fps_den", "width", "height")
_COLUMNS = [*FINGERPRINT_COLUMNS, "video_id", *_NUMBERS]


def next_chunks(video_dir: Path, commits: Mapping[int, Commit]) -> dict[int, Following]:
    """Return for each shard the next chunk of each of its chunks that has one: of the same video, without a gap."""
    indexes: dict[int, pa.Table] = {}
    for shard_id, commit in commits.items():
        with suppress(DamagedIndex, OSError):  # reported by `read_chunk_shards`
            if commit.files is not None:
                indexes[shard_id] = open_index(video_dir / commit.files.index, columns=_COLUMNS)
    if not indexes:
        return {}
    contents = {shard_id: chunk_fingerprints(index) for shard_id, index in indexes.items()}
    video = pa.chunked_array([index["video_id"].combine_chunks() for index in indexes.values()])
    video_row = video.dictionary_encode().combine_chunks().indices.to_numpy()
    columns = {
        name: np.concatenate([index[name].to_numpy() for index in indexes.values()]).astype(np.int64)
        for name in _NUMBERS
    }
    shard = np.repeat([*indexes], [len(index) for index in indexes.values()])
    row = np.concatenate([np.arange(len(index)) for index in indexes.values()])
    order = np.lexsort((columns["start_ms"], video_row))
    first, second = order[:-1], order[1:]
    # A gap of less than a frame, and a millisecond for the rounding of both times.
    most_ms = (columns["num_frames"] + 1) * 1000 * columns["fps_den"] // columns["fps_num"] + 1
    is_next = (video_row[first] == video_row[second]) & (
        columns["start_ms"][second] - columns["start_ms"][first] <= most_ms[first]
    )
    for name in ("width", "height"):
        is_next &= columns[name][first] == columns[name][second]
    following: dict[int, dict[int, NextChunk]] = {}
    for chunk, after in zip(first[is_next].tolist(), second[is_next].tolist(), strict=True):
        shard_id, its_row = int(shard[after]), int(row[after])
        next_chunk = NextChunk(shard_id, its_row, contents[shard_id][its_row])
        following.setdefault(int(shard[chunk]), {})[int(row[chunk])] = next_chunk
    return {**following}
