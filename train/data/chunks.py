"""The chunks of a split in the `video` column: opening, reading and decoding them; and `ClipQuery`, which clips of them
are opened, and how they are shown and loaded."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import Inaccessible, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.store import manifest_dir, read_manifest, read_videos, resolved_folder
from clipmill.shards.columns import VIDEO, how_to_repair
from clipmill.shards.merged_table import merged_mark
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.config.clips import ClipSettings
from clipmill.train.data.chunk_table import ChunkTable, chunk_table
from clipmill.train.data.decoding.clip import ClipShape, Views
from clipmill.train.data.decoding.decoders import ChunkDecoder
from clipmill.train.data.decoding.reading import ChunkBytes, DecodeRule, read_chunk
from clipmill.train.data.folders import DataFolder
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.query import DataQuery, clip_shape
from clipmill.train.data.selection import ChunkRows, Selection

if TYPE_CHECKING:
    from clipmill.train.data.remote import RemoteTars


def videos_of_split(data_dir: Path, split: str) -> pa.Array:
    """Ids of the videos of a split; raises UserError if there are none."""
    videos = read_videos(data_dir)
    of_split = videos.filter(pc.equal(videos["split"], split))
    if not of_split.num_rows:
        splits = ", ".join(sorted(set(videos["split"].to_pylist()))) or "none, the manifest is empty"
        raise UserError(
            f"{data_dir} has no videos of split {split!r}",
            hint=f"splits of this manifest: {splits}; choose one with --split",
            flags=("--split",),
        )
    return of_split["video_id"].combine_chunks()


@dataclass(frozen=True)
class _OpenedChunks:
    """The videos of a split and their chunks, and how many shards have open GOPs; None if this is unknown."""

    video_ids: pa.Array
    table: ChunkTable
    num_open: int | None


def _open_chunks(variant: Variant, data_dir: Path, *, split: str) -> _OpenedChunks:
    video_ids = videos_of_split(data_dir, split)
    try:
        table, open_gops = chunk_table(variant, video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair(VIDEO, what="the table or shard")) from error
    return _OpenedChunks(video_ids, table, None if open_gops is None else len(open_gops))


def manifest_mark(data_dir: Path) -> tuple[object, ...]:
    """What data that are read from the manifest depend on: its fingerprint, and the checksums of its tables."""
    manifest = read_manifest(data_dir)
    tables = manifest.get("tables") or [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(manifest_dir(data_dir).iterdir())
    ]
    return manifest["fingerprint"], repr(tables)


def require_same_manifest(data_dir: Path, mark: tuple[object, ...]) -> None:
    """Raise a UserError if a manifest has changed since its `manifest_mark` was taken."""
    if manifest_mark(data_dir) != mark:
        raise UserError(
            f"the manifest of {data_dir} was replaced while it was read",
            hint="run the command again",
        )


class ChunkSet:
    """The chunks of a split in the `video` column: reading and decoding them. Thread-safe.

    Args:
        rule: how frames are decoded.
        tars: reads the tars, if they are not in `data_dir`.
        where: an expression that selects samples (clipmill.shards.where); None for all.
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
        tars: "RemoteTars | None" = None,
        where: str | None = None,
        has_captions: bool = False,
    ) -> None:
        if not resolved_folder(data_dir).is_dir():
            raise UserError(
                f"there is no data folder {data_dir}",
                hint="name the data folder that prep made with --shards",
                flags=("--shards",),
            )
        self._data_dir = data_dir
        self._variant = Variant.open(data_dir, tars=tars).require_complete()
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
        opened = open_shared(
            lambda: _open_chunks(self._variant, data_dir, split=split),
            of=self.depends_on,
            num_rows=self.num_rows,
            types=(_OpenedChunks, ChunkTable),
            column="chunks",
        )
        self.video_ids: pa.Array = opened.video_ids
        self.table: ChunkTable = opened.table
        self._known_open = opened.num_open
        self.selection: Selection = Selection(
            where,
            data_dir,
            split=split,
            chunks=ChunkRows(self.video_ids, self.table.video_row, self.table.start_ms),
            has_captions=has_captions,
            tars=tars,
            depends_on=self.depends_on,
        )

    def require_same_manifest(self) -> None:
        """Raise a UserError if the manifest has changed since the chunks were opened: a table may be of both."""
        _, *mark = self.videos
        require_same_manifest(self._data_dir, tuple(mark))

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
        return (
            f"{self._num_open} of {count_noun(self._variant.num_shards, 'shard')} "
            "decoded through the container: open GOPs"
        )

    def source_paths(self) -> pa.Array:
        """Paths or URLs of the videos' files in the manifest, for each of `video_ids`."""
        videos = read_videos(self._data_dir)
        rows = pc.index_in(self.video_ids.cast(pa.string()), value_set=videos["video_id"].combine_chunks())
        return videos["path"].combine_chunks().take(rows)

    @cached_property
    def _num_open(self) -> int:
        """Number of shards whose first chunk cannot be decoded from packets; a shard's chunks share a recipe."""
        if self.rule != "packets":
            return 0
        if self._known_open is not None:
            return self._known_open
        return sum(not _has_closed_gops(shard) for shard in self._variant.shards())


