"""Tests of tables that check themselves: they are read as written, or rejected."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.prep.core.tables import read_table_file, write_table_file

TABLE = pa.table(
    {
        "name": pa.array(["a", None, "", "long " * 20]),
        "number": pa.array([1, None, -3, 2**60], pa.int64()),
        "time_s": pa.array([0.5, None, float("nan"), -0.0]),
        "nothing": pa.nulls(4, pa.string()),
    }
)


@pytest.mark.parametrize(
    "table",
    [TABLE, TABLE.slice(1, 2), TABLE.slice(0, 0), pa.concat_tables([TABLE, TABLE])],
    ids=["whole", "slice", "empty", "two chunks"],
)
def test_a_table_is_read_as_written(tmp_path: Path, table: pa.Table) -> None:
    write_table_file(tmp_path / "t.parquet", table)
    read = read_table_file(tmp_path / "t.parquet", schema=TABLE.schema)
    assert repr(read.to_pylist()) == repr(table.to_pylist()) and not read.schema.metadata


@pytest.mark.parametrize("column", TABLE.column_names)
def test_another_value_under_the_same_checksum_is_refused(tmp_path: Path, column: str) -> None:
    path = tmp_path / "t.parquet"
    write_table_file(path, TABLE)
    stored = pq.read_table(path)
    values = [*TABLE[column].to_pylist()[::-1]] if column != "nothing" else ["", None, None, None]
    at = TABLE.schema.get_field_index(column)
    pq.write_table(stored.set_column(at, TABLE.schema.field(column), pa.array(values, TABLE[column].type)), path)
    with pytest.raises(ValueError, match="checksum"):
        read_table_file(path, schema=TABLE.schema)


def test_files_of_one_schema_that_were_exchanged_are_refused(tmp_path: Path) -> None:
    write_table_file(tmp_path / "t.parquet", TABLE)
    (tmp_path / "t.parquet").rename(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="checksum"):
        read_table_file(tmp_path / "other.parquet", schema=TABLE.schema)


def test_a_table_without_checksum_or_of_other_columns_is_refused(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="the checksums of its columns are missing"):
        read_table_file(tmp_path / "t.parquet", schema=TABLE.schema)
    with pytest.raises(ValueError, match="unexpected columns: name"):
        read_table_file(tmp_path / "t.parquet", schema=pa.schema([("name", pa.string())]))


def _with_other_column(path: Path, column: str) -> None:
    stored = pq.read_table(path)
    values = pa.array(stored[column].to_pylist()[::-1], stored[column].type)
    pq.write_table(stored.set_column(stored.column_names.index(column), stored.schema.field(column), values), path)


def test_a_reader_of_some_columns_verifies_these(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table_file(path, TABLE)
    _with_other_column(path, "number")
    read = read_table_file(path, schema=TABLE.schema, columns=["name", "nothing"])
    assert read.equals(TABLE.select(["name", "nothing"]))
    with pytest.raises(ValueError, match="the checksum of number"):
        read_table_file(path, schema=TABLE.schema, columns=["name", "number"])


def test_an_expected_column_is_returned_if_it_is_the_stored_one(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table_file(path, TABLE)
    parts = pa.chunked_array([TABLE["name"].chunk(0).slice(0, 3), TABLE["name"].chunk(0).slice(3)])
    other = pa.chunked_array([pa.array([2, None, -3, 2**60])])
    read = read_table_file(path, schema=TABLE.schema, expected={"name": parts, "number": other})
    assert read["name"].num_chunks == 2 and read["number"].equals(TABLE["number"])
    assert read["name"].equals(TABLE["name"])
    _with_other_column(path, "number")
    with pytest.raises(ValueError, match="the checksum of number"):
        read_table_file(path, schema=TABLE.schema, expected={"number": TABLE["number"]})
