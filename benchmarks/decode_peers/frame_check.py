"""Check the frames of a variant's clips against sequential decoding of the same chunk.

Conversions to RGB differ by one or two levels between libraries, so RGB frames are compared by their mean absolute
difference. A frame is correct if it is within MAX_DIFFERENCE of the requested frame, and no other frame of the chunk is
closer by more than a small tolerance (frames repeat in static scenes). YUV planes, which are not converted, must be
equal.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_peers.clip_set import Clip, crop_rgb

MAX_DIFFERENCE = 3.0  # on a scale of 255
_TOLERANCE = 0.1
_REDUCED = slice(None, None, 4)  # every fourth pixel in both dimensions is compared


class ChunkFrames:
    """All frames of a chunk in order, decoded sequentially by PyAV."""

    def __init__(self, path: Path) -> None:
        import av

        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            self.decoded: list[Any] = list(container.decode(stream))

    @cached_property
    def rgb(self) -> list[np.ndarray]:
        """RGB frames [H, W, 3]."""
        return [frame.to_ndarray(format="rgb24") for frame in self.decoded]


def num_wrong_luma(clip: Clip, found: dict[int, Any], frames: ChunkFrames) -> int:
    """Count the decoded frames of a clip, by frame index, whose luma differs from the requested frames."""
    return sum(
        number not in found or bytes(found[number].planes[0]) != bytes(frames.decoded[number].planes[0])
        for number in clip.frames
    )


def num_wrong_rgb(clip: Clip, found: np.ndarray, frames: ChunkFrames) -> int:
    """Count the frames of a clip [T, S, S, 3] that are not the requested frames."""
    shown = np.stack([crop_rgb([picture], clip)[0, _REDUCED, _REDUCED] for picture in frames.rgb])
    small = found[:, _REDUCED, _REDUCED].astype(np.int16)
    differences = np.stack([np.abs(shown - picture).mean((1, 2, 3)) for picture in small])
    asked = differences[np.arange(len(found)), list(clip.frames)]
    is_right = (asked <= MAX_DIFFERENCE) & (asked <= differences.min(1) + _TOLERANCE)
    return int((~is_right).sum())