def _has_closed_gops(shard: CommittedShard) -> bool:
    try:
        return shard.packet_tables.has_closed_gops(0)
    except (OSError, Damaged, Inaccessible, ValueError):
        return True  # reading the chunk reports the damage


def evenly_of_each(videos: NDArray[np.int64], *, at_most: int) -> NDArray[np.int64]:
    """Rows of at most `at_most` samples of each video, spread evenly; `videos` are those of the samples, ascending."""
    _, first, count = np.unique(videos, return_index=True, return_counts=True)
    count, number = np.repeat(count, count), np.arange(len(videos)) - np.repeat(first, count)
    num_taken = np.minimum(count, at_most)
    return np.flatnonzero((number + 1) * num_taken // count > number * num_taken // count)


@dataclass(frozen=True)
class ClipQuery:
    """A question to a data folder.

    Attributes:
        data_dir: the folder, or the local copy of its small files if its tars are elsewhere.
        split: split of the videos.
        shape: how clips are sampled, cropped and resized.
        loading: batches, threads and this rank's share.
        decode: how frames are decoded.
        tars: reads the tars, if they are not in `data_dir`.
        where: an expression that selects samples (`clipmill.shards.where`); None for all.
    """

    data_dir: Path
    split: str
    shape: ClipShape
    loading: LoaderSettings
    decode: DecodeRule = "packets"
    tars: "RemoteTars | None" = None
    where: str | None = None

    def open_chunks(self, *, has_captions: bool = False) -> ChunkSet:
        """Open the chunks of the split.

        Args:
            has_captions: whether these have captions, which conditions may be about.

        Raises:
            UserError: see `ChunkSet`.
        """
        return ChunkSet(
            self.data_dir,
            split=self.split,
            rule=self.decode,
            tars=self.tars,
            where=self.where,
            has_captions=has_captions,
        )

    def nothing(self, chunks: ChunkSet) -> tuple[str, str]:
        """Message and hint of the error if none of the clips can be shown."""
        hint = (
            "see prep status; captions and labels come from prep manifest"
            if not chunks.selection.text
            else "use a weaker condition: it must hold for all chunks that a clip touches, and a caption without times "
            "touches all chunks of its video"
        )
        return f"no clip of split {self.split!r} can be shown", hint


def clip_query(settings: ClipSettings, folder: DataFolder, *, split: str, loading: LoaderSettings) -> ClipQuery:
    """The clips of a folder that settings ask for, as training shows them."""
    return ClipQuery(
        folder.path,
        split=split,
        shape=clip_shape(settings, views=Views()),
        loading=loading,
        decode=settings.decode,
        tars=folder.tars,
        where=settings.selection,
    )


def query_clips(query: DataQuery) -> ClipQuery:
    """The clips of the data folder that a task asks for; raises UserError if the folder cannot be read."""
    folder = query.open_folder(column=VIDEO)
    clips = clip_query(query.settings, folder, split=query.split, loading=query.loading)
    return replace(clips, shape=query.shape)
