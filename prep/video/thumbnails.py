"""Small pictures of single frames of a chunk, decoded from its packet table without touching the other frames."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
from av.video.frame import VideoFrame

from shards.format import PACKET_KEY, PACKET_REFERENCE

_JPEG_QUANTISER = 5  # 2 (best) to 31
_DECODERS = {"av1": "libdav1d"}  # libav's own av1 needs hardware


class NoPicture(Exception):
    """A frame that should be there does not come out of the decoder."""


def spread(num_frames: int, *, num_pictures: int) -> list[int]:
    """Frames in the middle of `num_pictures` equal parts of a chunk."""
    count = min(num_pictures, num_frames)
    return [(2 * part + 1) * num_frames // (2 * count) for part in range(count)]


def decode_frames(content: bytes, row: dict[str, Any], *, frames: Sequence[int]) -> list[VideoFrame]:
    """Decodes single frames of a chunk.

    Args:
        content: the mp4.
        row: of the index (shards.format.VIDEO_FIELDS).
        frames: presentation indices.

    Raises:
        NoPicture: a frame does not decode.
        av.error.FFmpegError: the packets are damaged.
    """
    context = av.CodecContext.create(_DECODERS.get(row["codec"], row["codec"]), "r")
    context.extradata = row["extradata"]
    context.thread_count = 1
    place_of = {frame: place for place, frame in enumerate(row["packet_frame"])}
    pictures = []
    for wanted in frames:
        found = None
        for place in _needed(row["packet_flags"], place_of[wanted]):
            begin = row["packet_offset"][place]
            packet = av.Packet(content[begin : begin + row["packet_size"][place]])
            packet.pts, packet.time_base = row["packet_frame"][place], Fraction(1)
            found = _pick(context.decode(packet), wanted) or found
        found = _pick(context.decode(None), wanted) or found
        context.flush_buffers()
        if found is None:
            raise NoPicture(f"frame {wanted} does not decode")
        pictures.append(found)
    return pictures


def jpeg(frame: VideoFrame, *, height: int) -> bytes:
    """A JPEG picture of `frame`, scaled to `height` pixels."""
    width = max(2, round(frame.width * height / frame.height / 2) * 2)
    small = frame.reformat(width=width, height=height, format="yuvj420p")
    context = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt, context.time_base = width, height, "yuvj420p", Fraction(1, 25)
    context.qmin = context.qmax = _JPEG_QUANTISER
    small.pts, small.time_base = 0, Fraction(1, 25)
    return b"".join(bytes(packet) for packet in [*context.encode(small), *context.encode(None)])


def _needed(flags: Sequence[int], target: int) -> list[int]:
    """Packets to feed for the one at `target`: from its key packet on, references only."""
    begin = max(place for place in range(target + 1) if flags[place] & PACKET_KEY)
    return [place for place in range(begin, target + 1) if place == target or flags[place] & PACKET_REFERENCE]


def _pick(frames: Sequence[Any], wanted: int) -> VideoFrame | None:
    return next((frame for frame in frames if frame.pts == wanted), None)
