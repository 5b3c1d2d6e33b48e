"""Columns of tables as arrays."""

import pyarrow as pa


def as_array(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array. `combine_chunks` would copy it even where it is one chunk already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
