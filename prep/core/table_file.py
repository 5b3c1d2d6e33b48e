"""Parquet files with checksums: the schema metadata holds the SHA-256 of the values of each column.

Parquet readers do not verify the data: a flipped bit often reads as another value. The checksums of the manifest's
files are in manifest.json; layouts and probes are replaced independently of it, so they contain their own. Each column
has one, so that a reader of a few columns of millions of rows leaves the others alone.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.publish import naming, publish_atomically, require_regular

_CHECKSUM_KEY = b"clipmill_sha256"


def write_table_file(path: Path, table: pa.Table) -> None:
    """Publish `table` (columns of strings, numbers and lists of numbers) and its metadata with their checksums."""
    given = table.schema.metadata or {}
    header = _header(path.name, table.num_rows, metadata=given)
    sha256 = b" ".join(_sha256(header, name, table[name]) for name in table.column_names)
    with publish_atomically(path) as temporary:
        pq.write_table(table.replace_schema_metadata({**given, _CHECKSUM_KEY: sha256}), temporary)


def read_table_file(
    path: Path,
    *,
    schema: pa.Schema,
    columns: Collection[str] | None = None,
    expected: Mapping[str, pa.ChunkedArray] | None = None,
) -> pa.Table:
    """Read the table at `path`, or some of its columns, and verify what is read.

    Args:
        columns: names of the columns to return, in the order of `schema`; None for all.
        expected: columns that the table probably has. Where it has them, they are returned, so that they are held once.
            They are read and verified nevertheless: a run repairs a damaged file, whatever it needs of it.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or its columns differ from `schema`.
        OSError: the file cannot be read.
    """
    kept: dict[str, pa.ChunkedArray] = {}
    try:
        require_regular(path, path=path)
        with naming(path), pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(schema):
                raise ValueError(f"unexpected columns: {', '.join(file.schema_arrow.names)}")
            metadata = dict(file.schema_arrow.metadata or {})
            recorded = metadata.pop(_CHECKSUM_KEY, b"").split()
            if len(recorded) != len(schema.names):
                raise ValueError("it has no checksums of its columns")
            header = _header(path.name, file.metadata.num_rows, metadata=metadata)
            for name, sha256 in zip(schema.names, recorded, strict=True):
                if columns is not None and name not in columns:
                    continue
                column = file.read(columns=[name])[name]  # one chunk if it is small, unlike `read_table`
                if sha256 != _sha256(header, name, column):
                    raise ValueError(f"the checksum of {name} does not match its content")
                is_held = expected is not None and name in expected and column.equals(expected[name])
                kept[name] = expected[name] if expected and is_held else column
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(str(error)) from error  # from Thrift, which reports a broken footer as an input error
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    fields = [schema.field(name) for name in kept]
    return pa.table(kept, schema=pa.schema(fields, metadata=metadata or None))


def as_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a table column as one array. `combine_chunks` would copy even a column that already has a single chunk."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _header(file_name: str, num_rows: int, *, metadata: Mapping[bytes, bytes]) -> bytes:
    """Return what the checksum of each column covers beside it: file name, number of rows, and the table's metadata.

    The file name is included to detect files of the same schema, such as layouts, that were swapped.
    """
    return b"\0".join(
        [f"{file_name}\0{num_rows}".encode(), *(part for item in sorted(metadata.items()) for part in item)]
    )


def _sha256(header: bytes, name: str, column: pa.ChunkedArray) -> bytes:
    """Return the checksum (hex) of a column: name, type, nulls and values."""
    digest = hashlib.sha256(header + f"\0{name}\0{column.type}\0".encode())
    if column.null_count:
        digest.update(np.packbits(np.asarray(pc.is_valid(column))).data)
    for values in _values(column):
        digest.update(values)
    return digest.hexdigest().encode()


def _values(column: pa.ChunkedArray) -> Iterator[memoryview]:
    """Yield the lengths of lists and texts, and then what they hold, chunk by chunk: joined, they would be a copy."""
    chunks = column.chunks
    if pa.types.is_list(column.type):
        yield from (np.asarray(pc.fill_null(pc.list_value_length(chunk), 0)).data for chunk in chunks)
        chunks = [chunk.flatten() for chunk in chunks]
    if not pa.types.is_string(column.type):
        yield from (np.asarray(pc.fill_null(chunk, 0) if chunk.null_count else chunk).data for chunk in chunks)
        return
    yield from (np.asarray(pc.fill_null(pc.binary_length(chunk), 0)).data for chunk in chunks)
    for chunk in chunks:
        filled = pc.fill_null(chunk, "") if chunk.null_count else chunk
        offsets = np.frombuffer(filled.buffers()[1], np.int32)[filled.offset : filled.offset + len(filled) + 1]
        if len(filled) and (content := filled.buffers()[2]) is not None:
            yield memoryview(content)[int(offsets[0]) : int(offsets[-1])]
