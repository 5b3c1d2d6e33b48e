"""Frames of committed chunks: which way they are decoded, which bytes are read, and that these are those written."""

import threading
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from shards.damage import Damaged
from shards.packets import PacketTable
from shards.reader import CommittedShard
from train.data.decoding.packets import PacketDecoder
from train.data.decoding.plain import PlainVideo
from train.data.failures import SampleFailed

if TYPE_CHECKING:
    import av

DecodeRule = Literal["packets", "filter", "plain"]

# Bytes between two packets that are read along, since a further read would cost more.
_GAP_BYTES = 1 << 14


class ChunkDecoder:
    """Decodes frames of chunks. Safe to use from many threads.

    Args:
        rule: "packets" feeds packets by the packet table, "filter" and "plain" go through the container. Chunks whose
            GOPs are not closed are decoded through the container in any case.
    """

    def __init__(self, rule: DecodeRule) -> None:
        self.rule = rule
        self._local = threading.local()

    def decode(
        self, shard: CommittedShard, row: int, frames: Collection[int], *, key: str
    ) -> "dict[int, av.VideoFrame]":
        """The frames (presentation indices) of one chunk, by their index.

        Args:
            key: of the chunk, for the error.

        Raises:
            SampleFailed: the chunk cannot be read or decoded, its bytes are not those written, or a frame is missing.
        """
        import av

        try:
            table = shard.packet_tables.of_row(row)
            if self.rule == "packets" and table.has_closed_gops:
                found = self._by_packets(shard, row, frames, table=table, key=key)
            else:
                found = PlainVideo(_whole(shard, row, key=key)).decode(frames)
        except (OSError, Damaged) as error:
            if isinstance(error, av.FFmpegError):
                raise _undecodable(key, error) from error
            raise SampleFailed(key, reason="shard_unreadable", detail=str(error)) from error
        except (av.FFmpegError, ValueError) as error:
            raise _undecodable(key, error) from error
        missing = sorted(set(frames) - found.keys())
        if missing:
            raise SampleFailed(key, reason="frame_missing", detail=f"frames {missing} do not come out of the decoder")
        return {frame: found[frame] for frame in frames}

    def _by_packets(
        self, shard: CommittedShard, row: int, frames: Collection[int], *, table: PacketTable, key: str
    ) -> "dict[int, av.VideoFrame]":
        decoder = getattr(self._local, "decoder", None)
        if decoder is None:
            decoder = self._local.decoder = PacketDecoder()
        found: dict[int, av.VideoFrame] = decoder.decode(
            codec=shard.index["codec"][row].as_py(),
            extradata=shard.index["extradata"][row].as_py(),
            packets=read_packets(shard, row, frames, table=table, key=key),
        )
        return found


def has_closed_gops(shard: CommittedShard) -> bool:
    """Whether the first chunk of a shard can be decoded by packets; True where its index is damaged, as reading tells."""
    try:
        return shard.packet_tables.of_row(0).has_closed_gops
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
    payload_offset, payload_size = shard.member_range(row, "mp4")
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
                if not read_to <= next_begin <= read_to + _GAP_BYTES:
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


def _undecodable(key: str, error: Exception) -> SampleFailed:
    return SampleFailed(key, reason="undecodable", detail=f"{type(error).__name__}: {error}")
