"""Chunks of the `video` column: their videos, times and shards as arrays, some tens of megabytes for a million."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.keys import chunk_key
from manifests.store import manifest_dir, read_manifest, read_videos
from shards.chunk_table import ChunkRows, open_chunk_table
from shards.damage import Damaged, DamagedIndex
from shards.merged_table import merged_mark
from shards.reader import CommittedShard, Variant
from train.data.decoding.decoders import ChunkDecoder
from train.data.decoding.reading import ChunkBytes, DecodeRule, read_chunk
from train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes
from train.data.node_cache import shared
from train.data.remote import RemoteTars
from train.data.selection import Selection

# Video and start are searched as one number; no video lasts 2**40 ms (35 years).
_MS_PER_VIDEO = 1 << 40
_INDEX_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den")
_COLUMNS = (*_INDEX_COLUMNS, "shard", "row", "crc32")


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
        self._starts = table.video_row.astype(np.int64) * _MS_PER_VIDEO + table.start_ms
        self.end_us: NDArray[np.int64] = table.end_us
        self.num_gaps: NDArray[np.int64] = np.cumsum(_gaps(table, self.end_us))

    def last_started(self, video_row: NDArray[np.int64], at_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each (video, time) the last chunk that has begun; -1 or another video's chunk if none has."""
        return np.searchsorted(self._starts, video_row * _MS_PER_VIDEO + at_ms, side="right") - 1

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
        codes, arrays = coded.indices.to_numpy(), {name: table[name].to_numpy() for name in _COLUMNS}
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
    keys = video_row[rows].astype(np.int64) * _MS_PER_VIDEO + start_ms[rows]
    is_sorted = bool((keys[1:] >= keys[:-1]).all())
    return found, None if is_sorted else np.argsort(keys, kind="stable")


def _indexes(shards: Sequence[CommittedShard]) -> Iterator[tuple[int, pa.Table]]:
    for shard in shards:
        if missing := {"video_id", "mp4_crc32", *_INDEX_COLUMNS}.difference(shard.index.column_names):
            raise DamagedIndex(shard.index_path, f"not an index of chunks: it has no {', '.join(sorted(missing))}")
        yield shard.shard_id, shard.index


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


def videos_of_split(data_dir: Path, split: str) -> pa.Array:
    """Ids of the videos of a split; raises UserError if there are none."""
    videos = read_videos(data_dir)
    of_split = videos.filter(pc.equal(videos["split"], split))
    if not of_split.num_rows:
        splits = ", ".join(sorted(set(videos["split"].to_pylist()))) or "none, the manifest is empty"
        raise UserError(
            f"{data_dir} has no videos of split {split!r}",
            hint=f"splits of this manifest: {splits}; choose one with --split",
        )
    return of_split["video_id"].combine_chunks()


@dataclass(frozen=True)
class _OpenedChunks:
    """The videos of a split and their chunks.

    Attributes:
        table: None if it is the merged table of the variant: all of it, in its order.
    """

    video_ids: pa.Array
    table: ChunkTable | None


def _open_chunks(variant: Variant, data_dir: Path, *, split: str) -> _OpenedChunks:
    video_ids = videos_of_split(data_dir, split)
    try:
        table = chunk_table(variant, video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint="see prep verify; prep chunk makes that shard again") from error
    merged = open_chunk_table(variant)
    is_merged = merged is not None and len(table) == len(merged.table) and _is_same(table, _views(merged))
    return _OpenedChunks(video_ids, None if is_merged else table)


def _views(merged: ChunkRows | None) -> ChunkTable:
    """The merged table as it is mapped."""
    assert merged is not None
    columns = {name: merged.table[name].to_numpy() for name in _COLUMNS}
    return ChunkTable(video_row=merged.table["video_id"].chunk(0).indices.to_numpy(), **columns)


def _is_same(table: ChunkTable, other: ChunkTable) -> bool:
    return all(np.array_equal(getattr(table, one.name), getattr(other, one.name)) for one in fields(ChunkTable))


def manifest_mark(data_dir: Path) -> tuple[object, ...]:
    """What is read of the manifest depends on: its fingerprint, and the checksums of its tables."""
    manifest = read_manifest(data_dir)
    tables = manifest.get("tables") or [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(manifest_dir(data_dir).iterdir())
    ]
    return manifest["fingerprint"], repr(tables)


