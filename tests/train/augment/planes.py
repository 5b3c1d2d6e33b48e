"""Clips of planes, random or made by libav, for the tests of this folder."""

import av
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

MATRIX_NAMES = ("bt601", "bt709", "bt2020")
SWS_MATRIX = (5, 1, 9)  # libswscale's numbers for the same matrices
SWS_RANGE = (1, 2)  # limited, full


def random_planes(num_clips: int, num_frames: int, size_px: int, *, seed: int = 0) -> Bytes:
    """Return random bytes, [B, T, S * S * 3 // 2]; most colours lie outside the RGB range."""
    shape = (num_clips, num_frames, size_px * size_px * 3 // 2)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def mild_planes(num_clips: int, num_frames: int, size_px: int, *, seed: int = 0) -> Bytes:
    """Return planes [B, T, S * S * 3 // 2] whose colours stay within [0, 1] after mild changes."""
    rng = np.random.default_rng(seed)
    luma = rng.integers(90, 150, (num_clips, num_frames, size_px * size_px), dtype=np.uint8)
    chroma = rng.integers(116, 141, (num_clips, num_frames, size_px * size_px // 2), dtype=np.uint8)
    return np.concatenate([luma, chroma], axis=-1)


def planes_of_rgb(rgb: Bytes, *, kind: int) -> Bytes:
    """Convert an image [S, S, 3] to planes [S * S * 3 // 2] with swscale."""
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
        format="yuv420p", dst_colorspace=SWS_MATRIX[kind // 2], dst_color_range=SWS_RANGE[kind % 2]
    )
    return planes_of_frame(frame)


def planes_of_frame(frame: av.VideoFrame) -> Bytes:
    """Return the planes of a yuv420p frame, concatenated without the padding of their rows."""
    sides = [(frame.height, frame.width)] + [(frame.height // 2, frame.width // 2)] * 2
    rows = [
        np.frombuffer(bytes(plane), np.uint8).reshape(-1, plane.line_size)[:height, :width]
        for plane, (height, width) in zip(frame.planes, sides, strict=True)
    ]
    return np.concatenate([plane.reshape(-1) for plane in rows])
