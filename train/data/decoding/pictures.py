"""From decoded frames to the planes of a clip: one rectangle cut out of all and resized, as YUV 4:2:0.

A picture of S x S is S * S * 3 / 2 bytes: Y [S, S], then U and V [S / 2, S / 2]. Luma is cut exactly at the rectangle,
chroma at the smallest rectangle of its own, half as fine samples that covers it. Resizing is bilinear, and by area
where a side shrinks to half or less, where bilinear would pass over pixels.

Bilinear is that of Intel's IPP where OpenCV has it (on x86): a third faster, and rounded to the nearest level, the same
with SSE4.2, AVX2 and AVX-512. OpenCV's own, which other machines use, rounds its weights and is 0.05 levels darker: one
pixel in twenty differs, by one level.
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
    """The frame as 8-bit YUV 4:2:0, converted by swscale where it is not; RGB becomes BT.601 of limited range."""
    return frame if frame.format.name in _PLANAR else frame.reformat(format="yuv420p")


def crop_clip(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """Cuts `rectangle` out of frames (yuv420p or yuvj420p) and resizes it: uint8 [T, size_px * size_px * 3 / 2].

    Frames that stand several times in the list are resized once.
    """
    crop = CroppedPlanes(len(frames), rectangle, size_px=size_px)
    for places in places_of(map(id, frames)).values():
        crop.add(frames[places[0]], places)
    return crop.planes


def places_of(items: Iterable[_Item]) -> dict[_Item, list[int]]:
    """Where each of `items` stands among them."""
    places: dict[_Item, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item, []).append(place)
    return places


class CroppedPlanes:
    """The pictures of a clip, each cut out and resized when its frame is there.

    Args:
        num_pictures: T.
        rectangle: what is cut out of every frame.

    Attributes:
        planes: uint8 [T, size_px * size_px * 3 / 2]; a picture that was not added yet has any values.
    """

    def __init__(self, num_pictures: int, rectangle: Rectangle, *, size_px: int) -> None:
        half_px, chroma = size_px // 2, _half(rectangle)
        self.planes: Planes = np.empty((num_pictures, size_px * size_px * 3 // 2), np.uint8)
        self._parts = []
        begin = 0
        for side_px, part in ((size_px, rectangle), (half_px, chroma), (half_px, chroma)):
            end = begin + side_px * side_px
            pictures = self.planes[:, begin:end].reshape(num_pictures, side_px, side_px)
            self._parts.append((part, pictures, _interpolation(part, side_px=side_px)))
            begin = end

    def add(self, frame: "av.VideoFrame", places: Sequence[int]) -> None:
        """The pictures at `places`, from a frame (yuv420p or yuvj420p); it is not needed after that."""
        first, *others = places
        is_free = cv2.ipp.useIPP_NotExact()
        cv2.ipp.setUseIPP_NotExact(True)  # of this thread
        try:
            for plane, (part, pictures, interpolation) in zip(frame.planes, self._parts, strict=True):
                cut = _cut(plane, part)
                cv2.resize(cut, pictures.shape[1:], dst=pictures[first], interpolation=interpolation)
        finally:
            cv2.ipp.setUseIPP_NotExact(is_free)
        for place in others:
            self.planes[place] = self.planes[first]


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


# Cropping and resizing in libav's filter graph, as AVION's decoder does: here to be compared with.


def crop_clip_in_graph(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """As `train.data.decoding.pictures.crop_clip`, by swscale (bilinear)."""
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
        frame.pts = number  # a frame may stand in the list twice, and the graph wants times that rise
        graph.push(frame)
        pictures.append(graph.pull().to_ndarray().reshape(-1))
    return np.stack(pictures)


# RGB on the CPU, for those who want it: by OpenCV, since torch's threads crawl inside the loader's.


def rgb_pictures(video: NDArray[np.uint8], colour: int, *, size_px: int) -> list[NDArray[np.uint8]]:
    """The pictures of a YUV clip, uint8 [T, S * S * 3 / 2], as RGB [S, S, 3].

    The same conversion as `train.augment.pictures.to_rgb_uint8`, but for rounding.

    Args:
        colour: matrix and range (train.augment.colour).
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
