"""Parquet files that check themselves: the schema's metadata hold the SHA-256 of the values.

Parquet itself compares nothing: a flipped bit is often read as another value. A file of the manifest has its
checksum in manifest.json; a layout and the probes are replaced by themselves, so they carry their own.
"""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from manifests.publish import naming, published, require_regular

_CHECKSUM_KEY = b"clipmill_sha256"


def write_table_file(path: Path, table: pa.Table) -> None:
    """Publishes `table` (columns of strings and numbers) and its metadata with their checksum."""
    metadata = {**(table.schema.metadata or {}), _CHECKSUM_KEY: _sha256(path.name, table)}
    with published(path) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata), temporary)


def read_table_file(path: Path, *, schema: pa.Schema) -> pa.Table:
    """The table at `path`, one chunk a column; files of older versions have no checksum.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is damaged, or has other columns than `schema`.
        OSError: it cannot be read.
    """
    try:
        require_regular(path, path=path)
        with naming(path), pq.ParquetFile(path) as file:
            table = file.read()  # one chunk a column, which `read_table` does not give
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(str(error)) from error  # of Thrift, which calls a broken footer an input error
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    if not table.schema.equals(schema):
        raise ValueError(f"its columns are {', '.join(table.schema.names)}")
    metadata = dict(table.schema.metadata or {})
    recorded = metadata.pop(_CHECKSUM_KEY, None)
    table = table.replace_schema_metadata(metadata or None)
    if recorded is not None and recorded != _sha256(path.name, table):
        raise ValueError("its checksum does not match its content")
    return table


def as_array(column: pa.ChunkedArray) -> pa.Array:
    """A column of a table as one array. `combine_chunks` would copy it even where it is one chunk already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _sha256(file_name: str, table: pa.Table) -> bytes:
    """Checksum (hex) of every column's type, nulls and values, of the table's metadata, and of the file's name.

    The name tells apart files of one schema, such as the layouts, that were exchanged.
    """
    digest = hashlib.sha256(f"{file_name}\0{table.num_rows}".encode())
    for key, value in sorted((table.schema.metadata or {}).items()):
        digest.update(b"\0" + key + b"\0" + value)
    for name in table.column_names:
        column = pa.concat_arrays(table[name].chunks) if table[name].num_chunks else pa.array([], table[name].type)
        digest.update(f"\0{name}\0{column.type}\0".encode())
        if column.null_count:
            digest.update(np.packbits(np.asarray(pc.is_valid(column))).tobytes())
            column = pc.fill_null(column, "" if pa.types.is_string(column.type) else 0)
        if pa.types.is_string(column.type):
            digest.update(np.asarray(pc.binary_length(column)).tobytes())
            offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
            if len(column) and (content := column.buffers()[2]) is not None:
                digest.update(memoryview(content)[int(offsets[0]) : int(offsets[-1])])
        else:
            digest.update(np.asarray(column).tobytes())
    return digest.hexdigest().encode()
