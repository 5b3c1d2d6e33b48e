"""The chunks of some videos: where they lie, reading them, decoding them."""

from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import UserError
from manifests.keys import chunk_key
from manifests.store import read_videos
from shards.damage import Damaged
from shards.reader import Variant
from shards.tars import TarBytes
from train.data.chunks import ChunkTable, chunk_table
from train.data.decoding.chunks import ChunkDecoder, ChunkFrames
from train.data.decoding.reading import ChunkBytes, DecodeRule, has_closed_gops, read_chunk

if TYPE_CHECKING:
    import av


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
