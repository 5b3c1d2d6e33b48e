"""Single frames of a chunk as pictures, decoded with its packet table, and a chunk as a small clip for a browser."""

import io
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import av
from av.video.frame import VideoFrame

from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.pages.figures import CLIP_FPS, small_clip

_JPEG_QUANTISER = 5  # from 2 (best) to 31
_DECODERS = {"av1": "libdav1d"}  # libav's native av1 decoder requires hardware


class NoPicture(Exception):
    """The decoder did not return a requested frame."""


def decode_frames(content: bytes, row: dict[str, Any], *, frames: Sequence[int]) -> list[VideoFrame]:
    """Decode single frames of a chunk.

    Args:
        content: bytes of the MP4 file.
        row: row of the index (clipmill.shards.format.VIDEO_FIELDS).
        frames: presentation indices of the frames.

    Raises:
        NoPicture: a frame could not be decoded.
        av.error.FFmpegError: the packets are damaged.
    """
    context = av.CodecContext.create(_DECODERS.get(row["codec"], row["codec"]), "r")
    context.extradata = row["extradata"]
    context.thread_count = 1
    position_of = {frame: position for position, frame in enumerate(row["packet_frame"])}
    pictures = []
    for wanted in frames:
        found = None
        for position in _needed(row["packet_flags"], position_of[wanted]):
            begin = row["packet_offset"][position]
            packet = av.Packet(content[begin : begin + row["packet_size"][position]])
            packet.pts, packet.time_base = row["packet_frame"][position], Fraction(1)
            found = _pick(context.decode(packet), wanted) or found
        found = _pick(context.decode(None), wanted) or found
        context.flush_buffers()
        if found is None:
            raise NoPicture(f"frame {wanted} cannot be decoded")
        pictures.append(found)
    return pictures


def jpeg(frame: VideoFrame, *, height: int) -> bytes:
    """Encode `frame` as a JPEG, scaled to a height of `height` pixels."""
    width = max(2, round(frame.width * height / frame.height / 2) * 2)
    small = frame.reformat(width=width, height=height, format="yuvj420p")
    context = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt, context.time_base = width, height, "yuvj420p", Fraction(1, 25)
    context.qmin = context.qmax = _JPEG_QUANTISER
    small.pts, small.time_base = 0, Fraction(1, 25)
    return b"".join(bytes(packet) for packet in [*context.encode(small), *context.encode(None)])


def _needed(flags: Sequence[int], target: int) -> list[int]:
    """Return the packets to decode for the packet at `target`: from its key frame on, reference frames only."""
    begin = max(at for at in range(target + 1) if flags[at] & PACKET_KEY)
    return [at for at in range(begin, target + 1) if at == target or flags[at] & PACKET_REFERENCE]


def _pick(frames: Sequence[Any], wanted: int) -> VideoFrame | None:
    return next((frame for frame in frames if frame.pts == wanted), None)


PREVIEW_S = 20.0  # a preview is of the first seconds of a longer chunk


def preview(content: bytes, *, fps: Fraction) -> bytes:
    """Encode a chunk again as H.264 with a short side of 240 pixels and about 12 frames per second.

    Args:
        content: bytes of the MP4 file.
        fps: its frame rate.

    Raises:
        av.error.FFmpegError: it cannot be decoded.
    """
    step = max(1, round(fps / CLIP_FPS))
    with av.open(io.BytesIO(content), "r", format="mp4") as source:
        source.streams.video[0].codec_context.thread_count = 1
        frames = islice(source.decode(video=0), 0, math.ceil(PREVIEW_S * fps), step)
        return small_clip(frames, fps=fps / step)
