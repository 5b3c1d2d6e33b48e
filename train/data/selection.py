"""`--where` of a sample set: which chunks and captions of a split it selects."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_table import caption_blocks
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import open_captions
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.merged_table import merged_mark
from clipmill.shards.reader import Variant
from clipmill.train.data.chunk_table import rows_of
from clipmill.train.data.node_cache import open_shared, scratch

if TYPE_CHECKING:
    from clipmill.shards.where import Where
    from clipmill.train.data.remote import RemoteTars

_BLOCK = 1 << 21  # captions at a time: for each block, the ids of all videos are hashed


class ChunkRows(NamedTuple):
    """The chunks of a split: IDs of its videos, and for each chunk its video there and its start, int64 [chunks]."""

    video_ids: pa.Array
    video_row: NDArray[np.integer]
    start_ms: NDArray[np.int64]


class Selection:
    """What an expression selects of a split: chunks, and captions.

    A clip is selected if all chunks that it touches are selected and, in a set with captions, its caption is.

    Args:
        text: the expression; None selects everything.
        video_ids: the videos of the split.
        video_row: [chunks], the video of each chunk, as an index of `video_ids`.
        start_ms: [chunks], its start.
        has_captions: whether samples have captions; otherwise, conditions on captions are a mistake.
        tars: those of the data folder, if it is remote.
        depends_on: what the chunks depend on (clipmill.train.data.node_cache).

    Attributes:
        chunks: bool [chunks], those that are selected; None for all.
        num_captions, num_selected: captions of the split, and those of them that are selected, once they are known.

    Raises:
        UserError: the text is not an expression, selects no chunk, or uses scores that chunks lack.
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
        of_chunks: Where | None = None
        self._where: Where | None = None
        self._of_captions: Where | None = None
        if text is not None:
            from clipmill.shards.where import parse_where

            self._where = parse_where(text)
            of_chunks, self._of_captions = self._where.by_level(labels_of="caption" if has_captions else "chunk")
        self._data_dir, self._split, self._video_ids = data_dir, split, chunks.video_ids
        self._num_chunks = len(chunks.video_row)
        self.num_captions, self.num_selected = 0, 0
        self.chunks: NDArray[np.bool_] | None = None
        self._rows = chunks
        if self._where is not None and not has_captions:
            self._where.require(("chunk", "video", "label"), because="these samples have no captions")
        if of_chunks is not None:
            from clipmill.shards.selection import selected_chunks

            mark = selection_mark(of_chunks.text, data_dir, tars=tars)
            self.chunks = open_shared(
                lambda: selected_chunks(of_chunks, data_dir, **chunks._asdict()),
                of=("selection", depends_on, *mark),
                num_rows=self._num_chunks,
                types=(),
                column="selection",
            )
            self._require(of_chunks, int(self.chunks.sum()), self._num_chunks, "chunk")

    @property
    def rows(self) -> NDArray[np.int64]:
        """The chunks that are selected."""
        return np.arange(self._num_chunks) if self.chunks is None else np.flatnonzero(self.chunks)

    @property
    def has_captions(self) -> bool:
        """Whether captions are selected too, not only chunks."""
        return self._of_captions is not None

    @property
    def depends_on(self) -> tuple[object, ...]:
        """What the selection depends on besides the chunks and the manifest."""
        return selection_mark(None if self._where is None else self._where.text, self._data_dir)

    @property
    def text(self) -> str:
        """The expression as a part of a fingerprint; empty without one."""
        return "" if self._where is None else f" where {self._where.text}"

    def of_captions(self, table: pa.Table | None = None) -> NDArray[np.bool_] | None:
        """bool [rows of captions.parquet], the captions of the split that are selected; None for all.

        Args:
            table: captions to select from, in place of the manifest's.

        Raises:
            UserError: none of them is selected.
        """
        where = self._of_captions
        if where is None:
            return None
        from clipmill.shards.selection import caption_columns, labelled_captions, selected_captions

        opened = open_captions(self._data_dir, coded=("video_id", "source")) if table is None else nullcontext(table)
        with opened as captions:
            is_table = isinstance(captions, pa.Table)
            schema = captions.schema if is_table else captions.schema_arrow
            columns = list(dict.fromkeys(["video_id", *caption_columns(where, schema)]))
            selected, begin = scratch(captions.num_rows if is_table else captions.metadata.num_rows, np.bool_), 0
            selected[:] = False
            labelled = labelled_captions(where, self._data_dir)
            for block in caption_blocks(captions, columns, num_rows=_BLOCK):
                video_row = rows_of(block["video_id"], self._video_ids)
                rows = np.flatnonzero(video_row >= 0)
                selected[begin + rows] = selected_captions(
                    where,
                    self._data_dir,
                    block,
                    rows=rows,
                    video_ids=self._video_ids,
                    video_row=video_row[rows],
                    labelled=labelled,
                )
                self.num_captions += len(rows)
                begin += len(block)
        self.num_selected = int(np.count_nonzero(selected))
        self._require(where, self.num_selected, self.num_captions, "caption")
        return selected

    def remarks(self) -> list[str]:
        """The expression and how much it selects, for the log; empty without one."""
        if self._where is None:
            return []
        num_chunks = self._num_chunks if self.chunks is None else int(self.chunks.sum())
        if self._of_captions is not None and self._of_captions.labels:
            num_chunks = self._num_chunks_by_labels(num_chunks)
        parts = [f"{num_chunks:,} of {count_noun(self._num_chunks, 'chunk')}"]
        if self._of_captions is not None:
            parts.append(f"{self.num_selected:,} of {count_noun(self.num_captions, 'caption')}")
        return [f"where {self._where.text}: {' and '.join(parts)} selected"]

    def _num_chunks_by_labels(self, num_chunks: int) -> int:
        """The number of chunks that the expression selects where only chunks are selected, as on the pages of prep.

        Args:
            num_chunks: Number without conditions on labels, for an expression whose labels belong to captions only.
        """
        from clipmill.shards.selection import selected_chunks

        assert self._where is not None
        try:
            of_chunks, _ = self._where.by_level(labels_of="chunk")
        except UserError:  # one condition is on a label and on a caption
            return num_chunks
        if of_chunks is None:
            return num_chunks
        return int(selected_chunks(of_chunks, self._data_dir, **self._rows._asdict()).sum())

    def _require(self, where: "Where", num_selected: int, count: int, noun: str) -> None:
        if count and not num_selected:
            from clipmill.shards.selection import empty_selection_error

            raise empty_selection_error(where, what=f"the {count:,} {noun}s of split {self._split!r}")


def selection_mark(where: str | None, data_dir: Path, *, tars: "RemoteTars | None" = None) -> tuple[object, ...]:
    """What a selection depends on besides the chunks and the manifest; raises UserError as `parse_where` does.

    Args:
        tars: of a remote data folder, whose scores or other columns are copied if they are used.
    """
    if where is None:
        return ("",)
    from clipmill.shards.where import parse_where

    parsed = parse_where(where)
    columns = sorted(parsed.stored_in)
    if tars is not None:
        for column in columns:
            tars.files.copy_column(column)
    return parsed.text, current_variant(data_dir, VIDEO), *(_mark_of(data_dir, column) for column in columns)


def _mark_of(data_dir: Path, column: str) -> tuple[object, ...]:
    """What the values of a column depend on; reading them reports what is wrong with them."""
    name = current_variant(data_dir, column)
    if name is None:
        return ()
    variant = Variant(variant_dir(data_dir, column, name))
    return merged_mark(variant.directory, variant.commits)
