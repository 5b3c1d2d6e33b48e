"""Tests of packet tables: the packets that frames need, and the properties of each chunk in a shard."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.index import index_bytes
from clipmill.shards.packets import PacketTable, PacketTables

KEY, REF, LEAF = PACKET_KEY | PACKET_REFERENCE, PACKET_REFERENCE, 0
Packets = Sequence[tuple[int, int]]  # frame and flags, in decoding order
CLOSED: Packets = [(0, KEY), (2, REF), (1, LEAF), (3, KEY), (5, REF), (4, LEAF)]
# Two frames follow key frame 3 in the stream, but are shown before it.
OPEN: Packets = [(0, KEY), (3, KEY), (1, LEAF), (2, LEAF)]
HEADLESS: Packets = [(0, REF), (1, KEY), (2, REF)]


def tables_of(chunks: Sequence[Packets], streams: Sequence[tuple[str, bytes]]) -> PacketTables:
    """Return the tables of an index with `chunks`, each with a stream.

    Chunk i starts at byte 100 i and has 10 + i bytes.
    """

    def lists(of_packet: Sequence[Sequence[int]], dtype: pa.DataType) -> pa.Array:
        return pa.array([list(values) for values in of_packet], pa.list_(dtype))

    sizes = lists([[1] * len(chunk) for chunk in chunks], pa.uint32())
    index = {
        "packet_offset": lists([range(len(chunk)) for chunk in chunks], pa.uint32()),
        "packet_size": sizes,
        "packet_frame": lists([[frame for frame, _ in chunk] for chunk in chunks], pa.int32()),
        "packet_flags": lists([[flags for _, flags in chunk] for chunk in chunks], pa.uint8()),
        "packet_crc32": sizes,
        "mp4_offset": pa.array([100 * row for row in range(len(chunks))], pa.uint64()),
        "mp4_size": pa.array([10 + row for row in range(len(chunks))], pa.uint64()),
        "mp4_crc32": pa.array(range(len(chunks)), pa.uint32()),
        "codec": pa.array([codec for codec, _ in streams]),
        "extradata": pa.array([extradata for _, extradata in streams], pa.binary()),
    }
    content = pa.py_buffer(index_bytes(pa.table(index).replace_schema_metadata({b"extensions": b"mp4"})))
    return PacketTables(pa.ipc.open_file(content).read_all(), content)


def table_of(packets: Packets) -> PacketTable:
    return tables_of([packets], [("h264", b"")]).packet_table(0)


def test_closed_gops_are_known_of_all_chunks_as_of_each() -> None:
    chunks = [CLOSED, OPEN, [], HEADLESS, CLOSED, CLOSED[:1]]
    tables = tables_of(chunks, [("h264", b"")] * len(chunks))
    closed_gops = [tables.has_closed_gops(row) for row in range(len(chunks))]
    assert closed_gops == [True, False, False, False, True, True]
    assert closed_gops == [tables.packet_table(row).has_closed_gops for row in range(len(chunks))]


def test_chunks_of_any_random_tables_are_told_apart() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        chunks: list[Packets] = []
        for size in random.integers(0, 7, 5).tolist():
            frames, kinds = random.permutation(size).tolist(), random.choice([KEY, REF, LEAF], size).tolist()
            chunks.append(list(zip(sorted(frames) if random.integers(2) else frames, kinds, strict=True)))
        tables = tables_of(chunks, [("h264", b"")] * len(chunks))
        for row in range(len(chunks)):
            assert tables.has_closed_gops(row) == tables.packet_table(row).has_closed_gops, chunks


def test_each_chunk_has_its_stream_and_its_place() -> None:
    streams = [("h264", b"one"), ("h264", b"two"), ("h264", b"one"), ("av1", b"one")]
    tables = tables_of([CLOSED] * 4, streams)
    assert [tables.stream(row) for row in range(4)] == streams
    assert [tables.payload(row) for row in range(4)] == [(0, 10), (100, 11), (200, 12), (300, 13)]


@pytest.mark.parametrize(
    ("frames", "needed"),
    [([0], [0]), ([1], [0, 1, 2]), ([1, 2], [0, 1, 2]), ([4], [3, 4, 5]), ([5, 0, 5], [0, 3, 4])],
)
def test_a_frame_needs_the_references_before_it_in_its_gop(frames: list[int], needed: list[int]) -> None:
    assert table_of(CLOSED).packets_for(frames) == needed


def test_frames_that_a_table_does_not_have_once_are_named() -> None:
    twice: Packets = [(0, KEY), (1, REF), (1, LEAF), (2, LEAF)]
    with pytest.raises(ValueError, match="frame 6 occurs 0 times"):
        table_of(CLOSED).packets_for([0, 6])
    with pytest.raises(ValueError, match="frame 1 occurs 2 times"):
        table_of(twice).packets_for([1])
    assert table_of(twice).packets_for([2]) == [0, 1, 3]
    with pytest.raises(ValueError, match="no keyframe packet precedes the packet of frame 0"):
        table_of(HEADLESS).packets_for([0])
