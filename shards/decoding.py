"""Decode packets without their container, and read the packets that a decoder needs from a tar or a source file."""

import os
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from clipmill.manifests.storage.mirrors import is_remote
from clipmill.shards.packets import PacketTable, SourceFrames
from clipmill.shards.tars import LocalTars

if TYPE_CHECKING:
    import av
    from av import VideoCodecContext

    from clipmill.manifests.storage.objects import Objects

_MAX_CONTEXTS = 8
# libav's own AV1 decoder needs hardware support; dav1d is the software decoder in PyAV's wheels.
_DECODERS = {"av1": "libdav1d"}


class PacketDecoder:
    """Packet decoder that does not open a container. Each thread needs its own decoder.

    The codec contexts of the most recently used pairs of codec and extradata are reused. Reuse does not affect frames.
    """

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, bytes, bool], VideoCodecContext] = OrderedDict()

    def decode(
        self,
        *,
        codec: str,
        extradata: bytes,
        packets: Iterable[tuple[int, bytes | memoryview]],
        is_strict: bool = True,
    ) -> "Iterator[tuple[int, av.VideoFrame]]":
        """Decode packets, and yield (presentation index, frame) of each intact frame.

        A frame is yielded as soon as the decoder outputs it, while it is still in the CPU cache. If the caller does not
        keep the frames, the decoder needs only a few buffers.

        Args:
            codec: Name of the codec in libav: h264, hevc, av1, vp9, mjpeg.
            packets: (presentation index, bytes) of packets in decode order. The first packet is a keyframe, and no
                required reference packet is missing. RESTART separates runs that are decoded independently.
            is_strict: True to raise errors that the decoder could conceal. After a recovery point
                (`PacketTable.has_recovery_points`), a strict decoder also rejects packets because of missing frames
                that it does not need.

        Raises:
            av.FFmpegError: The decoder rejects a packet.
            ValueError: libav lacks the decoder, or the decoder does not output frames in presentation order.
        """
        import av

        context = self._contexts.pop((codec, extradata, is_strict), None)
        if context is None:
            new_context = av.CodecContext.create(_DECODERS.get(codec, codec), "r")
            if not isinstance(new_context, av.VideoCodecContext):
                raise ValueError(f"{codec} is not a video codec")
            context = new_context
            context.thread_count = 1  # the loader's threads already use all cores
            if is_strict:
                context.options = {"err_detect": "explode"}  # report errors, do not conceal them
            context.extradata = extradata or None
            if len(self._contexts) == _MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts[codec, extradata, is_strict] = context
        last_number = -1
        try:
            for frame_number, content in chain(packets, [RESTART]):
                packet = None
                if len(content):
                    packet = av.Packet(content)  # type: ignore[arg-type]  # takes any buffer
                    packet.pts = frame_number
                for frame in context.decode(packet):
                    number = frame.pts or 0
                    # Decoders output frames in presentation order, so the indices must increase.
                    if number <= last_number:
                        raise ValueError(
                            f"the decoder outputs frame {number} of the packet table after frame {last_number}"
                        )
                    last_number = number
                    if not frame.is_corrupt:
                        yield number, frame
                if packet is None:
                    context.flush_buffers()
        except BaseException:
            # Discard the context, so that its state after an invalid packet does not affect the next chunk.
            del self._contexts[codec, extradata, is_strict]
            raise


RESTART = (0, memoryview(b""))  # marker between two runs of packets, at which the decoder is reset


class DamagedPacket(ValueError):
    """The bytes of a packet do not match the index of its chunk."""


