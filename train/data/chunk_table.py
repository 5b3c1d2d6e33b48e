"""Chunks of the `video` column as arrays, ordered by video and start, and finding the chunks of moments."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.shards.chunk_table import Moments, order_of, read_chunk_rows
from clipmill.shards.reader import Variant
from clipmill.train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes
from clipmill.train.data.node_cache import scratch

_INDEX_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den")
CHUNK_COLUMNS = (*_INDEX_COLUMNS, "shard", "row", "crc32")


@dataclass(frozen=True)
class ChunkTable:
    """Chunks ordered by (video row, start); one entry of each array per chunk, int32 or int64.

    Attributes:
        video_row: row of the chunk's video in the list of videos.
        shard: id of its shard.
        row: row of the chunk in that shard.
        crc32: of the chunk's bytes.
    """

    video_row: NDArray[Any]
    start_ms: NDArray[np.int64]
    num_frames: NDArray[Any]
    fps_num: NDArray[Any]
    fps_den: NDArray[Any]
    shard: NDArray[Any]
    row: NDArray[Any]
    crc32: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.video_row)

    @property
    def end_us(self) -> NDArray[np.int64]:
        """Where the last frame of each chunk leaves the screen, rounded up to a microsecond."""
        return self.end_us_of(slice(None))

    def end_us_of(self, chunks: NDArray[np.integer] | slice) -> NDArray[np.int64]:
        """`end_us` of some chunks.

        Rounded down, a span of whole frames would be a little too short, and its moments a frame too early.
        """
        columns = (getattr(self, name)[chunks] for name in _INDEX_COLUMNS)
        start_ms, num_frames, fps_num, fps_den = (column.astype(np.int64) for column in columns)
        return start_ms * 1000 - -num_frames * fps_den * US_PER_S // fps_num

    @property
    def gaps(self) -> NDArray[np.bool_]:
        """True for each chunk that does not directly follow another one of its video."""
        return _gaps(self, self.end_us)

    def of_videos(self, low: int, high: int) -> tuple[int, "ChunkTable"]:
        """The chunks of the videos [low, high), as views, and the index of the first of them."""
        begin, end = np.searchsorted(self.video_row, np.array([low, high], self.video_row.dtype)).tolist()
        return begin, ChunkTable(**{one.name: getattr(self, one.name)[begin:end] for one in fields(self)})

    def search(self) -> "ChunkSearch":
        """Arrays for finding many chunks."""
        return ChunkSearch(self)

    def times(self, chunk: int) -> ChunkTimes:
        """Position of a chunk in its video."""
        return ChunkTimes(**{name: int(getattr(self, name)[chunk]) for name in _INDEX_COLUMNS})


def _gaps(table: ChunkTable, end_us: NDArray[np.int64]) -> NDArray[np.bool_]:
    gaps = np.ones(len(table), dtype=bool)
    same_video = table.video_row[1:] == table.video_row[:-1]
    gaps[1:] = ~same_video | (table.start_ms[1:] * 1000 > end_us[:-1] + START_ROUNDING_US)
    return gaps


class ChunkSearch:
    """Finds the chunks of moments; holds 24 bytes per chunk.

    Attributes:
        end_us: of each chunk.
        num_gaps: number of chunks so far that do not directly follow another one of their video.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._video_row = table.video_row
        self._moments = Moments.of(table.video_row, table.start_ms)
        self._starts = self._moments.numbers(table.video_row, table.start_ms)
        self.end_us: NDArray[np.int64] = table.end_us
        self.num_gaps: NDArray[np.int64] = np.cumsum(_gaps(table, self.end_us))

    def last_started(self, video_row: NDArray[np.int64], at_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each (video, time) the last chunk that has started; -1 or another video's chunk if none has."""
        return np.searchsorted(self._starts, self._moments.numbers(video_row, at_ms), side="right") - 1

    def last_of(self, video_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each video its last chunk; -1 or another video's chunk if it has none."""
        return np.searchsorted(self._video_row, video_row.astype(self._video_row.dtype), side="right") - 1


def chunk_table(variant: Variant, video_ids: pa.Array) -> tuple[ChunkTable, frozenset[int] | None]:
    """Collect the chunks of the videos `video_ids` of a variant, and its shards with open GOPs, None if unknown.

    Raises:
        Damaged: a file is not an index of chunks, or the merged table differs from its checksums.
        OSError: it cannot be read.
    """
    found_rows = read_chunk_rows(variant, columns=("video_id", *CHUNK_COLUMNS))
    entries, codes = found_rows.dictionary_codes("video_id")
    arrays = {name: column_of(found_rows.table[name]) for name in CHUNK_COLUMNS}
    video_row = index_in(entries, video_ids).astype(np.int32)[codes]
    found, order = own_in_order(video_row, arrays["start_ms"])
    if found is not None or order is not None:
        rows = found if order is None else order if found is None else found[order]
        video_row, arrays = video_row[rows], {name: array[rows] for name, array in arrays.items()}
    return ChunkTable(video_row=video_row, **arrays), found_rows.open_gops


def column_of(column: pa.ChunkedArray) -> NDArray[Any]:
    """The values of a column without nulls: a view of a single chunk, or a scratch array."""
    parts = [chunk.to_numpy() for chunk in column.chunks]
    if len(parts) == 1:
        return parts[0]
    kind = column.type.to_pandas_dtype()
    return np.concatenate(parts, out=scratch(len(column), kind)) if parts else np.empty(0, kind)


def own_in_order(
    video_row: NDArray[np.integer], start_ms: NDArray[np.integer]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """The rows with a video (not -1), None for all; and their order by video and start, None if they are in it."""
    found = None if bool((video_row >= 0).all()) else np.flatnonzero(video_row >= 0)
    rows: Any = slice(None) if found is None else found
    return found, order_of(video_row[rows], start_ms[rows])


def rows_of(values: pa.ChunkedArray, among: pa.Array) -> NDArray[np.int64]:
    """Index of each value in `among`, -1 if missing; the entries of a dictionary are looked up once."""
    pieces = [np.empty(0, np.int64)]
    looked_up: tuple[pa.Array, NDArray[np.int64]] | None = None
    for piece in values.chunks:
        if pa.types.is_dictionary(piece.type):
            if looked_up is None or not looked_up[0].equals(piece.dictionary):
                looked_up = piece.dictionary, index_in(piece.dictionary, among)
            pieces.append(looked_up[1][piece.indices.to_numpy(zero_copy_only=False)])
        else:
            pieces.append(index_in(piece, among))
    return np.concatenate(pieces)


def index_in(values: pa.Array, among: pa.Array) -> NDArray[np.int64]:
    """Index of each value in `among`, -1 if missing. Hashes all of `among`."""
    return pc.fill_null(pc.index_in(values, value_set=among), -1).to_numpy(zero_copy_only=False).astype(np.int64)
