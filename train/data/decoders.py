"""Decoders: of packets without their container, of files in memory, and of chunks by either way.

A requested frame that the decoder does not output is an error; no other frame takes its place.
"""

import io
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from clipmill.manifests.errors import Inaccessible, UserError
from clipmill.shards.opening import CONTAINERS, NO_PROTOCOLS, Damaged
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard
from clipmill.train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av
    from av import VideoCodecContext
    from av.container import InputContainer
    from av.video.stream import VideoStream


DecodeRule = Literal["packets", "filter", "plain"]


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes that were read of a chunk.

    Attributes:
        key: Key of the chunk.
        frames: Presentation indices of the frames that are needed.
        codec: Name of the codec in libav.
        extradata: Codec headers.
        packets: (presentation index, bytes) in decode order; None if the chunk is decoded through its container.
        whole: Bytes of the mp4 file, if the chunk is decoded through it.
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

    Packets are read if the rule is "packets" and the GOPs are closed, otherwise the complete file.

    Raises:
        SampleFailed: The chunk cannot be read, or its bytes do not match their checksum.
        UserError: The bucket refuses the credentials.
    """
    try:
        tables = shard.packet_tables
        by_packets = rule == "packets" and tables.has_closed_gops(row)
        packets = read_packets(shard, row, frames, table=tables.of_row(row), key=key) if by_packets else None
        codec, extradata = tables.stream(row)
        whole = b""
        if packets is None:
            whole = shard.read_range(*tables.payload(row))
            _verify(whole, tables.payload_crc32(row), shard=shard, key=key)
        return ChunkBytes(
            key=key,
            frames=frozenset(frames),
            codec=codec,
            extradata=extradata,
            packets=packets,
            whole=whole,
        )
    except UserError:  # refused credentials concern all chunks, not only this one
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
        SampleFailed: A packet lies outside its chunk, or does not match its checksum.
        OSError, DamagedTar: The tar cannot be read.
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


def _verify(content: bytes | memoryview, crc32: int, *, shard: CommittedShard, key: str) -> None:
    if zlib.crc32(content) != crc32:
        raise SampleFailed(key, reason="checksum", detail=f"its bytes in {shard.tar_name} do not match their checksum")


ChunkFrames = dict[int, "av.VideoFrame"]  # frames of one chunk, by presentation index

_MAX_CONTEXTS = 8
# For AV1, libav's own decoder needs hardware; dav1d is the software decoder in PyAV's wheels.
_DECODERS = {"av1": "libdav1d"}
# A file is opened only as one of these containers, and cannot make libav open anything else.
_OPTIONS = {"format_whitelist": CONTAINERS, "protocol_whitelist": NO_PROTOCOLS}
# Twice the pixels of 8K video. A file of a few bytes can claim frames of any size, which a decoder would allocate.
MAX_PIXELS = 1 << 26


class PacketDecoder:
    """Decoder of packets of closed GOPs that opens no container. Each thread needs its own.

    The contexts of the last few codecs and extradata are kept: their output depends only on the packets.
    """

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[str, bytes], VideoCodecContext] = OrderedDict()

    def decode_each(
        self,
        *,
        codec: str,
        extradata: bytes,
        packets: Iterable[tuple[int, bytes | memoryview]],
        use: "Callable[[int, av.VideoFrame], None]",
    ) -> None:
        """Pass each intact frame in `packets` to `use` as soon as the decoder outputs it.

        The frame is then still in the processor's cache. If `use` keeps no frame, the decoder reuses few buffers.

        Args:
            codec: Name of the codec in libav: h264, hevc, av1, vp9, mjpeg.
            packets: (presentation index, bytes) in decode order, from a key packet on, with all references.
            use: Function of the presentation index and the frame.

        Raises:
            av.FFmpegError: The decoder rejects a packet.
            ValueError: libav does not have the decoder, or frames are not output in the order of their indices.
        """
        import av

        context = self._context(codec, extradata)
        last = -1

        def hand_over(frames: "list[av.VideoFrame]") -> None:
            nonlocal last
            for frame in frames:
                number = frame.pts or 0
                # Decoders output frames in presentation order, which they know from the packets themselves.
                if number <= last:
                    raise ValueError(f"the packet table numbers frames {last}, {number} that are shown in this order")
                last = number
                if not frame.is_corrupt:
                    use(number, frame)

        try:
            for frame_number, content in packets:
                packet = av.Packet(content)  # type: ignore[arg-type]  # takes any buffer
                packet.pts = frame_number
                hand_over(context.decode(packet))
            hand_over(context.decode(None))
            context.flush_buffers()
        except BaseException:
            # The state that a broken packet leaves behind must not affect the next chunk.
            del self._contexts[codec, extradata]
            raise

    def _context(self, codec: str, extradata: bytes) -> "VideoCodecContext":
        import av

        context = self._contexts.pop((codec, extradata), None)
        if context is None:
            new = av.CodecContext.create(_DECODERS.get(codec, codec), "r")
            if not isinstance(new, av.VideoCodecContext):
                raise ValueError(f"{codec} is not a video codec")
            context = new
            context.thread_count = 1  # the loader's threads already use all cores
            context.options = {"err_detect": "explode"}  # report errors, do not conceal them
            context.extradata = extradata or None
            if len(self._contexts) == _MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts[codec, extradata] = context
        return context


class PlainVideo:
    """The first video stream of a file in memory, decoded through its container; frames count in presentation order.

    Args:
        content: Bytes of the complete file.

    Attributes:
        pts: Timestamps of all frames, ascending, in units of `time_base` seconds.
        time_base: Unit of timestamps, seconds, exact.
        end_pts: End of the last frame, which lasts as long as the median frame.
        width, height: Size of the frames, pixels.

    Raises:
        av.FFmpegError: The file cannot be opened or read.
        ValueError: The file is truncated or cannot tell whether it is, it has no video stream, its frames are too
            large, or a packet has no timestamp.
    """

    def __init__(self, content: bytes) -> None:
        from clipmill.shards.timeline.truncation import require_complete  # here, because packets need no container

        self._content = content
        with self._open() as (container, stream):
            require_complete(content, format_name=container.format.name)
            self.time_base = stream.time_base or Fraction(1)
            self.width, self.height = stream.width, stream.height
            times: list[int] = []
            key_times: list[int] = []
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                if packet.pts is None:
                    raise ValueError("a packet has no timestamp")
                times.append(packet.pts)
                if packet.is_keyframe:
                    key_times.append(packet.pts)
        if not times:
            raise ValueError("it has no frames")
        self.pts = sorted(times)
        self._key_pts = sorted(key_times)
        gaps = sorted(after - before for before, after in pairwise(self.pts))
        self.end_pts = self.pts[-1] + (gaps[len(gaps) // 2] if gaps else 1)

    def decode(self, frames: Collection[int]) -> "dict[int, av.VideoFrame]":
        """Return the `frames` that the decoder outputs intact, by number; av.FFmpegError if it rejects the file."""
        decoded: dict[int, av.VideoFrame] = {}
        with self._open() as (container, stream):
            decoder = container.decode(stream)
            now: int | None = None  # time of the last frame that was output
            for number in sorted(set(frames)):
                if not 0 <= number < len(self.pts):
                    continue
                target = self.pts[number]
                before = bisect_right(self._key_pts, target) - 1
                # Seeking helps only if it skips to a key frame that has not been reached yet.
                if before > 0 and (now is None or self._key_pts[before] > now):
                    container.seek(self._key_pts[before], stream=stream)
                    decoder = container.decode(stream)
                for frame in decoder:
                    if frame.pts is None:
                        continue
                    now = frame.pts
                    if now == target and not frame.is_corrupt:
                        decoded[number] = frame
                    if now >= target:
                        break
        return decoded

    @contextmanager
    def _open(self) -> "Iterator[tuple[InputContainer, VideoStream]]":
        import av

        content = io.BytesIO(self._content)
        with av.open(content, mode="r", options=_OPTIONS, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise ValueError("it has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError("there is no decoder for its codec")
            if stream.width * stream.height > MAX_PIXELS:
                raise ValueError(f"frames of {stream.width} x {stream.height} are larger than {MAX_PIXELS:,} pixels")
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # the packets may say otherwise
            stream.codec_context.thread_count = 1  # the loader's threads already use all cores
            yield container, stream


class ChunkDecoder:
    """Decoder of chunks, from packets or through the container; each thread has its own contexts."""

    def __init__(self) -> None:
        self._local = threading.local()

    def decode(self, content: ChunkBytes) -> ChunkFrames:
        """Return the frames for which `content` was read; see `decode_each`."""
        frames: ChunkFrames = {}
        self.decode_each(content, frames.__setitem__)
        return frames

    def decode_each(self, content: ChunkBytes, use: "Callable[[int, av.VideoFrame], None]") -> None:
        """Pass each frame for which `content` was read to `use`, with its index, as the decoder outputs it.

        Raises:
            SampleFailed: The chunk cannot be decoded, or the decoder does not output a frame.
        """
        import av

        missing = set(content.frames)

        def use_needed(number: int, frame: av.VideoFrame) -> None:
            if number in missing:
                use(number, frame)
                missing.discard(number)

        try:
            if content.packets is None:
                for number, frame in PlainVideo(content.whole).decode(content.frames).items():
                    use_needed(number, frame)
            else:
                if not hasattr(self._local, "decoder"):
                    self._local.decoder = PacketDecoder()
                decoder: PacketDecoder = self._local.decoder
                decoder.decode_each(
                    codec=content.codec, extradata=content.extradata, packets=content.packets, use=use_needed
                )
        except (av.FFmpegError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise SampleFailed(content.key, reason="undecodable", detail=detail) from error
        require_frames(missing, key=content.key)


def require_frames(missing: Collection[int], *, key: str) -> None:
    """Raise SampleFailed if the decoder did not output the frames `missing`."""
    if missing:
        detail = f"the decoder does not output frames {sorted(missing)}"
        raise SampleFailed(key, reason="frame_missing", detail=detail)
