"""Write, open and verify merged tables: `chunks.arrow` files, each with the samples of many shards.

Readers map the file into memory. The file has a single batch, so that each column is one array, and all processes on a
machine share its pages. The schema's metadata contains a digest of the commits that the table was built from, so that
readers recognize a stale table. Readers verify the columns that they use: each column's metadata contains the CRC-32 of
its values, and the schema's metadata contains the CRC-32 of the schema, which covers names, types and these checksums.
A missing, stale or damaged table is rebuilt from the indexes, so no data are lost.

clipmill.shards.format defines the columns of the tables.
"""

import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import publish_atomically
from clipmill.manifests.storage.mirrors import read_range
from clipmill.shards.commit_table import TableCommits
from clipmill.shards.opening import Damaged, open_regular

CHUNKS_FILE = "chunks.arrow"
_DIGEST_KEY = b"commits_sha256"
_CRC_KEY = b"crc32"
_SCHEMA_CRC_KEY = b"schema_crc32"
_MAGIC = b"ARROW1\0\0"
_MAX_SCHEMA_BYTES = 1 << 30
_BLOCK_ROWS = 1 << 20  # number of rows to checksum at a time; serializing a block copies it


class DamagedTable(Damaged):
    """A merged table is unreadable, or does not match its checksums."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.args = (f"{path} is damaged: {reason}",)


def _unreadable_error(path: Path, error: Exception) -> DamagedTable:
    return DamagedTable(path, f"not a readable table of {path.parent.parent.name} ({error})")


def write_merged_table(path: Path, table: pa.Table, *, commits: TableCommits, metadata: Mapping[bytes, bytes]) -> None:
    """Publish a merged table.

    Args:
        table: Rows of the table. Each column must have one Arrow chunk.
        commits: Commits of the shards that the rows come from.
        metadata: Additional metadata of the schema.
    """
    fields = [field.with_metadata({_CRC_KEY: _crc32(table[field.name])}) for field in table.schema]
    schema = pa.schema(fields, metadata={**metadata, _DIGEST_KEY: commits.digest})
    schema = schema.with_metadata({**schema.metadata, _SCHEMA_CRC_KEY: _schema_crc32(schema)})
    with publish_atomically(path) as temporary, pa.ipc.new_file(temporary, schema) as writer:
        if len(table):
            writer.write_batch(pa.record_batch([column.chunk(0) for column in table.columns], schema=schema))


def open_merged_table(path: Path) -> pa.Table:
    """Map a merged table and verify its schema.

    The columns are zero-copy views of the file. A table with rows has one Arrow chunk per column.

    Raises:
        FileNotFoundError: The table does not exist.
        DamagedTable: The file is not a readable table with one batch, or its schema does not match the checksum.
        TimeoutError: The file could not be opened in time.
    """
    try:
        descriptor = open_regular(path)
        try:
            with map_arrow_file(path) as mapped:
                file = pa.ipc.open_file(mapped)
                _require_schema(file.schema, path)
                table = file.read_all()
        finally:
            os.close(descriptor)
    except (FileNotFoundError, TimeoutError):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable_error(path, error) from error
    if any(column.num_chunks > 1 for column in table.columns):
        raise DamagedTable(path, "it has more than one batch")
    return table


def verify_columns(table: pa.Table, path: Path, *, columns: Collection[str] | None = None) -> pa.Table:
    """Verify the checksums of columns, and return a table with only these columns.

    Args:
        columns: Names of the columns; None for all.

    Raises:
        DamagedTable: The table lacks a column, or a column does not match its checksum.
    """
    try:
        selection = table.select(table.column_names if columns is None else sorted(columns))
        selection.validate(full=True)
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise _unreadable_error(path, error) from error
    changed_columns = [
        field.name
        for field in selection.schema
        if _crc32(selection[field.name]) != (field.metadata or {}).get(_CRC_KEY)
    ]
    if changed_columns:
        fault = "does not match its checksum" if len(changed_columns) == 1 else "do not match their checksums"
        raise DamagedTable(path, f"{', '.join(changed_columns)} {fault}")
    return selection


def is_table_of(table: pa.Table | pa.Schema, commits: TableCommits) -> bool:
    """Return True if a merged table was built from these commits, according to its schema."""
    schema = table if isinstance(table, pa.Schema) else table.schema
    return (schema.metadata or {}).get(_DIGEST_KEY) == commits.digest


def read_remote_schema(path: Path) -> pa.Schema:
    """Read only the schema of a merged table that is in a bucket, but not on the local disk.

    An Arrow file begins with a magic string (8 bytes with padding), a continuation marker (4 bytes), the size of the
    schema (4 bytes), and the schema.

    Raises:
        DamagedTable: The file does not begin like an Arrow file, or the schema does not match the checksum.
        OSError: The file cannot be read.
    """
    try:
        size = int.from_bytes(read_range(path, len(_MAGIC) + 4, 4), "little", signed=True)
        if not 0 < size <= _MAX_SCHEMA_BYTES:
            raise ValueError(f"implausible schema size: {size} bytes")
        schema = pa.ipc.read_schema(pa.py_buffer(read_range(path, len(_MAGIC), 8 + size)))
        _require_schema(schema, path)
    except (pa.ArrowException, ValueError) as error:
        raise _unreadable_error(path, error) from error
    return schema


def variant_state(variant_dir: Path, commits: TableCommits) -> tuple[object, ...]:
    """Return a value that identifies the commits and the merged table of a variant, for caches of derived arrays."""
    try:
        status = (variant_dir / CHUNKS_FILE).stat()
        file: tuple[int, ...] | None = (status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError:
        file = None
    return variant_dir.name, commits.digest, file


def _require_schema(schema: pa.Schema, path: Path) -> None:
    """Raise DamagedTable unless a schema matches its checksum."""
    if (schema.metadata or {}).get(_SCHEMA_CRC_KEY) != _schema_crc32(schema):
        raise DamagedTable(path, "its schema does not match its checksum")


def _schema_crc32(schema: pa.Schema) -> bytes:
    """Return the CRC-32 (hex) of all fields and metadata of a schema, except the entry for this checksum."""
    fields = [(field.name, str(field.type), field.nullable, sorted((field.metadata or {}).items())) for field in schema]
    metadata = sorted(item for item in (schema.metadata or {}).items() if item[0] != _SCHEMA_CRC_KEY)
    return f"{zlib.crc32(repr((fields, metadata)).encode()):08x}".encode()


def _crc32(column: pa.ChunkedArray) -> bytes:
    """Return the CRC-32 (hex) of a column, including its dictionary, computed block by block."""
    crc = 0
    for chunk in column.chunks:
        for part in [chunk.indices, chunk.dictionary] if pa.types.is_dictionary(chunk.type) else [chunk]:
            for start in range(0, max(len(part), 1), _BLOCK_ROWS):
                block = pa.record_batch([part.slice(start, _BLOCK_ROWS)], names=["values"])
                crc = zlib.crc32(block.serialize(), crc)
    return f"{crc:08x}".encode()
