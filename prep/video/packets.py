"""The packet table of a chunk, and the check of a chunk against its recipe and plan.

Everything is read by demuxing the finished file; no value is taken from the arguments given to the encoder.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO

import av
import av.error
from av.packet import Packet

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE

_H264_SLICE_TYPES = frozenset({1, 2, 3, 4, 5})
_HEVC_LAST_SLICE_TYPE = 31
_HEVC_LAST_SUBLAYER_TYPE = 14  # even types up to this one are sub-layer non-reference pictures (H.265 table 7-1)


@dataclass(frozen=True)
class ChunkFacts:
    """Properties of a demuxed chunk. The packet lists are in decoding order.

    Attributes:
        packet_offset: byte offset of each packet in the file.
        packet_size: size of each packet in bytes.
        packet_frame: presentation index of each packet; 0 is the first frame shown.
        packet_flags: PACKET_KEY and PACKET_REFERENCE of clipmill.shards.format.
        packet_crc32: CRC-32 of each packet's bytes.
    """

    codec: str
    width: int
    height: int
    extradata: bytes
    packet_offset: list[int]
    packet_size: list[int]
    packet_frame: list[int]
    packet_flags: list[int]
    packet_crc32: list[int]

    @property
    def num_frames(self) -> int:
        return len(self.packet_frame)


def read_chunk(content: bytes, *, fps: Fraction) -> ChunkFacts:
    """Demux an MP4 chunk.

    Args:
        content: bytes of the whole file.
        fps: frame rate, used to convert presentation timestamps into indices.

    Raises:
        SourceFailure: frames_differ, if the file is not an MP4 chunk or a packet is not where the container says.
    """
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            stream = container.streams.video[0]
            codec = stream.codec_context.codec.canonical_name
            extradata = bytes(stream.codec_context.extradata or b"")
            is_reference = _reference_test(codec, extradata)
            # Integer arithmetic per packet: a Fraction would cost more than reading the packet.
            frames_per_tick = (stream.time_base or Fraction(0)) * fps
            offsets: list[int] = []
            sizes: list[int] = []
            frames: list[int] = []
            flags: list[int] = []
            crc32s: list[int] = []
            for packet in container.demux(stream):
                if not packet.size:
                    continue
                if packet.pts is None or packet.pos is None:
                    raise SourceFailure(FailureCode.FRAMES_DIFFER, "a packet has no timestamp or no byte position")
                if packet.is_discard:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER, f"the edit list hides the frame at pts {packet.pts} from players"
                    )
                frame, rest = divmod(packet.pts * frames_per_tick.numerator, frames_per_tick.denominator)
                if rest:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER, f"a frame is not on the {fps} fps grid: pts {packet.pts}"
                    )
                crc32 = zlib.crc32(memoryview(packet))
                if zlib.crc32(memoryview(content)[packet.pos : packet.pos + packet.size]) != crc32:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER, f"no packet at byte {packet.pos}, contrary to the container"
                    )
                offsets.append(packet.pos)
                sizes.append(packet.size)
                frames.append(frame)
                flags.append(packet.is_keyframe * PACKET_KEY | is_reference(packet) * PACKET_REFERENCE)
                crc32s.append(crc32)
            return ChunkFacts(
                codec=codec,
                width=stream.width,
                height=stream.height,
                extradata=extradata,
                packet_offset=offsets,
                packet_size=sizes,
                packet_frame=frames,
                packet_flags=flags,
                packet_crc32=crc32s,
            )
    except (av.error.FFmpegError, IndexError, TypeError) as error:
        raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the chunk cannot be read back: {error}") from None


def check_chunk(facts: ChunkFacts, *, num_frames: int, size: tuple[int, int], codec: str, size_bytes: int) -> None:
    """Compare a chunk with its plan.

    Raises:
        SourceFailure: frames_differ, with the first difference.
    """
    differences = [
        (facts.num_frames, num_frames, "frames"),
        ((facts.width, facts.height), size, "pixels"),
        (facts.codec, codec, "codec"),
        (sorted(facts.packet_frame), list(range(num_frames)), "presentation order"),
        (facts.packet_flags[:1], [PACKET_KEY | PACKET_REFERENCE], "first packet's flags"),
        (facts.packet_frame[:1], [0], "first packet's frame"),
        (_inside(facts, size_bytes), True, "packet ranges within the file"),
    ]
    for found, planned, what in differences:
        if found != planned:
            raise SourceFailure(FailureCode.FRAMES_DIFFER, f"{what}: found {_short(found)}, planned {_short(planned)}")


def _inside(facts: ChunkFacts, size_bytes: int) -> bool:
    ends = (offset + size for offset, size in zip(facts.packet_offset, facts.packet_size, strict=True))
    return min(facts.packet_offset, default=0) > 0 and max(ends, default=0) <= size_bytes


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reference_test(codec: str, extradata: bytes) -> Callable[[Packet], bool]:
    """Return a function that tells whether other frames may need a packet; always True if the codec does not say."""
    if codec == "h264" and len(extradata) > 4 and extradata[0] == 1:
        length_bytes = (extradata[4] & 3) + 1
        return lambda packet: _h264_is_reference(memoryview(packet), length_bytes)
    if codec == "hevc" and len(extradata) > 21:
        length_bytes = (extradata[21] & 3) + 1
        return lambda packet: _hevc_is_reference(memoryview(packet), length_bytes)
    return lambda packet: True


def _h264_is_reference(payload: memoryview, length_bytes: int) -> bool:
    """Return True if nal_ref_idc of the packet's first slice is not 0 (H.264 7.3.1)."""
    header = _first_slice(payload, length_bytes, lambda byte: byte & 31 in _H264_SLICE_TYPES)
    return header is None or header >> 5 & 3 != 0


def _hevc_is_reference(payload: memoryview, length_bytes: int) -> bool:
    header = _first_slice(payload, length_bytes, lambda byte: byte >> 1 & 63 <= _HEVC_LAST_SLICE_TYPE)
    unit_type = None if header is None else header >> 1 & 63
    return unit_type is None or unit_type > _HEVC_LAST_SUBLAYER_TYPE or unit_type % 2 == 1


def _first_slice(payload: memoryview, length_bytes: int, is_slice: Callable[[int], bool]) -> int | None:
    position = 0
    while position + length_bytes < len(payload):
        header = payload[position + length_bytes]
        if is_slice(header):
            return header
        position += length_bytes + int.from_bytes(payload[position : position + length_bytes], "big")
    return None
