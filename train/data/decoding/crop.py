"""Crop rectangles: one for all frames of a clip, whatever chunks they come from."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

_NUM_TRIES = 10
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3
_LOG_MIN_RATIO, _LOG_MAX_RATIO = math.log(_MIN_RATIO), math.log(_MAX_RATIO)
_SCALES = (1.0, 0.875, 0.75, 0.66)
_SNAP_PX = 3  # a side this close to the frame's own is set to it
# Offsets of a multi-scale crop, in quarters of the room left: corners and edges, the centre, and between both.
_QUARTERS = ((0, 0), (4, 0), (0, 4), (4, 4), (2, 2), (0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3))

CropRule = Literal["random", "multi-scale", "centre"]


@dataclass(frozen=True)
class Rectangle:
    """A region of a frame, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_resized_rectangle(width: int, height: int, *, min_area: float, rng: np.random.Generator) -> Rectangle:
    """A random rectangle with `min_area` to 1 of the frame's area and an aspect ratio of 3:4 to 4:3.

    The rule of torchvision's RandomResizedCrop: ten attempts, then the largest centred rectangle of an allowed ratio.
    """
    # All draws at once: a call of the generator costs more than everything else.
    for of_area, of_ratio, across, down in rng.random((_NUM_TRIES, 4)).tolist():
        area = width * height * (min_area + (1 - min_area) * of_area)
        ratio = math.exp(_LOG_MIN_RATIO + (_LOG_MAX_RATIO - _LOG_MIN_RATIO) * of_ratio)
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(across * (width - crop_width + 1)), int(down * (height - crop_height + 1))
            return Rectangle(left, top, crop_width, crop_height)
    crop_width = min(width, max(1, round(height * _MAX_RATIO)))
    crop_height = min(height, max(1, round(width / _MIN_RATIO)))
    return _centred(width, height, crop_width, crop_height)


def multi_scale_rectangle(width: int, height: int, *, rng: np.random.Generator) -> Rectangle:
    """A rectangle at one of 13 offsets, whose sides are 1, 7/8, 3/4 or 0.66 of the short side, at most one step apart.

    The multi-scale crop of TSN (Wang et al., 2016), which VideoMAE uses.
    """
    sides = [int(min(width, height) * scale) for scale in _SCALES]
    widths = [width if abs(side - width) < _SNAP_PX else side for side in sides]
    heights = [height if abs(side - height) < _SNAP_PX else side for side in sides]
    steps = range(len(_SCALES))
    pairs = [(widths[j], heights[i]) for i in steps for j in steps if abs(i - j) <= 1]
    crop_width, crop_height = pairs[int(rng.integers(len(pairs)))]
    across, down = _QUARTERS[int(rng.integers(len(_QUARTERS)))]
    left, top = across * ((width - crop_width) // 4), down * ((height - crop_height) // 4)
    return Rectangle(left, top, max(crop_width, 1), max(crop_height, 1))


def centre_square(width: int, height: int) -> Rectangle:
    """The largest centred square."""
    side = min(width, height)
    return _centred(width, height, side, side)


def square_views(width: int, height: int, *, num_crops: int) -> list[Rectangle]:
    """The largest squares, spread along the longer side from end to end; a single one is in the centre."""
    side = min(width, height)
    if num_crops == 1:
        return [centre_square(width, height)]
    steps = [number / (num_crops - 1) for number in range(num_crops)]
    return [Rectangle(round((width - side) * step), round((height - side) * step), side, side) for step in steps]


def rectangle_of(
    rule: CropRule, *, width: int, height: int, min_area: float, rng: np.random.Generator | None
) -> Rectangle:
    """The crop rectangle of a clip; without `rng`, as in evaluation, the centre square whatever the rule."""
    if rng is None or rule == "centre":
        return centre_square(width, height)
    if rule == "multi-scale":
        return multi_scale_rectangle(width, height, rng=rng)
    return random_resized_rectangle(width, height, min_area=min_area, rng=rng)


def _centred(width: int, height: int, crop_width: int, crop_height: int) -> Rectangle:
    return Rectangle((width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height)
