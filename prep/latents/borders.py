"""Which chunk follows each chunk: a segment of a VAE of videos ends with the first frame of the next chunk.

The next chunk may be in another shard. It may also be missing, because encoding it failed or `prep chunk` is still
running; the chunk before it is then encoded as at the end of a video, and anew once there is a next one.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipmill.prep.core.chunk_input import FINGERPRINT_COLUMNS, chunk_fingerprints
from clipmill.prep.core.chunk_shards import ChunkShard
from clipmill.prep.latents.chunk_reader import Following
from clipmill.shards.commits import Commit
from clipmill.shards.damage import DamagedIndex
from clipmill.shards.index import open_index

_COLUMNS = [*FINGERPRINT_COLUMNS, "video_id", "start_ms", "num_frames", "fps_num", "fps_den", "width", "height"]


@dataclass(frozen=True)
class Borders:
    """What follows the wanted chunks of a shard.

    Attributes:
        following: shard and row of the next chunk, by row of the chunk that it follows.
        lengths: number of chunks by (number of frames, frame rate, whether there is a next one).
    """

    following: Following
    lengths: Counter[tuple[int, Fraction, bool]]


def with_borders(
    shards: list[ChunkShard], video_dir: Path, commits: Mapping[int, Commit]
) -> tuple[list[ChunkShard], dict[int, Borders]]:
    """Return the shards with fingerprints that cover the next chunks too, and by shard id what follows their chunks."""
    indexes: dict[int, pa.Table] = {}
    for shard_id, commit in commits.items():
        with suppress(DamagedIndex, OSError):  # reported by `read_chunk_shards`
            if commit.files is not None:
                indexes[shard_id] = open_index(video_dir / commit.files.index, columns=_COLUMNS)
    following = following_chunks(indexes)
    fingerprints = {shard_id: chunk_fingerprints(index) for shard_id, index in indexes.items()}
    covering, borders = [], {}
    for shard in shards:
        index, own = indexes[shard.shard_id], following.get(shard.shard_id, {})
        rows = range(len(index)) if shard.rows is None else shard.rows
        digest = hashlib.sha256(shard.fingerprint.encode())
        for row in rows:
            digest.update(fingerprints[own[row][0]][own[row][1]].encode() if row in own else b"-")
        covering.append(replace(shard, fingerprint=digest.hexdigest()))
        numbers = zip(*(index[name].to_pylist() for name in ("num_frames", "fps_num", "fps_den")), strict=True)
        lengths = [(frames, Fraction(num, den)) for frames, num, den in numbers]
        borders[shard.shard_id] = Borders(
            {row: own[row] for row in rows if row in own}, Counter((*lengths[row], row in own) for row in rows)
        )
    return covering, borders


def following_chunks(indexes: Mapping[int, pa.Table]) -> dict[int, dict[int, tuple[int, int]]]:
    """Return for each shard the next chunk of each of its rows that has one: of the same video, without a gap."""
    if not indexes:
        return {}
    video = pa.chunked_array([index["video_id"].combine_chunks() for index in indexes.values()])
    video_row = video.dictionary_encode().combine_chunks().indices.to_numpy()
    columns = {
        name: np.concatenate([index[name].to_numpy() for index in indexes.values()]).astype(np.int64)
        for name in ("start_ms", "num_frames", "fps_num", "fps_den", "width", "height")
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
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for one, other in zip(first[is_next].tolist(), second[is_next].tolist(), strict=True):
        found.setdefault(int(shard[one]), {})[int(row[one])] = int(shard[other]), int(row[other])
    return found
