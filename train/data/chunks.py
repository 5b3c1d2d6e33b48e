"""Chunks of the `video` column: their videos, times and shards as arrays, some tens of megabytes for a million."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.keys import chunk_key
from manifests.store import read_videos
from shards.damage import Damaged, DamagedIndex
from shards.reader import CommittedShard, Variant
from train.data.decoding.decoders import ChunkDecoder
from train.data.decoding.reading import ChunkBytes, DecodeRule, read_chunk
from train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes
from train.data.remote import RemoteTars
from train.data.selection import Selection

# Video and start are searched as one number; no video lasts 2**40 ms (35 years).
_MS_PER_VIDEO = 1 << 40
_INDEX_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den")


@dataclass(frozen=True)
class ChunkTable:
    """Chunks ordered by (video row, start); one entry of each array per chunk.

    Attributes:
        video_row: row of the chunk's video in the list of videos.
        shard: index in the list of shards.
        row: row of the chunk in that shard.
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

        Rounded down, a span of whole frames would be a little too short, and its moments a frame too early.
        """
        return self.start_ms * 1000 - -self.num_frames * self.fps_den * US_PER_S // self.fps_num

    @property
    def gaps(self) -> NDArray[np.bool_]:
        """True for each chunk that does not directly follow another one of its video."""
        gaps = np.ones(len(self), dtype=bool)
        same_video = self.video_row[1:] == self.video_row[:-1]
        gaps[1:] = ~same_video | (self.start_ms[1:] * 1000 > self.end_us[:-1] + START_ROUNDING_US)
        return gaps

    def last_started(self, video_row: NDArray[np.int64], at_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each (video, time) the last chunk that has begun; -1 or another video's chunk if none has."""
        starts = self.video_row * _MS_PER_VIDEO + self.start_ms
        return np.searchsorted(starts, video_row * _MS_PER_VIDEO + at_ms, side="right") - 1

    def last_of(self, video_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each video its last chunk; -1 or another video's chunk if it has none."""
        return np.searchsorted(self.video_row, video_row, side="right") - 1

    def times(self, chunk: int) -> ChunkTimes:
        """Position of a chunk in its video."""
        return ChunkTimes(**{name: int(getattr(self, name)[chunk]) for name in _INDEX_COLUMNS})


def chunk_table(shards: list[CommittedShard], video_ids: pa.Array) -> ChunkTable:
    """Collect the chunks of the videos `video_ids` from the indexes of `shards`.

    Raises:
        DamagedIndex: a file is not an index of chunks.
        OSError: it cannot be read.
    """
    names = ["video_row", "shard", "row", *_INDEX_COLUMNS]
    parts: dict[str, list[NDArray[np.int64]]] = {name: [np.empty(0, np.int64)] for name in names}
    for number, shard in enumerate(shards):
        if missing := {"video_id", *_INDEX_COLUMNS}.difference(shard.index.column_names):
            raise DamagedIndex(shard.index_path, f"not an index of chunks: it has no {', '.join(sorted(missing))}")
        video_row = rows_of(shard.index["video_id"], video_ids)
        found = np.flatnonzero(video_row >= 0)
        parts["video_row"].append(video_row[found])
        parts["shard"].append(np.full(len(found), number))
        parts["row"].append(found)
        for name in _INDEX_COLUMNS:
            parts[name].append(shard.index[name].to_numpy().astype(np.int64)[found])
    arrays = {name: np.concatenate(part) for name, part in parts.items()}
    order = np.lexsort((arrays["start_ms"], arrays["video_row"]))
    return ChunkTable(**{name: array[order] for name, array in arrays.items()})


def rows_of(values: pa.ChunkedArray, among: pa.Array) -> NDArray[np.int64]:
    """Index of each value in `among`, -1 if missing; the entries of a dictionary are looked up once."""
    pieces = [np.empty(0, np.int64)]
    for piece in values.chunks:
        if pa.types.is_dictionary(piece.type):
            codes = piece.indices.to_numpy(zero_copy_only=False)
            pieces.append(_index_in(piece.dictionary, among)[codes])
        else:
            pieces.append(_index_in(piece, among))
    return np.concatenate(pieces)


def _index_in(values: pa.Array, among: pa.Array) -> NDArray[np.int64]:
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
        variant = Variant.open(data_dir, tars=tars).whole()
        self.variant_name = variant.directory.name
        self.rule = rule
        self.video_ids: pa.Array = videos_of_split(data_dir, split)
        self._shards = variant.shards()
        self.num_readers: int = 0 if tars is None else tars.num_readers
        self.decoder = ChunkDecoder()
        try:
            self.table: ChunkTable = chunk_table(self._shards, self.video_ids)
        except (Damaged, OSError) as error:
            raise UserError(str(error), hint="see prep verify; prep chunk makes that shard again") from error
        self.selection: Selection = Selection(
            where,
            data_dir,
            split=split,
            video_ids=self.video_ids,
            video_row=self.table.video_row,
            start_ms=self.table.start_ms,
            has_captions=has_captions,
            tars=tars,
        )

    def key(self, chunk: int) -> str:
        """Key of a chunk."""
        video_id = self.video_ids[int(self.table.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self.table.start_ms[chunk]))

    @property
    def checksums(self) -> NDArray[np.uint32]:
        """CRC-32 of the bytes of each chunk."""
        of_shards = [shard.index["mp4_crc32"].to_numpy() for shard in self._shards]
        begin = np.cumsum([0, *map(len, of_shards)])[:-1]
        checksums: NDArray[np.uint32] = np.concatenate(of_shards)[begin[self.table.shard] + self.table.row]
        return checksums

    def read(self, chunk: int, frames: Collection[int]) -> ChunkBytes:
        """Read the bytes needed to decode `frames` of a chunk; raises SampleFailed if they cannot be read."""
        shard, row = self._shards[int(self.table.shard[chunk])], int(self.table.row[chunk])
        return read_chunk(shard, row, frames, rule=self.rule, key=self.key(chunk))

    def describe(self) -> str:
        """Which shards are not decoded by the rule; empty if all are."""
        if not self._num_open:
            return ""
        return f"{self._num_open} of {len(self._shards)} shards decoded through the container: open GOPs"

    @cached_property
    def _num_open(self) -> int:
        """Number of shards whose first chunk cannot be decoded from packets; a shard's chunks share a recipe."""
        if self.rule != "packets":
            return 0
        return sum(not _has_closed_gops(shard) for shard in self._shards)


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
