"""Tests that shards beyond the number that a variant keeps open are opened again, with the same content."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.open_data import write_column, write_manifest_of
from clipmill.shards import reader
from clipmill.shards.opening import scan
from clipmill.shards.reader import Variant

NUM_SHARDS = 5


def test_shards_that_are_given_up_are_opened_again_without_reading_all_of_their_indexes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest_of(tmp_path, num_chunks=NUM_SHARDS * 4, num_captions=1)
    write_column(tmp_path, "video", num_chunks=NUM_SHARDS * 4, has_indexes=True, chunks_per_shard=4)
    monkeypatch.setattr(reader, "MAX_KEPT_SHARDS", 2)
    hashed: list[Path] = []

    def count_scan(path: Path) -> Any:
        hashed.append(path)
        return scan(path)

    monkeypatch.setattr(reader, "scan", count_scan)
    variant = Variant.open(tmp_path)

    def visit() -> list[Any]:
        opened_shards = []
        for shard_id in range(NUM_SHARDS):
            tables = variant.shard(shard_id).packet_tables
            opened_shards.append((tables.packet_table(1).offset.tolist(), tables.payload(1), tables.payload_crc32(1)))
        return opened_shards

    first = visit()
    assert first[3] == ([48, 500], (first[0][1][0], 190_000), 13)
    assert visit() == first
    assert len(variant._open_shards) == 2
    assert len(hashed) == len(set(hashed)) == NUM_SHARDS, "each index must be verified once"
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len([line for line in maps if line.endswith(".index.arrow")]) <= 3
    shard = variant.shard(0)
    shard.index_path.touch()  # the path may now be a different file
    shard.require_committed_index()
    assert hashed[NUM_SHARDS:] == [shard.index_path]
