"""Where a clip is cropped: one rectangle for all its frames, whatever chunks they come from."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_NUM_TRIES = 10
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3


@dataclass(frozen=True)
class Rectangle:
    """A part of a frame, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_resized_rectangle(width: int, height: int, *, min_area: float, rng: np.random.Generator) -> Rectangle:
    """A rectangle of `min_area` to 1 of the frame's area and of aspect ratio 3:4 to 4:3.

    The rule of torchvision's RandomResizedCrop: ten draws, then the largest centred rectangle of allowed ratio.
    """
    for _ in range(_NUM_TRIES):
        area = width * height * rng.uniform(min_area, 1.0)
        ratio = math.exp(rng.uniform(math.log(_MIN_RATIO), math.log(_MAX_RATIO)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(width - crop_width + 1))
            top = int(rng.integers(height - crop_height + 1))
            return Rectangle(left, top, crop_width, crop_height)
    crop_width = min(width, max(1, round(height * _MAX_RATIO)))
    crop_height = min(height, max(1, round(width / _MIN_RATIO)))
    return _centred(width, height, crop_width, crop_height)


def centre_square(width: int, height: int) -> Rectangle:
    """The largest centred square."""
    side = min(width, height)
    return _centred(width, height, side, side)


def _centred(width: int, height: int, crop_width: int, crop_height: int) -> Rectangle:
    return Rectangle((width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height)


def crop_and_resize(frames: list[NDArray[np.uint8]], rectangle: Rectangle, *, size_px: int) -> "torch.Tensor":
    """Cuts `rectangle` out of RGB frames [H, W, 3] and resizes it: uint8 [T, size_px, size_px, 3]."""
    import torch
    from torch.nn import functional

    part = (
        slice(rectangle.top, rectangle.top + rectangle.height),
        slice(rectangle.left, rectangle.left + rectangle.width),
    )
    stacked = torch.from_numpy(np.stack([frame[part] for frame in frames]))
    resized = functional.interpolate(
        stacked.permute(0, 3, 1, 2), size=(size_px, size_px), mode="bilinear", antialias=True
    )
    return resized.permute(0, 2, 3, 1).contiguous()
