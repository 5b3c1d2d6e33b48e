"""Encoding pictures as a video file in this process, with PyAV."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

# Timestamps are in quarters of a frame, so that variable frame rates stay exact in the container's time base.
TICKS_PER_FRAME = 4
_UNITY, _UNITY_W = 1 << 16, 1 << 30


@dataclass(frozen=True, kw_only=True)
class VideoTrack:
    """Form of a video track: frame rate, coded size, and how it is encoded."""

    fps: Fraction
    width: int
    height: int
    codec: str = "libx264"
    pixel_format: str = "yuv420p"
    options: Mapping[str, str] = field(default_factory=dict)


def encode_video(
    path: Path, track: VideoTrack, *, pictures: Iterable[np.ndarray], ticks: Iterable[int], picture_format: str
) -> None:
    """Write a file with one video track.

    Args:
        pictures: one array per frame in `picture_format` (an FFmpeg pixel format: gray, yuv420p, ...).
        ticks: presentation timestamp of each frame in units of 1 / (TICKS_PER_FRAME x fps) seconds, ascending.
    """
    import av

    # Single-threaded: the bytes must not depend on the machine, and starting threads for a picture takes longer.
    with av.open(str(path), "w") as container:
        stream = container.add_stream(track.codec, rate=track.fps, options={"threads": "1", **track.options})
        if not isinstance(stream, av.VideoStream):
            raise ValueError(f"{track.codec!r} is not a video codec")
        stream.width, stream.height, stream.pix_fmt = track.width, track.height, track.pixel_format
        time_base = 1 / (track.fps * TICKS_PER_FRAME)
        stream.time_base = stream.codec_context.time_base = time_base
        for picture, tick in zip(pictures, ticks, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format=picture_format)
            frame.pts, frame.time_base = tick, time_base
            container.mux(stream.encode(frame.reformat(format=track.pixel_format, threads=1)))
        container.mux(stream.encode(None))


def set_rotation(path: Path, *, degrees: int, width: int, height: int) -> None:
    """Set the display matrix of an MP4's first track: players rotate its pictures clockwise by `degrees`.

    The muxer has no option for this, so the matrix is written into the track header box (ISO 14496-12, 8.3.2).

    Args:
        width: coded width of the pictures.
        height: coded height of the pictures.
    """
    matrices = {
        90: (0, _UNITY, 0, -_UNITY, 0, 0, height * _UNITY, 0, _UNITY_W),
        180: (-_UNITY, 0, 0, 0, -_UNITY, 0, width * _UNITY, height * _UNITY, _UNITY_W),
        270: (0, -_UNITY, 0, _UNITY, 0, 0, 0, width * _UNITY, _UNITY_W),
    }
    content = bytearray(path.read_bytes())
    box = content.index(b"tkhd") - 4
    if content[box + 8] != 0:
        raise ValueError(f"{path}: the track header has version {content[box + 8]}, expected 0")
    struct.pack_into(">9i", content, box + 48, *matrices[degrees])
    path.write_bytes(content)
