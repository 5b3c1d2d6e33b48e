"""Chunks of the `video` column as arrays, ordered by video and start, and finding the chunks of moments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.chunk_table import open_chunk_table
from shards.damage import DamagedIndex
from shards.moments import Moments, order_of
from shards.reader import CommittedShard, Variant
from train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes

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
        """The same of some chunks.

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
        """For each (video, time) the last chunk that has begun; -1 or another video's chunk if none has."""
        return np.searchsorted(self._starts, self._moments.numbers(video_row, at_ms), side="right") - 1

    def last_of(self, video_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each video its last chunk; -1 or another video's chunk if it has none."""
        return np.searchsorted(self._video_row, video_row.astype(self._video_row.dtype), side="right") - 1


def chunk_table(variant: Variant, video_ids: pa.Array) -> ChunkTable:
    """Collect the chunks of the videos `video_ids` of a variant, from its merged table or else from its indexes.

    Raises:
        Damaged: a file is not an index of chunks, or the merged table differs from its checksums.
        OSError: it cannot be read.
    """
    merged = open_chunk_table(variant)
    if merged is not None:
        table = merged.verified()
        coded = table["video_id"].chunk(0)
        codes, arrays = coded.indices.to_numpy(), {name: table[name].to_numpy() for name in CHUNK_COLUMNS}
        entries = coded.dictionary
    else:
        entries, codes, arrays = of_indexes(_indexes(variant.shards()), (*_INDEX_COLUMNS, "mp4_crc32"))
        arrays["crc32"] = arrays.pop("mp4_crc32").astype(np.uint32)
    video_row = index_in(entries, video_ids).astype(np.int32)[codes]
    found, order = own_in_order(video_row, arrays["start_ms"])
    if found is None and order is None:
        return ChunkTable(video_row=video_row, **arrays)
    rows = found if order is None else order if found is None else found[order]
    return ChunkTable(video_row=video_row[rows], **{name: array[rows] for name, array in arrays.items()})


def own_in_order(
    video_row: NDArray[np.integer], start_ms: NDArray[np.integer]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """The rows with a video (not -1), None for all; and their order by video and start, None if they are in it."""
    found = None if bool((video_row >= 0).all()) else np.flatnonzero(video_row >= 0)
    rows: Any = slice(None) if found is None else found
    return found, order_of(video_row[rows], start_ms[rows])


def _indexes(shards: Sequence[CommittedShard]) -> Iterator[tuple[int, pa.Table]]:
    for shard in shards:
        if missing := {"video_id", "mp4_crc32", *_INDEX_COLUMNS}.difference(shard.index.column_names):
            raise DamagedIndex(shard.index_path, f"not an index of chunks: it has no {', '.join(sorted(missing))}")
        yield shard.shard_id, shard.index
        shard.close()


def of_indexes(
    indexes: Iterator[tuple[int, pa.Table]], names: Sequence[str]
) -> tuple[pa.Array, NDArray[np.int32], dict[str, NDArray[Any]]]:
    """Columns of the indexes of shards, with `shard` and `row`; and `video_id` as entries and codes.

    Ids are collected as a dictionary and compared once by the caller: looking them up shard by shard would hash all
    videos again for each shard.
    """
    entries: list[pa.Array] = [pa.array([], pa.string())]
    num_entries = 0
    parts: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, np.int64)] for name in names}
    parts |= {name: [np.empty(0, np.int32)] for name in ("codes", "shard", "row")}
    for shard_id, index in indexes:
        coded = index["video_id"].combine_chunks().dictionary_encode()
        coded = coded.chunk(0) if isinstance(coded, pa.ChunkedArray) else coded
        # Copied, since a view would keep the index mapped.
        entries.append(pa.array(coded.dictionary.to_pylist(), pa.string()))
        parts["codes"].append(coded.indices.to_numpy() + np.int32(num_entries))
        num_entries += len(coded.dictionary)
        parts["shard"].append(np.full(index.num_rows, shard_id, np.int32))
        parts["row"].append(np.arange(index.num_rows, dtype=np.int32))
        for name in names:
            parts[name].append(index[name].to_numpy().astype(np.int64))
    arrays = {name: np.concatenate(parts.pop(name)) for name in list(parts)}
    return pa.concat_arrays(entries), arrays.pop("codes"), arrays


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
