"""Tests of merged tables: a damaged byte in a schema never changes the name, type or source of values."""

from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from clipmill.shards.commit_table import SCHEMA, TableCommits
from clipmill.shards.merged_table import (
    DamagedTable,
    is_table_of,
    open_merged_table,
    verify_columns,
    write_merged_table,
)

NO_COMMITS = TableCommits(SCHEMA.empty_table())


def test_no_flipped_bit_of_a_schema_is_served(tmp_path: Path) -> None:
    path = tmp_path / "chunks.arrow"
    columns = {
        "video_id": pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int32()), pa.array(["a", "b"])),
        "motion": pa.array([1.0, None, 3.0], pa.float32()),
        "cut_times_s": pa.array([[1.0], [], None], pa.list_(pa.float32())),
        "cuts": pa.array([1, 2, 3], pa.int32()),
    }
    write_merged_table(path, pa.table(columns), commits=NO_COMMITS, metadata={b"member": b"mp4"})
    whole = verify_columns(open_merged_table(path), path)
    content = path.read_bytes()
    footer_bytes = int.from_bytes(content[-10:-6], "little")
    noticed = 0
    for at in range(len(content) - 10 - footer_bytes, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 1 << Random(at).randrange(8)
        path.write_bytes(damaged)
        try:
            verified_table = verify_columns(open_merged_table(path), path)
        except DamagedTable:
            noticed += 1
            continue
        if is_table_of(verified_table, NO_COMMITS):  # otherwise the table is stale, and not used
            assert verified_table.equals(whole) and verified_table.schema.equals(whole.schema), f"byte {at}"
            assert verified_table.schema.metadata[b"member"] == b"mp4", f"byte {at}"
    assert noticed > footer_bytes // 12


def test_a_table_without_a_checksum_of_its_schema_is_damaged(tmp_path: Path) -> None:
    path, old = tmp_path / "chunks.arrow", tmp_path / "old.arrow"
    write_merged_table(path, pa.table({"cuts": [1, 2]}), commits=NO_COMMITS, metadata={})
    table = open_merged_table(path)
    metadata = {key: value for key, value in table.schema.metadata.items() if key != b"schema_crc32"}
    assert len(metadata) < len(table.schema.metadata)
    with pa.ipc.new_file(old, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table)
    with pytest.raises(DamagedTable, match="its schema does not match its checksum"):
        open_merged_table(old)
