"""Which bytes of a committed chunk are read, and that these are those written."""

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from shards.damage import Damaged
from shards.packets import PacketTable
from shards.reader import CommittedShard
from train.data.outcomes import SampleFailed

DecodeRule = Literal["packets", "filter", "plain"]


@dataclass(frozen=True)
class ChunkBytes:
    """What was read of one chunk.

    Attributes:
        key: of the chunk.
        frames: presentation indices that are wanted of it.
        codec, extradata: of the stream.
        packets: (presentation index, bytes) in decode order; None where the chunk is decoded by its container.
        whole: the mp4 file, where it is.
    """

    key: str
    frames: frozenset[int]
    codec: str
    extradata: bytes
    packets: list[tuple[int, memoryview]] | None
    whole: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.whole) + sum(len(packet) for _, packet in self.packets or ())


def read_chunk(shard: CommittedShard, row: int, frames: Collection[int], *, rule: DecodeRule, key: str) -> ChunkBytes:
    """The bytes that give `frames` of one chunk, compared with their checksums.

    Packets where the rule is "packets" and GOPs are closed, the whole file in any other case.

    Raises:
        SampleFailed: the chunk cannot be read, or its bytes are not those written.
    """
    try:
        tables = shard.packet_tables
        by_packets = rule == "packets" and tables.has_closed_gops(row)
        packets = read_packets(shard, row, frames, table=tables.of_row(row), key=key) if by_packets else None
        codec, extradata = tables.stream(row)
        return ChunkBytes(
            key=key,
            frames=frozenset(frames),
            codec=codec,
            extradata=extradata,
            packets=packets,
            whole=b"" if by_packets else _whole(shard, row, key=key),
        )
    except (OSError, Damaged) as error:
        raise SampleFailed(key, reason="shard_unreadable", detail=str(error)) from error
    except ValueError as error:
        raise SampleFailed(key, reason="undecodable", detail=str(error)) from error


def has_closed_gops(shard: CommittedShard) -> bool:
    """Whether the first chunk of a shard can be decoded by packets.

    It counts as closed where the index is damaged, which reading will tell.
    """
    try:
        return shard.packet_tables.has_closed_gops(0)
    except (OSError, Damaged, ValueError):
        return True


def read_packets(
    shard: CommittedShard, row: int, frames: Collection[int], *, table: PacketTable, key: str
) -> list[tuple[int, memoryview]]:
    """The packets that give `frames`: (presentation index, bytes) in decode order, each compared with its checksum.

    Raises:
        SampleFailed: a packet lies outside of its chunk, or its bytes are not those written.
        OSError, DamagedTar: the tar cannot be read.
    """
    needed = table.needed_for(frames)
    begins, sizes = table.offset[needed].tolist(), table.size[needed].tolist()
    payload_offset, payload_size = shard.packet_tables.payload(row)
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    if max(ends) > payload_size:
        raise SampleFailed(key, reason="checksum", detail=f"a packet ends at byte {max(ends)} of {payload_size}")
    packets: list[tuple[int, memoryview]] = []
    read_from = read_to = 0
    content = memoryview(b"")
    for place, (begin, end, frame, crc32) in enumerate(
        zip(begins, ends, table.frame[needed].tolist(), table.crc32[needed].tolist(), strict=True)
    ):
        if not read_from <= begin <= end <= read_to:
            read_from, read_to = begin, end
            for next_begin, next_end in zip(begins[place + 1 :], ends[place + 1 :], strict=True):
                if not read_to <= next_begin <= read_to + shard.gap_bytes:
                    break
                read_to = next_end
            content = memoryview(shard.read_range(payload_offset + read_from, read_to - read_from))
        packet = content[begin - read_from : end - read_from]
        if zlib.crc32(packet) != crc32:
            raise _changed(shard, key)
        packets.append((frame, packet))
    return packets


def _whole(shard: CommittedShard, row: int, *, key: str) -> bytes:
    payload = shard.read(row, "mp4")
    if zlib.crc32(payload) != shard.index["mp4_crc32"][row].as_py():
        raise _changed(shard, key)
    return payload


def _changed(shard: CommittedShard, key: str) -> SampleFailed:
    return SampleFailed(key, reason="checksum", detail=f"its bytes in {shard.tar_path} are not those written")
