"""Where the chunks of every video lie, as arrays: a million chunks are a few ten megabytes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.keys import chunk_key
from manifests.store import read_videos
from shards.damage import Damaged, DamagedIndex
from shards.reader import CommittedShard, Variant
from shards.tars import TarBytes
from train.data.decoding.chunks import ChunkDecoder, ChunkFrames
from train.data.decoding.reading import ChunkBytes, DecodeRule, has_closed_gops, read_chunk
from train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes

if TYPE_CHECKING:
    import av


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


# The chunks of some videos: where they lie, reading them, decoding them.


class ChunkSet:
    """Chunks of the `video` column. Safe to use from many threads.

    Args:
        split: whose videos' chunks.
        rule: how frames come out of chunks.
        tars: how bytes of tars are read, where they do not lie in `data_dir`.

    Attributes:
        video_ids: the videos of the split.
        table: the chunks; a video's row in it is its place in `video_ids`.

    Raises:
        UserError: there is no such data folder, no shards in it, or no video of the split.
    """

    def __init__(self, data_dir: Path, *, split: str, rule: DecodeRule, tars: TarBytes | None = None) -> None:
        if not data_dir.is_dir():
            raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made: --shards DIR")
        variant = Variant.open(data_dir, tars=tars).whole()
        self.variant_name = variant.directory.name
        self.rule = rule
        self.video_ids: pa.Array = videos_of_split(data_dir, split)
        self._shards = variant.shards()
        self._decoder = ChunkDecoder()
        try:
            self.table: ChunkTable = chunk_table(self._shards, self.video_ids)
        except (Damaged, OSError) as error:
            raise UserError(str(error), hint="see prep verify; prep chunk run again makes that shard anew") from error

    def key(self, chunk: int) -> str:
        """Key of a chunk."""
        video_id = self.video_ids[int(self.table.video_row[chunk])].as_py()
        return chunk_key(video_id, int(self.table.start_ms[chunk]))

    def read(self, chunk: int, frames: Collection[int]) -> ChunkBytes:
        """The bytes that give `frames` of a chunk; SampleFailed where they cannot be had."""
        shard, row = self._shards[int(self.table.shard[chunk])], int(self.table.row[chunk])
        return read_chunk(shard, row, frames, rule=self.rule, key=self.key(chunk))

    def decode(self, content: ChunkBytes) -> ChunkFrames:
        """Frames of a chunk that was read; SampleFailed where they do not come out."""
        return self._decoder.decode(content)

    def decode_each(self, content: ChunkBytes, use: "Callable[[int, av.VideoFrame], None]") -> None:
        """Hands each frame of a chunk that was read to `use`, with its index, when it comes out of the decoder.

        Raises:
            SampleFailed: a frame does not come out.
        """
        self._decoder.decode_each(content, use)

    def describe(self) -> str:
        """What is not decoded as it was asked for; empty where all is."""
        if not self._num_open:
            return ""
        return f"{self._num_open} of {len(self._shards)} shards decoded by way of the container: open GOPs"

    @cached_property
    def _num_open(self) -> int:
        """Shards whose first chunk cannot be decoded by packets; a shard's chunks come from one recipe."""
        if self.rule != "packets":
            return 0
        return sum(not has_closed_gops(shard) for shard in self._shards)


def videos_of_split(data_dir: Path, split: str) -> pa.Array:
    """Ids of the videos of a split; UserError where it has none."""
    videos = read_videos(data_dir)
    of_split = videos.filter(pc.equal(videos["split"], split))
    if not of_split.num_rows:
        there = ", ".join(sorted(set(videos["split"].to_pylist()))) or "none, the manifest is empty"
        raise UserError(
            f"{data_dir} has no videos of split {split!r}",
            hint=f"splits of this manifest: {there}; choose one by --split (for a training's loop: --evaluate.split)",
        )
    return of_split["video_id"].combine_chunks()