class PacketBytes(Protocol):
    """A file that contains packets: the tar of a shard, or a source file.

    Attributes:
        tar_name: Name of the file in messages.
        gap_bytes: Largest gap between two ranges, in bytes, that is cheaper to read than to skip.
    """

    @property
    def tar_name(self) -> str: ...
    @property
    def gap_bytes(self) -> int: ...
    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges (offset, size) of the file.

        Raises:
            DamagedTar: The file is too short.
            OSError: The file cannot be read.
        """
        ...


def read_packets(
    file: PacketBytes, payload: tuple[int, int], table: PacketTable, positions: list[int]
) -> list[tuple[int, memoryview]]:
    """Read and verify packets of a chunk; return their (presentation index, bytes) in decode order.

    Args:
        file: File that contains the packets.
        payload: Offset and size, in bytes, of the part of the file that contains the packets.
        table: Packet table of the chunk.
        positions: Positions of the packets in the table, in ascending order.

    Raises:
        DamagedPacket: A packet is outside its chunk, or does not match its checksum.
        OSError, DamagedTar: The file cannot be read.
    """
    if not positions:
        return []
    starts, sizes = table.offset[positions].tolist(), table.size[positions].tolist()
    payload_offset, payload_size = payload
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    if max(ends) > payload_size:
        raise DamagedPacket(f"a packet ends at byte {max(ends)}, but the payload has {payload_size} bytes")
    # Merge ranges that are close to each other; `range_indices` contains the index of each packet's range.
    ranges: list[tuple[int, int]] = []
    range_indices: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        read_from, read_to = ranges[-1] if ranges else (start, start)
        if ranges and read_from <= start <= read_to + file.gap_bytes:
            ranges[-1] = read_from, max(read_to, end)
        else:
            ranges.append((start, end))
        range_indices.append(len(ranges) - 1)
    contents = file.read_ranges([(payload_offset + start, end - start) for start, end in ranges])
    packets: list[tuple[int, memoryview]] = []
    frames, crc32s = table.frame[positions].tolist(), table.crc32[positions].tolist()
    for start, end, range_index, frame, crc32 in zip(starts, ends, range_indices, frames, crc32s, strict=True):
        read_from = ranges[range_index][0]
        packet = memoryview(contents[range_index])[start - read_from : end - read_from]
        if zlib.crc32(packet) != crc32:
            raise DamagedPacket(f"the bytes of a packet in {file.tar_name} do not match their checksum")
        packets.append((frame, packet))
    return packets


def read_source_packets(
    file: PacketBytes, source: SourceFrames, table: PacketTable, frames: Collection[int], *, is_closed: bool
) -> list[tuple[int, memoryview]]:
    """Read and verify the packets of a source file that `PacketDecoder.decode` needs to decode `frames`.

    Args:
        is_closed: Value of `table.has_closed_gops`.

    Raises:
        DamagedPacket, OSError, DamagedTar: See `read_packets`.
        ValueError: See `PacketTable.packet_runs_for`.
    """
    has_single_run = is_closed and not table.has_recovery_points
    runs = [table.packets_for(frames)] if has_single_run else table.packet_runs_for(frames)
    payload = source.offset, source.size_bytes - source.offset
    packets = read_packets(file, payload, table, list(chain(*runs)))
    if len(runs) == 1:
        return packets
    remaining = iter(packets)
    return [packet for run in runs for packet in (*islice(remaining, len(run)), RESTART)]


class SourceFile:
    """`PacketBytes` of a source file, local or in a bucket.

    Args:
        location: Path or URL of the file.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self.tar_name = f"{location} (which has changed since prep index read it; run prep index again)"
        self.gap_bytes = _REMOTE_GAP_BYTES if is_remote(location) else LocalTars.gap_bytes

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges (offset, size) of the file; raises the same errors as `PacketBytes.read_ranges`."""
        if not is_remote(self._location):
            return _LOCAL_FILES.read_ranges(Path(self._location), ranges)
        from clipmill.manifests.storage.urls import split_url

        root, key = split_url(self._location)
        return _open_bucket(root, os.getpid()).read_ranges(key, ranges)


_REMOTE_GAP_BYTES = 1 << 18
_LOCAL_FILES = LocalTars()  # keeps the most recently read files open


@lru_cache(maxsize=64)
def _open_bucket(root: str, _process: int) -> "Objects":
    from clipmill.manifests.storage.objects import open_objects

    return open_objects(root)
