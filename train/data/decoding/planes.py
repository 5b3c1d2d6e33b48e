"""From decoded frames to the planes of a clip: one rectangle cut out of all and resized, as YUV 4:2:0.

A picture of S x S is S * S * 3 / 2 bytes: Y [S, S], then U and V [S / 2, S / 2]. Luma is cut exactly at the rectangle,
chroma at the smallest rectangle of its own, half as fine samples that covers it. Resizing is bilinear, and by area
where a side shrinks to half or less, where bilinear would pass over pixels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from train.data.crop import Rectangle

if TYPE_CHECKING:
    import av

Planes = NDArray[np.uint8]  # [T, S * S * 3 / 2]

_PLANAR = frozenset({"yuv420p", "yuvj420p"})
_SHRINKS_MUCH = 2
# The loader's threads are the parallel part.
cv2.setNumThreads(1)


def as_yuv420(frame: "av.VideoFrame") -> "av.VideoFrame":
    """The frame as 8-bit YUV 4:2:0, converted by swscale where it is not; RGB becomes BT.601 of limited range."""
    return frame if frame.format.name in _PLANAR else frame.reformat(format="yuv420p")


def crop_clip(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """Cuts `rectangle` out of frames (yuv420p or yuvj420p) and resizes it: uint8 [T, size_px * size_px * 3 / 2].

    Frames that stand several times in the list are resized once.
    """
    clip = np.empty((len(frames), size_px * size_px * 3 // 2), np.uint8)
    first_place: dict[int, int] = {}
    for place, frame in enumerate(frames):
        first = first_place.setdefault(id(frame), place)
        if first < place:
            clip[place] = clip[first]
        else:
            _crop_frame(frame, rectangle, size_px=size_px, picture=clip[place])
    return clip


def _crop_frame(frame: "av.VideoFrame", rectangle: Rectangle, *, size_px: int, picture: NDArray[np.uint8]) -> None:
    begin = 0
    for number, plane in enumerate(frame.planes):
        if number == 0:
            side, part = size_px, rectangle
        else:
            side, part = size_px // 2, _half(rectangle)
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
        cut = rows[part.top : part.top + part.height, part.left : part.left + part.width]
        shrinks_much = max(part.width, part.height) >= _SHRINKS_MUCH * side
        how = cv2.INTER_AREA if shrinks_much else cv2.INTER_LINEAR
        target = picture[begin : begin + side * side].reshape(side, side)
        cv2.resize(cut, (side, side), dst=target, interpolation=how)
        begin += side * side


def _half(rectangle: Rectangle) -> Rectangle:
    left, top = rectangle.left // 2, rectangle.top // 2
    right, bottom = -(-(rectangle.left + rectangle.width) // 2), -(-(rectangle.top + rectangle.height) // 2)
    return Rectangle(left, top, right - left, bottom - top)
