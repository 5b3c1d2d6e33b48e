"""Which frames of a chunk are analysed, and what is kept of each.

    samples      reference frames about half a second apart, which the decoder needs anyway, and the last frame
    neighbours   the frame a tenth of a second after each sample, for motion
    middle       the middle frame, for the perceptual hash
    refined      all frames between two samples that differ by as much as a cut might (clipmill.prep.scores.cuts)

All values use full-range luma (0 black, 255 white), whatever the range that the codec stores.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import cv2
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange
from numpy.typing import NDArray

from clipmill.shards.format import PACKET_REFERENCE

SAMPLE_STEP_S = Fraction(8, 15)  # 16 frames at 30 frames per second: the distance of the P frames in a comb
NEIGHBOUR_STEP_S = Fraction(1, 10)  # a source of 10 frames per second still moves between the two
SMALL_SIDE_PX = 128  # long side of the small luma
Luma = NDArray[np.uint8]  # [H, W]

_FULL_RANGE = np.clip(np.round((np.arange(256) - 16) * (255 / 219)), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Chosen:
    """Indices of the frames that are decoded in the first pass; ascending.

    Attributes:
        pairs: (sample, neighbour); empty if the chunk has a single frame.
    """

    samples: list[int]
    pairs: list[tuple[int, int]]
    middle: int

    @property
    def all(self) -> list[int]:
        return sorted({*self.samples, *(later for _, later in self.pairs), self.middle})


def choose_frames(
    num_frames: int, *, fps: Fraction, packet_frame: Sequence[int], packet_flags: Sequence[int]
) -> Chosen:
    """Choose the frames of a chunk to analyse, from its packet table (clipmill.shards.format.VIDEO_FIELDS).

    The frame after a sample is the last reference frame within SAMPLE_STEP_S; else the first one within twice that
    time; else the frame at that time, whatever it costs.
    """
    step = max(1, int(SAMPLE_STEP_S * fps))
    references = sorted(
        frame for frame, flags in zip(packet_frame, packet_flags, strict=True) if flags & PACKET_REFERENCE
    )
    samples, last = [0], num_frames - 1
    while samples[-1] < last:
        at = samples[-1]
        after = bisect_right(references, at)
        within = bisect_right(references, at + step)
        if within > after:
            at = references[within - 1]
        elif after < len(references) and references[after] < at + 2 * step:
            at = references[after]
        else:
            at += step
        samples.append(min(at, last))
    gap = min(max(1, round(NEIGHBOUR_STEP_S * fps)), max(last, 1))
    pairs = [(sample, sample + gap) for sample in samples if sample + gap <= last]
    return Chosen(samples, pairs, num_frames // 2)


def full_luma(frame: VideoFrame) -> Luma:
    """Return the luma of a frame in full range, [H, W]."""
    if frame.format.name not in ("yuv420p", "yuvj420p"):
        frame = frame.reformat(format="yuv420p")
    plane = frame.planes[0]
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
    luma = lines[:, : plane.width]
    if frame.format.name == "yuvj420p" or frame.color_range == ColorRange.JPEG:
        return luma.copy()  # the plane belongs to the decoder
    return np.asarray(cv2.LUT(luma, _FULL_RANGE), np.uint8)


def small_luma(luma: Luma) -> Luma:
    """Return the luma with a long side of SMALL_SIDE_PX (never enlarged), each pixel the mean of its area."""
    height, width = luma.shape
    scale = min(1.0, SMALL_SIDE_PX / max(width, height))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(luma, size, interpolation=cv2.INTER_AREA), np.uint8)
