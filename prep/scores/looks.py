"""What frames look like: sharpness, brightness, black and frozen shares, bars, and the perceptual hash.

All functions take full-range luma (`clipmill.prep.scores.frames.full_luma`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

import cv2
import numpy as np
from numpy.typing import NDArray

from clipmill.prep.scores.frames import Luma, small_luma

BLACK_LEVEL = 25  # a pixel is black up to here: 0.10 of the range, as in ffmpeg's blackdetect
BLACK_PIXELS = 0.98  # share of such pixels in a black frame, as there
BAR_LEVEL = 9.3  # mean luma of a line of a bar: 24 in limited range, as in ffmpeg's cropdetect
STILL_DIFFERENCE = 3.0  # mean absolute difference in any block of a frozen picture, in levels; compression makes 0.9
MAX_ANEW = 2.0  # levels by which all blocks of a still picture may differ behind a key frame, which is encoded anew
_BLOCK_PX = 8  # of small luma, which has 16 of them along its long side
MIN_FROZEN_S = 1.0  # shorter standstills do not count
_HASH_SIDE, _PICTURE_SIDE = 8, 32


@dataclass(frozen=True)
class Look:
    """What is kept of a decoded frame.

    Attributes:
        luma: small luma.
    """

    frame: int
    luma: Luma
    is_black: bool

    @classmethod
    def of(cls, frame: int, luma: Luma) -> "Look":
        """Reduce the luma of full size of the frame with index `frame`."""
        num_black = np.count_nonzero(luma <= BLACK_LEVEL)
        return cls(frame, small_luma(luma), bool(num_black >= BLACK_PIXELS * luma.size))


def shown_frames(looks: Sequence[Look], *, num_frames: int) -> NDArray[np.float64]:
    """Return for how many frames each look stands: up to halfway to its neighbours; the sum is `num_frames`."""
    frames = np.array([look.frame for look in looks], np.float64)
    borders = np.concatenate([[0.0], (frames[:-1] + frames[1:] + 1) / 2, [float(num_frames)]])
    return np.diff(borders)


def frozen_frames(looks: Sequence[Look], *, num_frames: int, min_frames: float, key_frames: Sequence[int]) -> float:
    """Return how many frames belong to standstills of at least `min_frames` frames.

    As in ffmpeg's freezedetect, a standstill lasts while frames look like its first one, so that slow changes end it.
    Unlike there, a change in a single block ends it too: something small moves. Behind a key frame, where compression
    changes all blocks, frames are also compared with the first one behind it.

    Args:
        key_frames: indices of the key frames, ascending.
    """
    borders = np.concatenate([[0.0], np.cumsum(shown_frames(looks, num_frames=num_frames))])
    groups = [bisect_right(key_frames, look.frame) for look in looks]
    found, begin, first = 0.0, 0, 0  # look with which the standstill begins, and the first one of its last group
    for number in range(1, len(looks) + 1):
        if number < len(looks):
            is_same_group = groups[number] == groups[first]
            if (not is_same_group or _is_still(looks[first].luma, looks[number].luma)) and (
                groups[number] == groups[begin] or _is_still(looks[begin].luma, looks[number].luma, is_anew=True)
            ):
                first = first if is_same_group else number
                continue
        length = float(borders[number] - borders[begin])
        if number - begin > 1 and length >= min(min_frames, num_frames):
            found += length
        begin = first = number
    return found


def _is_still(before: Luma, after: Luma, *, is_anew: bool = False) -> bool:
    """Return True if nothing has moved between two frames.

    Args:
        is_anew: there is a key frame between them. The median of all blocks then counts as compression.
    """
    difference = cv2.absdiff(before, after).astype(np.float32)
    size = (max(1, before.shape[1] // _BLOCK_PX), max(1, before.shape[0] // _BLOCK_PX))
    blocks = cv2.resize(difference, size, interpolation=cv2.INTER_AREA)
    anew = min(float(np.median(blocks)), MAX_ANEW) if is_anew else 0.0
    return bool(blocks.max() <= STILL_DIFFERENCE + anew)


def sharpness(luma: Luma) -> float:
    """Return the variance of the Laplacian, a measure of focus (Pech-Pacheco et al., ICPR 2000)."""
    _, deviation = cv2.meanStdDev(cv2.Laplacian(luma, cv2.CV_16S))
    return float(deviation[0, 0]) ** 2


@dataclass(frozen=True)
class Lines:
    """Mean luma of each row, float32 [H], and each column, float32 [W], of a frame."""

    rows: NDArray[np.float32]
    columns: NDArray[np.float32]

    @classmethod
    def of(cls, luma: Luma) -> "Lines":
        rows, columns = (cv2.reduce(luma, axis, cv2.REDUCE_AVG, dtype=cv2.CV_32F) for axis in (1, 0))
        return cls(np.asarray(rows.ravel(), np.float32), np.asarray(columns.ravel(), np.float32))


@dataclass(frozen=True)
class Active:
    """The part of the picture inside of the bars, in pixels; the ends are exclusive."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def of(self, luma: Luma) -> Luma:
        """Return this part of a luma of full size."""
        return luma[self.top : self.bottom, self.left : self.right]

    def of_small(self, small: Luma, *, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of a small luma that are wholly inside; the full size is `height` x `width`."""
        down, across = small.shape[0] / height, small.shape[1] / width
        return (
            slice(ceil(self.top * down), floor(self.bottom * down)),
            slice(ceil(self.left * across), floor(self.right * across)),
        )


def active_part(lines: Sequence[Lines]) -> Active | None:
    """Return the part inside of the bars: lines at the border that are black in all frames; None if all lines are."""
    rows = np.flatnonzero(np.max([line.rows for line in lines], axis=0) > BAR_LEVEL)
    columns = np.flatnonzero(np.max([line.columns for line in lines], axis=0) > BAR_LEVEL)
    if not len(rows) or not len(columns):
        return None
    return Active(int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)


def phash(rgb: NDArray[np.uint8]) -> int:
    """Return the 64-bit perceptual hash of a picture [H, W, 3]: ImageHash's `phash`, first bit highest.

    It is the sign of the 8 x 8 lowest frequencies of the 32 x 32 luma's cosine transform against their median. Grey and
    the Lanczos filter are computed in Pillow's integers, so that the hashes are equal bit for bit.
    """
    weights = np.array([19595, 38470, 7471], np.int64)  # Pillow's conversion to L
    grey = ((rgb.astype(np.int64) @ weights + 0x8000) >> 16).astype(np.int64)
    for _ in range(2):  # along the width, then along the height
        coefficients = _lanczos(grey.shape[1])
        grey = np.clip((grey @ coefficients + (1 << 21)) >> 22, 0, 255).T
    cosines = _cosines()
    # Rounding makes frequencies that are zero by symmetry zero, whatever the order of the sums.
    low = np.round(cosines @ grey.astype(np.float64) @ cosines.T, 6)
    bits = (low > np.median(low)).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


@lru_cache(maxsize=64)
def _lanczos(length: int) -> NDArray[np.int64]:
    """Pillow's coefficients [length, 32] for reducing `length` pixels to 32 by Lanczos, in units of 2^-22."""
    scale = length / _PICTURE_SIDE
    stretch = max(scale, 1.0)
    support = 3 * stretch
    table = np.zeros((length, _PICTURE_SIDE), np.int64)
    for out in range(_PICTURE_SIDE):
        centre = (out + 0.5) * scale
        begin, end = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), length)
        at = (np.arange(begin, end) - centre + 0.5) / stretch
        weights = np.where(np.abs(at) < 3, np.sinc(at) * np.sinc(at / 3), 0.0)
        scaled = weights / weights.sum() * (1 << 22)
        table[begin:end, out] = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5))
    return table


@lru_cache(maxsize=1)
def _cosines() -> NDArray[np.float64]:
    """The lowest frequencies of the DCT-II, [8, 32], scaled as in scipy.fftpack."""
    position = (2 * np.arange(_PICTURE_SIDE) + 1) * np.pi / (2 * _PICTURE_SIDE)
    return np.asarray(2 * np.cos(np.arange(_HASH_SIDE)[:, None] * position))