class ChunkSet:
    """The chunks of a split in the `video` column: reading and decoding them. Thread-safe.

    Args:
        rule: how frames are decoded.
        tars: reads the tars, if they are not in `data_dir`.
        where: an expression that selects samples (shards.where); None for all.
        has_captions: whether these have captions.

    Attributes:
        video_ids: the videos of the split.
        table: the chunks; a chunk's video row is a row of `video_ids`.
        selection: what `where` selects. The table has all chunks nevertheless.
        decoder: decodes what was read.
        num_readers: threads that read ahead of those that decode; 0 for a local folder, where these read too.

    Raises:
        UserError: there is no such data folder, it has no shards, the split has no videos, or `where` is not an
            expression, selects nothing, or uses scores that chunks lack.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        split: str,
        rule: DecodeRule,
        tars: RemoteTars | None = None,
        where: str | None = None,
        has_captions: bool = False,
    ) -> None:
        if not data_dir.is_dir():
            raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made: --shards DIR")
        self._variant = Variant.open(data_dir, tars=tars).whole()
        self.variant_name = self._variant.directory.name
        self.rule = rule
        self.tars = tars
        self.num_readers: int = 0 if tars is None else tars.num_readers
        self.decoder = ChunkDecoder()
        self.videos: tuple[object, ...] = (split, *manifest_mark(data_dir))
        self.depends_on: tuple[object, ...] = (
            *self.videos,
            *merged_mark(self._variant.directory, self._variant.commits),
        )
        self.num_rows: int = self._variant.num_samples
        opened = shared(
            lambda: _open_chunks(self._variant, data_dir, split=split),
            of=self.depends_on,
            num_rows=self.num_rows,
            types=(_OpenedChunks, ChunkTable),
            column="chunks",
        )
        self.video_ids: pa.Array = opened.video_ids
        self._merged = open_chunk_table(self._variant)
        self.table: ChunkTable = opened.table if opened.table is not None else _views(self._merged)
        self.selection: Selection = Selection(
            where,
            data_dir,
            split=split,
            video_ids=self.video_ids,
            video_row=self.table.video_row,
            start_ms=self.table.start_ms,
            has_captions=has_captions,
            tars=tars,
            depends_on=self.depends_on,
        )

    def key(self, chunk: int) -> str:
        """Key of a chunk."""
        video_id = self.video_ids[int(self.table.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self.table.start_ms[chunk]))

    def read(self, chunk: int, frames: Collection[int]) -> ChunkBytes:
        """Read the bytes needed to decode `frames` of a chunk; raises SampleFailed if they cannot be read."""
        shard, row = self._variant.shard(int(self.table.shard[chunk])), int(self.table.row[chunk])
        return read_chunk(shard, row, frames, rule=self.rule, key=self.key(chunk))

    def describe(self) -> str:
        """Which shards are not decoded by the rule; empty if all are."""
        if not self._num_open:
            return ""
        return f"{self._num_open} of {self._variant.num_shards} shards decoded through the container: open GOPs"

    @cached_property
    def _num_open(self) -> int:
        """Number of shards whose first chunk cannot be decoded from packets; a shard's chunks share a recipe."""
        if self.rule != "packets":
            return 0
        if self._merged is not None:
            return len(self._merged.open_gops)
        return sum(not _has_closed_gops(shard) for shard in self._variant.shards())


def _has_closed_gops(shard: CommittedShard) -> bool:
    try:
        return shard.packet_tables.has_closed_gops(0)
    except (OSError, Damaged, ValueError):
        return True  # reading the chunk reports the damage


def evenly_of_each(videos: NDArray[np.int64], *, at_most: int) -> NDArray[np.int64]:
    """Rows of at most `at_most` samples of each video, spread evenly; `videos` are those of the samples, ascending."""
    _, first, count = np.unique(videos, return_index=True, return_counts=True)
    count, number = np.repeat(count, count), np.arange(len(videos)) - np.repeat(first, count)
    wanted = np.minimum(count, at_most)
    return np.flatnonzero((number + 1) * wanted // count > number * wanted // count)
