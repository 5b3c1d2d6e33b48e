"""Write and open the index of a shard: an Arrow IPC file with one row per sample, which readers map into memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.shards.format import BLOCK_BYTES, FORMAT_VERSION
from clipmill.shards.opening import DamagedIndex, open_regular

_FORMAT_KEY = b"clipmill_format"
_EXTENSIONS_KEY = b"extensions"
_DURATION_COLUMNS = ("num_frames", "fps_num", "fps_den")
_ROWS_PER_BATCH = 64  # number of Python rows to collect before conversion; packet tables are much smaller in Arrow


def index_schema(extensions: Sequence[str], *, fields: Sequence[pa.Field]) -> pa.Schema:
    """Return the schema of the indexes of a column.

    Args:
        extensions: Extensions of every sample's members, in order.
        fields: Column-specific fields.

    Raises:
        ValueError: Two columns have the same name.
    """
    columns = [pa.field("key", pa.string(), nullable=False)]
    for extension in extensions:
        columns.append(pa.field(f"{extension}_offset", pa.uint64(), nullable=False))
        columns.append(pa.field(f"{extension}_size", pa.uint64(), nullable=False))
        columns.append(pa.field(f"{extension}_crc32", pa.uint32(), nullable=False))
    columns.extend(fields)
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise ValueError(f"duplicate index columns: {sorted(names)}")
    metadata = {_FORMAT_KEY: str(FORMAT_VERSION).encode(), _EXTENSIONS_KEY: ",".join(extensions).encode()}
    return pa.schema(columns, metadata=metadata)


class IndexBuilder:
    """Index builder that collects rows as Arrow record batches."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._names = set(schema.names)
        self._pending_rows: list[dict[str, Any]] = []
        self._batches: list[pa.RecordBatch] = []

    def append(self, row: dict[str, Any]) -> None:
        """Add one row.

        Raises:
            ValueError: The columns of the row differ from the columns of the schema, or a required value is missing.
        """
        if set(row) != self._names:
            raise ValueError(f"the index row has missing or unknown columns: {sorted(set(row) ^ self._names)}")
        for field in self._schema:
            if row[field.name] is None and not field.nullable:
                raise ValueError(f"the index row of {row['key']!r} has no {field.name}")
        self._pending_rows.append(row)
        if len(self._pending_rows) >= _ROWS_PER_BATCH:
            self._convert()

    def table(self) -> pa.Table:
        """Return all rows, with one Arrow chunk per column."""
        self._convert()
        return pa.Table.from_batches(self._batches, schema=self._schema).combine_chunks()

    def _convert(self) -> None:
        if self._pending_rows:
            self._batches.append(pa.RecordBatch.from_pylist(self._pending_rows, schema=self._schema))
            self._pending_rows = []


def index_bytes(table: pa.Table) -> bytes:
    """Serialize `table` as an index file. Equal tables yield identical bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def open_index(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Map an index into memory. The columns of the table are zero-copy views of the file, in one Arrow chunk each.

    Args:
        columns: Columns to open; None for all. Other columns are neither validated nor read from disk. Columns of
            members that the samples lack are omitted.

    Raises:
        DamagedIndex: The file is not an index of this format, or its structure is damaged. Changed values in an intact
            structure are detected only with the commit's checksum (clipmill.shards.verify).
        FileNotFoundError: The file does not exist.
        TimeoutError: The file could not be opened in time.
    """
    return open_index_content(path, columns=columns)[0]


def open_index_content(path: Path, *, columns: Sequence[str] | None = None) -> tuple[pa.Table, pa.Buffer]:
    """Return the table from `open_index`, and the mapped content of the file. The columns are views of it.

    Raises:
        DamagedIndex, FileNotFoundError, TimeoutError: See `open_index`.
    """
    from clipmill.manifests.mapped_files import map_arrow_file  # not needed to write an index

    try:
        # `open_regular` has shown that the path is a regular file that opens without blocking, so Arrow may open it.
        descriptor = open_regular(path)
        try:
            with map_arrow_file(path) as mapped:
                content = mapped.read_buffer()
        finally:
            os.close(descriptor)
        table = pa.ipc.open_file(content).read_all()
        missing_names = set(columns or ()).difference(table.column_names)
        omitted_names = {name for name in missing_names if name.rpartition("_")[2] in ("offset", "size", "crc32")}
        selection = table if columns is None else table.select([name for name in columns if name not in omitted_names])
        selection.validate(full=True)
    except (FileNotFoundError, TimeoutError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DamagedIndex(path, f"not a readable Arrow file ({error})") from error
    metadata = table.schema.metadata or {}
    version = metadata.get(_FORMAT_KEY)
    if version != str(FORMAT_VERSION).encode():
        raise DamagedIndex(path, f"it has format {version!r}, expected {FORMAT_VERSION}")
    extensions = extensions_of(table)
    # The column's fields follow the key and the three columns of each member.
    expected_schema = index_schema(extensions, fields=list(table.schema)[1 + 3 * len(extensions) :])
    if not table.schema.equals(expected_schema):
        raise DamagedIndex(path, f"its columns {table.schema.names} do not match its extensions {','.join(extensions)}")
    if table.num_rows == 0 or any(column.num_chunks != 1 for column in table.columns):
        raise DamagedIndex(path, "it does not have exactly one batch with at least one row")
    return selection, content


def index_seconds(path: Path) -> float:
    """Return the duration of the video in a shard in seconds, from its index; 0 if the samples have no duration.

    Raises:
        DamagedIndex, OSError: See `open_index`.
    """
    try:
        index = open_index(path, columns=_DURATION_COLUMNS)
    except DamagedIndex:
        if set(_DURATION_COLUMNS).issubset(open_index(path).column_names):
            raise
        return 0.0
    frames, fps_num, fps_den = (np.asarray(index[name], np.float64) for name in _DURATION_COLUMNS)
    return float((frames * fps_den / fps_num).sum())


def extensions_of(table: pa.Table) -> tuple[str, ...]:
    """Return the extensions of every sample's members, in member order."""
    return tuple((table.schema.metadata or {}).get(_EXTENSIONS_KEY, b"").decode().split(","))


def member_columns(table: pa.Table, kind: str) -> np.ndarray:
    """Return the offset, size or CRC-32 of each member, [rows, extensions], in the order of the members in the tar.

    Args:
        kind: `offset`, `size` or `crc32`.
    """
    columns = [table.column(f"{extension}_{kind}").to_numpy() for extension in extensions_of(table)]
    return np.stack(columns, axis=1)


def energon_index_bytes(table: pa.Table) -> bytes:
    """Return the content of Megatron-Energon's `.tar.idx`: offsets in the tar, u64 [N + 1].

    The first N values are the offsets of each sample's first header; the last value is the end of the last sample.
    Source: Energon's `TarIndexWriter`.
    """
    offsets = member_columns(table, "offset")
    end = padded_size(int(offsets[-1, -1]) + int(member_columns(table, "size")[-1, -1]))
    return np.append(offsets[:, 0] - np.uint64(BLOCK_BYTES), np.uint64(end)).astype("<u8").tobytes()


def padded_size(size_bytes: int) -> int:
    """Round a size up to a multiple of the tar block size."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
