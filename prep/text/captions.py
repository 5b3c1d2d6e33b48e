"""Reading the captions of some videos in batches, so that ten million captions are never Python objects at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from manifests.errors import UserError
from manifests.store import open_captions

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
    """

    def __init__(self, data_dir: Path) -> None:
        self._file: pq.ParquetFile = open_captions(data_dir)

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
                table = self._file.read_row_group(group, columns=_COLUMNS, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"the manifest's captions cannot be read: {error}", hint="run `prep manifest` again"
                ) from None
            positions = pc.index_in(table["video_id"].cast(pa.string()), value_set=video_ids)
            kept = pc.is_valid(positions)
            if pc.any(kept).as_py():
                yield CaptionPiece(
                    row_group=group,
                    videos=positions.filter(kept).to_numpy().astype(np.int64),
                    ids=table["caption_id"].filter(kept).to_numpy(),
                    texts=table["text"].filter(kept).combine_chunks(),
                )
