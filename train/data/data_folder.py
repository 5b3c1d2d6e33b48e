"""Data folders: opening by path or URL, chunks as arrays, and the chunks and captions that `--where` selects.

The modules that read buckets are imported only for URLs.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_table import caption_blocks
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.store import open_captions
from clipmill.shards.chunk_table import Moments, order_of, read_chunk_rows
from clipmill.shards.columns import SOURCE_MEMBER, VIDEO
from clipmill.shards.dataset import current_variant, data_folder_error, is_data_folder, variant_dir
from clipmill.shards.marks import enable_marks, leave_mark
from clipmill.shards.merged_table import variant_state
from clipmill.shards.reader import Variant
from clipmill.train.data.frame_sampling import START_ROUNDING_US, US_PER_S, ChunkTimes
from clipmill.train.data.node_cache import choose_folder, open_shared, scratch

if TYPE_CHECKING:
    from clipmill.shards.where import Where
    from clipmill.train.data.remote import RemoteTars


Variant.leave_mark = leave_mark  # marks each variant that a training process opens, so that prep gc keeps it


@dataclass(frozen=True)
class DataFolder:
    """Opened data folder.

    Attributes:
        path: Local data folder, or the local copy of the small files of a remote data folder.
        tars: Reader of the tars of a remote data folder; None for a local folder.
    """

    path: Path
    tars: "RemoteTars | None" = None


def folder_path(address: str, *, cache: Path | None) -> Path:
    """Return the path of a local data folder, or of the local copy of a remote data folder.

    Raises:
        UserError: The bucket does not exist, or the cache folder cannot be created.
    """
    if not is_remote(address):
        return Path(address)
    from clipmill.train.data.remote import copy_of_folder

    return copy_of_folder(address, cache=cache)


def open_data_folder(
    address: str, *, cache: Path | None, cache_size: str | None = None, column: str | None = VIDEO
) -> DataFolder:
    """Open the data folder at a local path or a URL. Variants that are opened in a local folder are marked as in use.

    Args:
        cache: Folder for copies of remote files; None for the user's cache.
        cache_size: Maximum size of complete tars in the cache, such as 100GB; None for a limit that depends on the free
            disk space.
        column: Column whose shards are read; None if only the manifest is read. `RemoteFiles.copy_column` copies the
            small files of other columns when they are needed.

    Raises:
        UserError: The folder cannot be read, or is not a data folder.
    """
    choose_folder(cache)
    if not is_remote(address):
        if (path := Path(address)).exists() and not is_data_folder(path):
            raise data_folder_error(path)
        enable_marks(path)
        return DataFolder(path)
    from clipmill.train.data.remote import open_remote_folder

    return DataFolder(*open_remote_folder(address, cache=cache, cache_size=cache_size, column=column))


_INDEX_COLUMNS = ("start_ms", "num_frames", "fps_num", "fps_den")
CHUNK_COLUMNS = (*_INDEX_COLUMNS, "shard", "row", "crc32")


@dataclass(frozen=True)
class ChunkTable:
    """Chunks, ordered by video and start. Each array has one entry per chunk, int32 or int64 (`crc32`: uint32).

    Attributes:
        video_row: Row of the chunk's video in the list of videos.
        start_ms: Start in the video, in milliseconds.
        num_frames: Number of frames.
        fps_num, fps_den: Numerator and denominator of the frame rate.
        shard: ID of the shard.
        row: Row of the chunk in its shard.
        crc32: CRC-32 checksum of the chunk's bytes.
        is_in_sources: True if the packets of the chunks are in the source files instead of the shards.
    """

    video_row: NDArray[Any]
    start_ms: NDArray[np.int64]
    num_frames: NDArray[Any]
    fps_num: NDArray[Any]
    fps_den: NDArray[Any]
    shard: NDArray[Any]
    row: NDArray[Any]
    crc32: NDArray[np.uint32]
    is_in_sources: bool = False

    def __len__(self) -> int:
        return len(self.video_row)

    @property
    def end_us(self) -> NDArray[np.int64]:
        """Time in the video at which the last frame of each chunk ends, microseconds, rounded up."""
        return self.end_us_of(slice(None))

    def end_us_of(self, chunks: NDArray[np.integer] | slice) -> NDArray[np.int64]:
        """Return `end_us` for these chunks.

        The end is rounded up, because a span of complete frames would otherwise be slightly too short, and its moments
        could be one frame too early.
        """
        columns = (getattr(self, name)[chunks] for name in _INDEX_COLUMNS)
        start_ms, num_frames, fps_num, fps_den = (column.astype(np.int64) for column in columns)
        return start_ms * 1000 - -num_frames * fps_den * US_PER_S // fps_num

    def slice_videos(self, low: int, high: int) -> tuple[int, "ChunkTable"]:
        """Return the row of the first chunk of the videos [low, high), and a table with views of their chunks."""
        begin, end = np.searchsorted(self.video_row, np.array([low, high], self.video_row.dtype)).tolist()
        return begin, replace(self, **{name: getattr(self, name)[begin:end] for name in ("video_row", *CHUNK_COLUMNS)})

    def times(self, chunk: int) -> ChunkTimes:
        """Return the times of a chunk in its video."""
        return ChunkTimes(**{name: int(getattr(self, name)[chunk]) for name in _INDEX_COLUMNS})


class ChunkSearch:
    """Index for finding the chunk at a moment. It takes 24 bytes per chunk.

    Attributes:
        end_us: End of each chunk in the video, in microseconds.
        num_gaps: Running count of the chunks that do not directly follow another chunk of the same video. Chunks
            with equal counts are contiguous.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._video_row = table.video_row
        self._moments = Moments.build(table.video_row, table.start_ms)
        self._starts = self._moments.numbers(table.video_row, table.start_ms)
        self.end_us: NDArray[np.int64] = table.end_us
        has_gap = np.ones(len(table), dtype=bool)  # the first chunk of a video counts as a chunk after a gap
        same_video = table.video_row[1:] == table.video_row[:-1]
        has_gap[1:] = ~same_video | (table.start_ms[1:] * 1000 > self.end_us[:-1] + START_ROUNDING_US)
        self.num_gaps: NDArray[np.int64] = np.cumsum(has_gap)

    def last_started(self, video_row: NDArray[np.int64], at_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last chunk that starts at or before each time in a video.

        If there is no such chunk, the result is -1 or a chunk of another video.
        """
        return np.searchsorted(self._starts, self._moments.numbers(video_row, at_ms), side="right") - 1

    def last_of(self, video_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last chunk of each video; -1 or a chunk of another video if the video has no chunks."""
        return np.searchsorted(self._video_row, video_row.astype(self._video_row.dtype), side="right") - 1


def chunk_table(variant: Variant, video_ids: pa.Array) -> tuple[ChunkTable, frozenset[int] | None]:
    """Return the chunks of these videos in a variant, and the variant's shards with open GOPs (None if unknown).

    Raises:
        Damaged: A file is not an index of chunks, or the merged table does not match its checksums.
        OSError: A file cannot be read.
        UserError: The variant has no chunks.
    """
    if not variant.num_samples:
        raise UserError(
            f"{variant.directory} has no chunks: all of its videos have failed",
            hint="run prep status to see the reasons",
        )
    chunk_rows = read_chunk_rows(variant, columns=("video_id", *CHUNK_COLUMNS))
    entries, codes = chunk_rows.dictionary_codes("video_id")
    arrays = {name: column_of(chunk_rows.table[name]) for name in CHUNK_COLUMNS}
    video_row = index_in(entries, video_ids).astype(np.int32)[codes]
    kept_rows, order = rows_with_video(video_row, arrays["start_ms"])
    if kept_rows is not None or order is not None:
        rows = kept_rows if order is None else order if kept_rows is None else kept_rows[order]
        video_row, arrays = video_row[rows], {name: array[rows] for name, array in arrays.items()}
    is_in_sources = chunk_rows.member == SOURCE_MEMBER
    return ChunkTable(video_row=video_row, **arrays, is_in_sources=is_in_sources), chunk_rows.open_gops


def column_of(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return the values of a column without nulls: a view of a single Arrow chunk, or an array from `scratch`."""
    parts = [chunk.to_numpy() for chunk in column.chunks]
    if len(parts) == 1:
        return parts[0]
    dtype = column.type.to_pandas_dtype()
    return np.concatenate(parts, out=scratch(len(column), dtype)) if parts else np.empty(0, dtype)


def rows_with_video(
    video_row: NDArray[np.integer], start_ms: NDArray[np.integer]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return the rows that have a video (not -1), and the order that sorts these rows by video and start.

    The rows are None if all rows have a video. The order is None if the rows are already sorted.
    """
    kept_rows = None if bool((video_row >= 0).all()) else np.flatnonzero(video_row >= 0)
    rows: Any = slice(None) if kept_rows is None else kept_rows
    return kept_rows, order_of(video_row[rows], start_ms[rows])


def rows_of(values: pa.ChunkedArray, keys: pa.Array) -> NDArray[np.int64]:
    """Return the position in `keys` of each value; -1 if missing. Entries of a dictionary are looked up only once."""
    indices = [np.empty(0, np.int64)]
    last_lookup: tuple[pa.Array, NDArray[np.int64]] | None = None
    for chunk in values.chunks:
        if pa.types.is_dictionary(chunk.type):
            if last_lookup is None or not last_lookup[0].equals(chunk.dictionary):
                last_lookup = chunk.dictionary, index_in(chunk.dictionary, keys)
            indices.append(last_lookup[1][chunk.indices.to_numpy(zero_copy_only=False)])
        else:
            indices.append(index_in(chunk, keys))
    return np.concatenate(indices)


def index_in(values: pa.Array, keys: pa.Array) -> NDArray[np.int64]:
    """Return the position in `keys` of each value; -1 if missing. Each call hashes all keys."""
    return pc.fill_null(pc.index_in(values, value_set=keys), -1).to_numpy(zero_copy_only=False).astype(np.int64)


_BLOCK = 1 << 21  # number of captions in a block; blocks are large, because each one hashes the IDs of all videos


class ChunkRows(NamedTuple):
    """Chunks of a split.

    Attributes:
        video_ids: IDs of the videos of the split.
        video_row: Row of each chunk's video in `video_ids`, [chunks].
        start_ms: Start of each chunk in the video, milliseconds, [chunks].
    """

    video_ids: pa.Array
    video_row: NDArray[np.integer]
    start_ms: NDArray[np.int64]


class Selection:
    """Chunks and captions of a split that the expression of `--where` selects.

    A clip is selected if all chunks that it touches are selected and, if samples have captions, its caption is
    selected.

    Args:
        text: Expression; None selects everything.
        chunks: Chunks of the split.
        has_captions: True if samples have captions. If False, a condition on captions is an error.
        tars: Reader of the tars of a remote data folder; None for a local folder.
        depends_on: Values that identify everything that affects the chunks (clipmill.train.data.node_cache).

    Attributes:
        chunks: Mask of the selected chunks, bool [chunks]; None for all.
        num_captions, num_selected: Number of captions of the split, and number of selected captions; 0 before
            `select_captions` is called.

    Raises:
        UserError: The text is not a valid expression, does not select any chunk, or uses scores that the chunks lack.
    """

    def __init__(
        self,
        text: str | None,
        data_dir: Path,
        *,
        split: str,
        chunks: ChunkRows,
        has_captions: bool,
        tars: "RemoteTars | None" = None,
        depends_on: tuple[object, ...] = (),
    ) -> None:
        chunk_where: Where | None = None
        self._where: Where | None = None
        self._caption_where: Where | None = None
        if text is not None:
            from clipmill.shards.where import parse_where

            self._where = parse_where(text, data_dir=data_dir)
            chunk_where, self._caption_where = self._where.split_by_level(
                label_level="caption" if has_captions else "chunk"
            )
        self._data_dir, self._split, self._video_ids = data_dir, split, chunks.video_ids
        self._num_chunks = len(chunks.video_row)
        self.num_captions, self.num_selected = 0, 0
        self.chunks: NDArray[np.bool_] | None = None
        self._rows = chunks
        if self._where is not None and not has_captions:
            self._where.require(("chunk", "video", "label"), because="these samples have no captions")
        if chunk_where is not None:
            from clipmill.shards.selection import selected_chunks

            mark = selection_mark(chunk_where.text, data_dir, tars=tars)
            self.chunks = open_shared(
                lambda: selected_chunks(chunk_where, data_dir, **chunks._asdict()),
                depends_on=("selection", depends_on, *mark),
                num_rows=self._num_chunks,
                types=(),
                prefix="selection",
            )
            self._require_selected(chunk_where, int(self.chunks.sum()), self._num_chunks, "chunk")

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the selected chunks."""
        return np.arange(self._num_chunks) if self.chunks is None else np.flatnonzero(self.chunks)

    @property
    def depends_on(self) -> tuple[object, ...]:
        """Values that identify everything that affects the selection, except the chunks and the manifest."""
        return selection_mark(None if self._where is None else self._where.text, self._data_dir)

    @property
    def text(self) -> str:
        """Expression after the word `where`, for fingerprints; empty without an expression."""
        return "" if self._where is None else f" where {self._where.text}"

    def select_captions(self, table: pa.Table | None = None) -> NDArray[np.bool_] | None:
        """Return a mask of the selected captions of the split, bool [rows of the table]; None for all.

        Args:
            table: Table of captions; None for the captions of the manifest.

        Raises:
            UserError: No caption is selected.
        """
        where = self._caption_where
        if where is None:
            return None
        from clipmill.shards.selection import caption_columns, labelled_captions, selected_captions

        context = (
            open_captions(self._data_dir, dictionary_columns=("video_id", "source"))
            if table is None
            else nullcontext(table)
        )
        with context as captions:
            is_table = isinstance(captions, pa.Table)
            schema = captions.schema if is_table else captions.schema_arrow
            columns = list(dict.fromkeys(["video_id", *caption_columns(where, schema)]))
            is_selected, begin = scratch(captions.num_rows if is_table else captions.metadata.num_rows, np.bool_), 0
            is_selected[:] = False
            label_rows = labelled_captions(where, self._data_dir)
            for block in caption_blocks(captions, columns, num_rows=_BLOCK):
                video_row = rows_of(block["video_id"], self._video_ids)
                rows = np.flatnonzero(video_row >= 0)
                is_selected[begin + rows] = selected_captions(
                    where,
                    self._data_dir,
                    block,
                    rows=rows,
                    video_ids=self._video_ids,
                    video_row=video_row[rows],
                    label_rows=label_rows,
                )
                self.num_captions += len(rows)
                begin += len(block)
        self.num_selected = int(np.count_nonzero(is_selected))
        self._require_selected(where, self.num_selected, self.num_captions, "caption")
        return is_selected

    def remarks(self) -> list[str]:
        """Return a remark with the expression and the numbers of selected chunks and captions, for the log."""
        if self._where is None:
            return []
        num_chunks = self._num_chunks if self.chunks is None else int(self.chunks.sum())
        if self._caption_where is not None and self._caption_where.labels:
            num_chunks = self._num_chunks_by_labels(num_chunks)
        parts = [f"{num_chunks:,} of {count_noun(self._num_chunks, 'chunk')}"]
        if self._caption_where is not None:
            parts.append(f"{self.num_selected:,} of {count_noun(self.num_captions, 'caption')}")
        return [f"where {self._where.text}: {' and '.join(parts)} selected"]

    def _num_chunks_by_labels(self, num_chunks: int) -> int:
        """Return the number of selected chunks if conditions on labels apply to chunks, as on the pages of `prep`.

        Args:
            num_chunks: Number of chunks selected by the conditions that do not concern labels. This number is returned
                if a condition concerns both a label and a caption.
        """
        from clipmill.shards.selection import selected_chunks

        assert self._where is not None
        try:
            chunk_where, _ = self._where.split_by_level(label_level="chunk")
        except UserError:  # a condition concerns both a label and a caption
            return num_chunks
        if chunk_where is None:
            return num_chunks
        return int(selected_chunks(chunk_where, self._data_dir, **self._rows._asdict()).sum())

    def _require_selected(self, where: "Where", num_selected: int, count: int, noun: str) -> None:
        if count and not num_selected:
            from clipmill.shards.selection import empty_selection_error

            raise empty_selection_error(where, what=f"the {count:,} {noun}s of split {self._split!r}")


def selection_mark(where: str | None, data_dir: Path, *, tars: "RemoteTars | None" = None) -> tuple[object, ...]:
    """Return values that identify everything that affects a selection, except the chunks and the manifest.

    Args:
        where: Expression; None selects everything.
        tars: Reader of the tars of a remote data folder; None for a local folder. For a remote folder, the columns that
            the expression uses, such as scores, are copied to this machine.

    Raises:
        UserError: See `parse_where`.
    """
    if where is None:
        return ("",)
    from clipmill.shards.where import parse_where

    expression = parse_where(where)
    columns = sorted(expression.stored_in)
    if tars is not None:
        for column in columns:
            tars.files.copy_column(column)
    return expression.text, current_variant(data_dir, VIDEO), *(_mark_of(data_dir, column) for column in columns)


def _mark_of(data_dir: Path, column: str) -> tuple[object, ...]:
    """Return values that identify the version of a column. A damaged column is reported later, when it is read."""
    name = current_variant(data_dir, column)
    if name is None:
        return ()
    variant = Variant(variant_dir(data_dir, column, name))
    return variant_state(variant.directory, variant.commits)
