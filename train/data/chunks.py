"""Where the chunks of every video lie, as arrays: a million chunks are a few ten megabytes."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.damage import DamagedIndex
from shards.reader import CommittedShard
from train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes

# Video row and start are searched as one number; no video lasts 2**40 ms (35 years).
_MS_OF_ONE_VIDEO = 1 << 40
_OF_INDEX = ("start_ms", "num_frames", "fps_num", "fps_den")


@dataclass(frozen=True)
class ChunkTable:
    """Chunks ordered by (row of the video, start); one entry of each array a chunk.

    Attributes:
        shard: position in the list of shards that the table was made from.
        row: of the chunk in that shard.
    """

    video_row: NDArray[np.int64]
    start_ms: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    fps_num: NDArray[np.int64]
    fps_den: NDArray[np.int64]
    shard: NDArray[np.int64]
    row: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.video_row)

    @property
    def end_us(self) -> NDArray[np.int64]:
        """Where the last frame of each chunk leaves the screen, rounded up to a microsecond.

        Rounded down, a span of whole frames would be a little short of them, and its moments a frame early.
        """
        return self.start_ms * 1000 - -self.num_frames * self.fps_den * US_PER_S // self.fps_num

    @property
    def gaps(self) -> NDArray[np.bool_]:
        """True for a chunk of whose video something is missing between it and the chunk before."""
        gaps = np.ones(len(self), dtype=bool)
        same_video = self.video_row[1:] == self.video_row[:-1]
        gaps[1:] = ~same_video | (self.start_ms[1:] * 1000 > self.end_us[:-1] + START_ROUNDING_US)
        return gaps

    def last_started(self, video_row: NDArray[np.int64], at_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each (video, time) the last chunk that has begun; -1 or another video's chunk where none has."""
        starts = self.video_row * _MS_OF_ONE_VIDEO + self.start_ms
        return np.searchsorted(starts, video_row * _MS_OF_ONE_VIDEO + at_ms, side="right") - 1

    def last_of(self, video_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each video its last chunk; -1 or another video's chunk where it has none."""
        return np.searchsorted(self.video_row, video_row, side="right") - 1

    def times(self, chunk: int) -> ChunkTimes:
        """Place of one chunk in its video."""
        return ChunkTimes(
            start_ms=int(self.start_ms[chunk]),
            num_frames=int(self.num_frames[chunk]),
            fps_num=int(self.fps_num[chunk]),
            fps_den=int(self.fps_den[chunk]),
        )


def chunk_table(shards: list[CommittedShard], video_ids: pa.Array) -> ChunkTable:
    """Gathers the chunks of the videos `video_ids` from the indexes of `shards`; a video's row is its place there.

    Raises:
        DamagedIndex: a file is no index of chunks.
        OSError: it cannot be read.
    """
    names = ["video_row", "start_ms", "num_frames", "fps_num", "fps_den", "shard", "row"]
    parts: dict[str, list[NDArray[np.int64]]] = {name: [np.empty(0, np.int64)] for name in names}
    for number, shard in enumerate(shards):
        if missing := {"video_id", *_OF_INDEX}.difference(shard.index.column_names):
            raise DamagedIndex(shard.index_path, f"not an index of chunks: it has no {', '.join(sorted(missing))}")
        video_row = rows_of(shard.index["video_id"], video_ids)
        there = np.flatnonzero(video_row >= 0)
        parts["video_row"].append(video_row[there])
        parts["shard"].append(np.full(len(there), number))
        parts["row"].append(there)
        for name in _OF_INDEX:
            parts[name].append(shard.index[name].to_numpy().astype(np.int64)[there])
    arrays = {name: np.concatenate(part) for name, part in parts.items()}
    order = np.lexsort((arrays["start_ms"], arrays["video_row"]))
    return ChunkTable(**{name: array[order] for name, array in arrays.items()})


def rows_of(values: pa.ChunkedArray, among: pa.Array) -> NDArray[np.int64]:
    """Place of each value in `among`, -1 where it is not there; looks up a dictionary's entries once."""
    pieces = [np.empty(0, np.int64)]
    for piece in values.chunks:
        if pa.types.is_dictionary(piece.type):
            codes = piece.indices.to_numpy(zero_copy_only=False)
            pieces.append(_index_in(piece.dictionary, among)[codes])
        else:
            pieces.append(_index_in(piece, among))
    return np.concatenate(pieces)


def _index_in(values: pa.Array, among: pa.Array) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    return pc.fill_null(pc.index_in(values, value_set=among), -1).to_numpy(zero_copy_only=False).astype(np.int64)
