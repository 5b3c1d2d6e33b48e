"""The videos of the manifest as a plan needs them: a few columns of all videos, and all columns of a few videos.

All columns of ten million videos take gigabytes. Only ids and splits, which decide where a video belongs, stay in
memory. The others are read by row group, mostly in the order of the manifest, which is also that of the layout.
"""

from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.table_files import require_numbers
from clipmill.prep.core.table_file import as_array


class Videos:
    """The table of videos of a manifest (clipmill.manifests.schema.VIDEOS), open for reading.

    Attributes:
        ids: the ID of each video.
        splits: the split of each video.
    """

    def __init__(self, file: pq.ParquetFile, *, path: Path) -> None:
        """Read the IDs and splits.

        Args:
            file: the open table, which stays open as long as this object exists.
            path: the name of the table in messages.
        """
        self._file, self._path, self._lock = file, path, Lock()
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        self._ends = np.cumsum(np.array(sizes, np.int64))
        self._read_group = lru_cache(1)(self._read)
        self.ids, self.splits = as_array(self.column("video_id")), as_array(self.column("split"))

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a column of all videos.

        Raises:
            UserError: its texts are too long for one array.
        """
        table = self._file.read(columns=[name])
        require_numbers(self._path, num_rows=len(table), videos=table)
        return table[name]

    def take(self, rows: np.ndarray, *columns: str) -> pa.Table:
        """Read some columns of the videos in the given rows, int64[N], in this order."""
        groups = np.searchsorted(self._ends, rows, side="right")
        parts = [pa.schema([self._file.schema_arrow.field(name) for name in columns]).empty_table()]
        for group in np.unique(groups).tolist():
            begin = self._ends[group - 1] if group else 0
            with self._lock:
                table = self._read_group(group, columns)
            parts.append(table.take(pa.array(rows[groups == group] - begin)))
        found = pa.concat_tables(parts)
        is_ascending = bool((groups[1:] >= groups[:-1]).all())
        return found if is_ascending else found.take(pa.array(np.argsort(np.argsort(groups, kind="stable"))))

    def _read(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        return self._file.read_row_group(group, columns=list(columns)).select(columns).replace_schema_metadata()
