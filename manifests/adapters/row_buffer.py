"""Collecting many rows without one Python object for each."""

from typing import Any

import pyarrow as pa

ROWS_PER_CHUNK = 65_536


class RowBuffer:
    """Rows of one schema, converted to Arrow every ROWS_PER_CHUNK rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.chunks: list[pa.RecordBatch] = []
        self._open: dict[str, list[Any]] = {name: [] for name in schema.names}

    def append(self, **values: Any) -> None:
        for name, column in self._open.items():
            column.append(values[name])
        if len(column) >= ROWS_PER_CHUNK:
            self._close()

    def table(self) -> pa.Table:
        self._close()
        return pa.Table.from_batches(self.chunks, schema=self.schema)

    def _close(self) -> None:
        arrays = [pa.array(self._open[field.name], field.type) for field in self.schema]
        if len(arrays[0]):
            self.chunks.append(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
            self._open = {name: [] for name in self.schema.names}
