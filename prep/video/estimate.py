"""What a plan will cost, before it is carried out: core-hours and bytes.

Bytes come from the shards that are committed already, else from the bitrate or from measured averages. Core-hours come
from a model with two terms: reading grows with the source's pixels, writing with the output's. Both were fitted to runs
on natural videos; expect the right order of magnitude, not the minute.
"""

from dataclasses import dataclass

import numpy as np

from prep.video.plan import Workload
from prep.video.settings import ChunkSettings, bits_per_second

# Core-seconds for a million pixels, measured on an x86-64 server core at about 3 GHz.
_DECODE_S_PER_MEGAPIXEL = 0.0029
_ENCODE_S_PER_MEGAPIXEL = {
    "h264": 0.0026,
    "hevc": 0.019,
    "av1": 0.014,
    "vp9": 0.045,
    "mjpeg": 0.001,
    "h264_nvenc": 0.0007,
    "hevc_nvenc": 0.0007,
}
_BITS_PER_PIXEL = {
    "h264": 0.13,
    "hevc": 0.1,
    "av1": 0.03,
    "vp9": 0.12,
    "mjpeg": 0.8,
    "h264_nvenc": 0.2,
    "hevc_nvenc": 0.12,
}


@dataclass(frozen=True)
class Estimate:
    """Cost of encoding; what is taken over from old shards costs nothing here."""

    core_hours: float
    size_bytes: float
    video_hours: float


def estimate(work: Workload, *, settings: ChunkSettings, bytes_per_second: float | None) -> Estimate:
    """Cost of encoding `work`.

    Args:
        bytes_per_second: of video, measured on shards of the same variant; None where there are none yet.
    """
    source_pixels = work.width * work.height
    scale = np.minimum(1.0, settings.short_side / np.maximum(1, np.minimum(work.width, work.height)))
    output_megapixels_per_s = source_pixels * scale**2 * float(settings.fps_exact) / 1e6
    source_megapixels_per_s = source_pixels * work.fps / 1e6
    core_s = work.seconds * (
        source_megapixels_per_s * _DECODE_S_PER_MEGAPIXEL
        + output_megapixels_per_s * _ENCODE_S_PER_MEGAPIXEL[settings.codec]
    )
    video_s = float(work.seconds.sum())
    if bytes_per_second is not None:
        size_bytes = video_s * bytes_per_second
    elif settings.bitrate is not None:
        size_bytes = video_s * bits_per_second(settings.bitrate) / 8
    else:
        bits_per_pixel = _BITS_PER_PIXEL[settings.codec]
        size_bytes = float((work.seconds * output_megapixels_per_s).sum()) * 1e6 * bits_per_pixel / 8
    return Estimate(core_hours=float(core_s.sum()) / 3600, size_bytes=size_bytes, video_hours=video_s / 3600)
