from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.shards.commits import ShardFiles
from clipmill.shards.format import VIDEO_FIELDS
from clipmill.shards.index import IndexBuilder, extensions_of, index_bytes, index_schema, open_index
from clipmill.shards.opening import DamagedIndex
from clipmill.shards.writer import Sample


def _arrow_file(path: Path, schema: pa.Schema, rows: list[dict[str, object]]) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return path


ROW: dict[str, object] = {"key": "a_000000000", "mp4_offset": 512, "mp4_size": 3, "mp4_crc32": 7}


def test_an_open_index_is_a_view_of_the_file(
    tmp_path: Path, samples: Callable[..., list[Sample]], write_shard: Callable[..., ShardFiles]
) -> None:
    files = write_shard(tmp_path, samples(200))
    allocated = pa.total_allocated_bytes()
    table = open_index(tmp_path / files.index)
    assert pa.total_allocated_bytes() - allocated < 4096 < table.nbytes
    assert extensions_of(table) == ("mp4", "json", "latents.npy")
    assert table.schema.metadata == {b"clipmill_format": b"2", b"extensions": b"mp4,json,latents.npy"}
    # The map outlives the file's name, as required when a shard is replaced while it is read.
    (tmp_path / files.index).unlink()
    assert table.column("key")[199].as_py() == "video_002985000"


def test_open_indexes_hold_no_open_files(
    tmp_path: Path, samples: Callable[..., list[Sample]], write_shard: Callable[..., ShardFiles]
) -> None:
    files = write_shard(tmp_path, samples())
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("open files cannot be counted here")
    before = len(list(descriptors.iterdir()))
    tables = [open_index(tmp_path / files.index) for _ in range(20)]
    assert len(tables) == 20
    assert len(list(descriptors.iterdir())) == before


def test_a_cut_file_is_no_index(
    tmp_path: Path, samples: Callable[..., list[Sample]], write_shard: Callable[..., ShardFiles]
) -> None:
    path = tmp_path / write_shard(tmp_path, samples(40)).index
    content = path.read_bytes()
    for size_bytes in (0, 1, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size_bytes])
        with pytest.raises(DamagedIndex, match=r"index\.arrow"):
            open_index(path)


def test_a_flipped_byte_is_refused_or_leaves_a_table_that_can_be_walked(
    tmp_path: Path,
    samples: Callable[..., list[Sample]],
    write_shard: Callable[..., ShardFiles],
    flip: Callable[[Path, int], None],
) -> None:
    path = tmp_path / write_shard(tmp_path, samples(6)).index
    num_refused = 0
    for offset in range(0, path.stat().st_size, 3):
        flip(path, offset)
        try:
            open_index(path).to_pylist()
        except DamagedIndex:
            num_refused += 1
        flip(path, offset)
    assert num_refused > 0
    assert open_index(path).num_rows == 6


def test_other_arrow_files_are_refused(tmp_path: Path) -> None:
    schema = index_schema(["mp4"], fields=[])
    path = tmp_path / "x.index.arrow"
    assert open_index(_arrow_file(path, schema, [ROW])).num_rows == 1
    for wrong in (
        schema.remove_metadata(),
        schema.with_metadata({"clipmill_format": "3", "extensions": "mp4"}),
        schema.with_metadata({"clipmill_format": "2", "extensions": "mp4,json"}),
        schema.with_metadata({"clipmill_format": "2"}),
        schema.set(1, pa.field("mp4_offset", pa.int64(), nullable=False)),
    ):
        with pytest.raises(DamagedIndex):
            open_index(_arrow_file(path, wrong, [ROW]))
    with pytest.raises(DamagedIndex, match="at least one row"):
        open_index(_arrow_file(path, schema, []))
    with pytest.raises(FileNotFoundError):
        open_index(tmp_path / "missing")


def test_columns_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="mp4_size"):
        index_schema(["mp4"], fields=[pa.field("mp4_size", pa.int64())])


def test_a_packet_table_survives(tmp_path: Path) -> None:
    schema = index_schema(["mp4"], fields=VIDEO_FIELDS)
    builder = IndexBuilder(schema)
    texts = {"video_id": "a", "codec": "h264", "span_fingerprint": "00", "extradata": b"\x01\x00"}
    numbers = dict.fromkeys(["start_ms", "num_frames", "fps_num", "fps_den", "width", "height"], 30)
    rows = [
        {
            **ROW,
            "key": f"a_{number:09d}",
            **texts,
            **numbers,
            "packet_offset": list(range(48, 48 + number)),
            "packet_size": [4_000_000_000] * number,
            "packet_frame": list(range(number)),
            "packet_flags": [3] * number,
            "packet_crc32": [1] * number,
        }
        for number in range(100)
    ]
    for row in rows:
        builder.append(row)
    path = tmp_path / "x.index.arrow"
    path.write_bytes(index_bytes(builder.table()))
    assert open_index(path).to_pylist() == rows
