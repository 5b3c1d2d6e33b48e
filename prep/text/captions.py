"""Reading the captions of some videos in batches, so that ten million captions are never Python objects at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import open_captions
from clipmill.shards.selection import caption_columns, labelled_captions, selected_captions
from clipmill.shards.where import Where

_COLUMNS = ["caption_id", "video_id", "text"]


@dataclass(frozen=True)
class CaptionPiece:
    """Captions of wanted videos from one row group of the table.

    Attributes:
        videos: int64 [captions], position of each caption's video among the wanted ones.
        ids: int64 [captions], caption ids.
        texts: string [captions].
    """

    row_group: int
    videos: np.ndarray
    ids: np.ndarray
    texts: pa.Array


class CaptionReader:
    """Context manager that reads the manifest's captions.

    It keeps reading the same manifest even if a new one is written meanwhile.

    Args:
        where: conditions on captions and their videos; captions that it does not select are skipped.
    """

    def __init__(self, data_dir: Path, *, where: Where | None = None) -> None:
        self._file: pq.ParquetFile = open_captions(data_dir)
        self._data_dir, self._where = data_dir, where
        self._labelled = labelled_captions(where, data_dir)
        self._columns = list(dict.fromkeys([*_COLUMNS, *caption_columns(where, self._file.schema_arrow)]))

    def __enter__(self) -> "CaptionReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def pieces(self, video_ids: pa.Array, *, row_groups: Iterable[int] | None = None) -> Iterator[CaptionPiece]:
        """Yield the captions of `video_ids`, in the order of the table.

        Args:
            row_groups: row groups to read; all by default.

        Raises:
            UserError: the table is damaged.
        """
        for group in range(self._file.num_row_groups) if row_groups is None else row_groups:
            try:
                table = self._file.read_row_group(group, columns=self._columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"the manifest's captions cannot be read: {error}", hint="run `prep manifest` again"
                ) from None
            positions = pc.index_in(table["video_id"].cast(pa.string()), value_set=video_ids)
            kept = pc.is_valid(positions)
            if self._where is not None:
                rows = np.flatnonzero(kept)
                video_row = positions.filter(kept).to_numpy()
                selected = selected_captions(
                    self._where,
                    self._data_dir,
                    table,
                    rows=rows,
                    video_ids=video_ids,
                    video_row=video_row,
                    labelled=self._labelled,
                )
                mask = np.zeros(table.num_rows, bool)
                mask[rows[selected]] = True
                kept = pa.chunked_array([pa.array(mask)])
            if pc.any(kept).as_py():
                yield CaptionPiece(
                    row_group=group,
                    videos=positions.filter(kept).to_numpy().astype(np.int64),
                    ids=table["caption_id"].filter(kept).to_numpy(),
                    texts=table["text"].filter(kept).combine_chunks(),
                )
