"""Which bytes of a committed chunk are read, and their verification against the checksums of the index."""

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from clipmill.manifests.errors import Inaccessible, UserError
from clipmill.shards.opening import Damaged
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard
from clipmill.train.data.outcomes import SampleFailed

DecodeRule = Literal["packets", "filter", "plain"]


@dataclass(frozen=True)
class ChunkBytes:
    """What was read of a chunk.

    Attributes:
        key: of the chunk.
        frames: presentation indices of the frames that are needed.
        packets: (presentation index, bytes) in decode order; None if the chunk is decoded through its container.
        whole: the mp4 file, if the chunk is decoded through it.
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
    """Read and verify the bytes needed to decode `frames` of a chunk.

    These are packets if the rule is "packets" and the GOPs are closed, otherwise the whole file.

    Raises:
        SampleFailed: the chunk cannot be read, or its bytes do not match their checksum.
        UserError: the bucket refuses the credentials.
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
            whole=b"" if by_packets else _read_whole(shard, row, key=key),
        )
    except UserError:  # credentials that are refused, for this chunk and for all others
        raise
    except (OSError, Damaged, Inaccessible) as error:
        if isinstance(error, Inaccessible) and isinstance(error.cause, UserError):
            raise error.cause from error
        raise SampleFailed(key, reason="shard_unreadable", detail=str(error)) from error
    except ValueError as error:
        raise SampleFailed(key, reason="undecodable", detail=str(error)) from error


def read_packets(
    shard: CommittedShard, row: int, frames: Collection[int], *, table: PacketTable, key: str
) -> list[tuple[int, memoryview]]:
    """Read and verify the packets needed for `frames`: (presentation index, bytes) in decode order.

    Raises:
        SampleFailed: a packet lies outside its chunk, or does not match its checksum.
        OSError, DamagedTar: the tar cannot be read.
    """
    needed = table.needed_for(frames)
    begins, sizes = table.offset[needed].tolist(), table.size[needed].tolist()
    payload_offset, payload_size = shard.packet_tables.payload(row)
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    if max(ends) > payload_size:
        raise SampleFailed(key, reason="checksum", detail=f"a packet ends at byte {max(ends)} of {payload_size}")
    # Ranges that are close to each other are read as one; `of_packet` has the range of each packet.
    ranges: list[tuple[int, int]] = []
    of_packet: list[int] = []
    for begin, end in zip(begins, ends, strict=True):
        read_from, read_to = ranges[-1] if ranges else (begin, begin)
        if ranges and read_from <= begin <= read_to + shard.gap_bytes:
            ranges[-1] = read_from, max(read_to, end)
        else:
            ranges.append((begin, end))
        of_packet.append(len(ranges) - 1)
    contents = shard.read_ranges([(payload_offset + begin, end - begin) for begin, end in ranges])
    packets: list[tuple[int, memoryview]] = []
    frames_of, crc32s = table.frame[needed].tolist(), table.crc32[needed].tolist()
    for begin, end, number, frame, crc32 in zip(begins, ends, of_packet, frames_of, crc32s, strict=True):
        read_from = ranges[number][0]
        packet = memoryview(contents[number])[begin - read_from : end - read_from]
        _verify(packet, crc32, shard=shard, key=key)
        packets.append((frame, packet))
    return packets


def _read_whole(shard: CommittedShard, row: int, *, key: str) -> bytes:
    tables = shard.packet_tables
    payload = shard.read_range(*tables.payload(row))
    _verify(payload, tables.payload_crc32(row), shard=shard, key=key)
    return payload


def _verify(content: bytes | memoryview, crc32: int, *, shard: CommittedShard, key: str) -> None:
    if zlib.crc32(content) != crc32:
        raise SampleFailed(key, reason="checksum", detail=f"its bytes in {shard.tar_name} do not match their checksum")
