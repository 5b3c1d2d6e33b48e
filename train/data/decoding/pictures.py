"""From decoded frames to the planes of a clip: all frames are cropped to one rectangle and resized, as YUV 4:2:0.

A frame of S x S takes S * S * 3 / 2 bytes: Y [S, S], then U and V [S / 2, S / 2]. Luma is cropped exactly to the
rectangle, chroma to the smallest rectangle of its own, half as many samples that covers it. Resizing is bilinear, or by
area if a side shrinks to half or less, where bilinear interpolation would skip pixels.

Bilinear resizing uses Intel's IPP where OpenCV has it (on x86): a third faster, rounded to the nearest level, with the
same result for SSE4.2, AVX2 and AVX-512. OpenCV's own implementation, used on other machines, rounds its weights and is
0.05 levels darker: one pixel in twenty differs, by one level.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from train.augment.colour import rgb_matrices
from train.data.decoding.crop import Rectangle

if TYPE_CHECKING:
    import av


Planes = NDArray[np.uint8]  # [T, S * S * 3 / 2]
_Item = TypeVar("_Item", bound=Hashable)

_PLANAR = frozenset({"yuv420p", "yuvj420p"})
_SHRINKS_MUCH = 2
# The loader's threads are the parallel part.
cv2.setNumThreads(1)


def as_yuv420(frame: "av.VideoFrame") -> "av.VideoFrame":
    """The frame as 8-bit YUV 4:2:0, converted by swscale if necessary; RGB becomes BT.601 of limited range."""
    return frame if frame.format.name in _PLANAR else frame.reformat(format="yuv420p")


def crop_clip(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """Crop frames (yuv420p or yuvj420p) to `rectangle` and resize them: uint8 [T, size_px * size_px * 3 / 2].

    A frame that occurs several times in the list is resized once.
    """
    crop = CroppedPlanes(len(frames), rectangle, size_px=size_px)
    for indices in indices_of(map(id, frames)).values():
        crop.add(frames[indices[0]], indices)
    return crop.planes


def indices_of(items: Iterable[_Item]) -> dict[_Item, list[int]]:
    """For each distinct item its indices in `items`."""
    indices: dict[_Item, list[int]] = {}
    for index, item in enumerate(items):
        indices.setdefault(item, []).append(index)
    return indices


class CroppedPlanes:
    """The frames of a clip, each cropped to `rectangle` and resized when it is added.

    Attributes:
        planes: uint8 [num_frames, size_px * size_px * 3 / 2]; uninitialised until all frames were added.
    """

    def __init__(self, num_frames: int, rectangle: Rectangle, *, size_px: int) -> None:
        half_px, chroma = size_px // 2, _half(rectangle)
        self.planes: Planes = np.empty((num_frames, size_px * size_px * 3 // 2), np.uint8)
        self._parts = []
        begin = 0
        for side_px, part in ((size_px, rectangle), (half_px, chroma), (half_px, chroma)):
            end = begin + side_px * side_px
            pictures = self.planes[:, begin:end].reshape(num_frames, side_px, side_px)
            self._parts.append((part, pictures, _interpolation(part, side_px=side_px)))
            begin = end

    def add(self, frame: "av.VideoFrame", indices: Sequence[int]) -> None:
        """Crop and resize a frame (yuv420p or yuvj420p) and store it at `indices`; it is not needed after that."""
        first, *others = indices
        is_free = cv2.ipp.useIPP_NotExact()
        cv2.ipp.setUseIPP_NotExact(True)  # of this thread
        try:
            for plane, (part, pictures, interpolation) in zip(frame.planes, self._parts, strict=True):
                cut = _cut(plane, part)
                cv2.resize(cut, pictures.shape[1:], dst=pictures[first], interpolation=interpolation)
        finally:
            cv2.ipp.setUseIPP_NotExact(is_free)
        for index in others:
            self.planes[index] = self.planes[first]


def _cut(plane: "av.video.plane.VideoPlane", part: Rectangle) -> NDArray[np.uint8]:
    line_bytes = plane.line_size
    size, begin = (part.height, part.width), part.top * line_bytes + part.left
    return np.ndarray(size, np.uint8, buffer=memoryview(plane), offset=begin, strides=(line_bytes, 1))


def _interpolation(part: Rectangle, *, side_px: int) -> int:
    shrinks_much = max(part.width, part.height) >= _SHRINKS_MUCH * side_px
    return cv2.INTER_AREA if shrinks_much else cv2.INTER_LINEAR


def _half(rectangle: Rectangle) -> Rectangle:
    left, top = rectangle.left // 2, rectangle.top // 2
    right, bottom = -(-(rectangle.left + rectangle.width) // 2), -(-(rectangle.top + rectangle.height) // 2)
    return Rectangle(left, top, right - left, bottom - top)


def crop_clip_in_graph(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """The same in libav's filter graph, as AVION's decoder does it (swscale, bilinear); for comparisons."""
    from av.filter import Graph

    graph = Graph()
    source = graph.add_buffer(
        width=frames[0].width, height=frames[0].height, format=frames[0].format, time_base=frames[0].time_base
    )
    part = f"{rectangle.width}:{rectangle.height}:{rectangle.left}:{rectangle.top}:exact=1"
    links = [source, graph.add("crop", part), graph.add("scale", f"{size_px}:{size_px}:flags=bilinear")]
    links += [graph.add("format", frames[0].format.name), graph.add("buffersink")]
    graph.link_nodes(*links).configure()
    pictures = []
    for number, frame in enumerate(frames):
        frame.pts = number  # a frame may occur twice, and the graph requires increasing timestamps
        graph.push(frame)
        pictures.append(graph.pull().to_ndarray().reshape(-1))
    return np.stack(pictures)


def rgb_pictures(video: NDArray[np.uint8], colour: int, *, size_px: int) -> list[NDArray[np.uint8]]:
    """The frames of a YUV clip, uint8 [T, S * S * 3 / 2], as RGB [S, S, 3] on the CPU.

    Equal to `train.augment.pictures.to_rgb_uint8` up to rounding. OpenCV converts them, since torch's threads are slow
    inside the loader's threads.

    Args:
        colour: colour matrix and range (train.augment.colour).
    """
    num_luma, half_px = size_px * size_px, size_px // 2
    pictures = []
    for planes in video:
        chroma = planes[num_luma:].reshape(2, half_px, half_px)
        full = [cv2.resize(plane, (size_px, size_px), interpolation=cv2.INTER_LINEAR) for plane in chroma]
        yuv = cv2.merge([planes[:num_luma].reshape(size_px, size_px), *full])
        pictures.append(np.asarray(cv2.transform(yuv, _matrices()[colour]), dtype=np.uint8))
    return pictures


@cache
def _matrices() -> NDArray[np.float64]:
    return rgb_matrices() * 255
