"""Plain decoding with PyAV: the bytes of a chunk and frame numbers in, RGB frames out.

A wanted frame that does not come out is an error; no other frame stands in for it.
"""

import io
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from train.data.failures import SampleFailed

if TYPE_CHECKING:
    import av.container

RgbFrame = NDArray[np.uint8]  # [H, W, 3]


def decode_frames(
    payload: bytes, frames: Sequence[int], *, fps: Fraction, key_frames: Sequence[int], key: str
) -> list[RgbFrame]:
    """Decodes `frames` (presentation indices, any order, repeats allowed) of the mp4 file `payload`.

    Args:
        fps: frames per second of the chunk, which are constant.
        key_frames: presentation indices at which decoding can begin, ascending.
        key: of the chunk, for the error.

    Raises:
        SampleFailed: the file cannot be decoded, or a frame is not in it.
    """
    import av

    try:
        with av.open(io.BytesIO(payload), mode="r", format="mp4") as container:
            found = _decode(container, sorted(set(frames)), fps=fps, key_frames=key_frames)
    except (av.FFmpegError, IndexError) as error:
        # IndexError: the container has no video stream.
        raise SampleFailed(key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error
    missing = sorted(set(frames) - found.keys())
    if missing:
        raise SampleFailed(key, reason="frame_missing", detail=f"frames {missing} do not come out of the decoder")
    return [found[frame] for frame in frames]


def _decode(
    container: "av.container.InputContainer", wanted: list[int], *, fps: Fraction, key_frames: Sequence[int]
) -> dict[int, RgbFrame]:
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # the loader's threads are the parallel part
    time_base, start = stream.time_base or Fraction(1), stream.start_time or 0
    found: dict[int, RgbFrame] = {}
    decoder = container.decode(stream)
    now = -1  # the last frame that came out
    for target in wanted:
        before = bisect_right(key_frames, target) - 1
        if before > 0 and key_frames[before] > now + 1:
            container.seek(start + round(key_frames[before] / fps / time_base), stream=stream)
            decoder = container.decode(stream)
        for frame in decoder:
            if frame.pts is None:
                continue
            now = round((frame.pts - start) * time_base * fps)
            if now == target:
                found[now] = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
            if now >= target:
                break
    return found
