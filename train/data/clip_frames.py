"""Cropping and resizing of the decoded frames of a clip. All frames of a clip have the same crop and size."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from clipmill.train.augment.colour import colour_encoding, rgb_matrices
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av


# Crop rectangles. All frames of a clip have the same rectangle, even if they come from different chunks.


SIMPLE_FRACTION = 224 / 256  # fraction of the short side in a "simple" crop (AlexNet; AVION for EPIC-KITCHENS-100)
_NUM_TRIES = 10
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3
_LOG_MIN_RATIO, _LOG_MAX_RATIO = math.log(_MIN_RATIO), math.log(_MAX_RATIO)
_SCALES = (1.0, 0.875, 0.75, 0.66)
_SNAP_PX = 3  # a crop side within fewer pixels of the frame's side is set to the frame's side
# Offsets of a multi-scale crop, in quarters of the free space: corners, centre, midpoints of edges, and points halfway
# between centre and corners.
_QUARTERS = ((0, 0), (4, 0), (0, 4), (4, 4), (2, 2), (0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3))

CropRule = Literal["random", "simple", "multi-scale", "centre"]


@dataclass(frozen=True)
class Rectangle:
    """Region of a frame, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_resized_rectangle(width: int, height: int, *, min_area: float, rng: np.random.Generator) -> Rectangle:
    """Return a random rectangle with an aspect ratio from 3:4 to 4:3, and `min_area` to 1 times the frame's area.

    This is the rule of torchvision's RandomResizedCrop: after ten failed attempts, the result is the largest centred
    rectangle with an allowed ratio.
    """
    # Draw all numbers in one call, because calling the generator costs more than everything else.
    for area_draw, ratio_draw, across, down in rng.random((_NUM_TRIES, 4)).tolist():
        area = width * height * (min_area + (1 - min_area) * area_draw)
        ratio = math.exp(_LOG_MIN_RATIO + (_LOG_MAX_RATIO - _LOG_MIN_RATIO) * ratio_draw)
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(across * (width - crop_width + 1)), int(down * (height - crop_height + 1))
            return Rectangle(left, top, crop_width, crop_height)
    crop_width = min(width, max(1, round(height * _MAX_RATIO)))
    crop_height = min(height, max(1, round(width / _MIN_RATIO)))
    return Rectangle((width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height)


def simple_rectangle(width: int, height: int, *, fraction: float, rng: np.random.Generator) -> Rectangle:
    """Return a square at a random position: SimpleRandomCrop (AlexNet; AVION, section 4.2).

    Resizing the square to S pixels is the same as resizing the frame's short side to S / `fraction`, and then cropping.
    The side length and offsets are even, because ffmpeg's crop filter rounds offsets, and because a square of S pixels
    can then be copied without resampling the chroma.

    Args:
        fraction: Side length of the square, as a fraction of the frame's short side.
    """
    short_side = min(width, height)
    side = max(1, min(2 * round(short_side * fraction / 2), short_side - short_side % 2))
    across, down = rng.random(2).tolist()
    left, top = 2 * int(across * ((width - side) // 2 + 1)), 2 * int(down * ((height - side) // 2 + 1))
    return Rectangle(left, top, side, side)


def multi_scale_rectangle(width: int, height: int, *, rng: np.random.Generator) -> Rectangle:
    """Return a random rectangle at one of 13 positions: TSN's multi-scale crop (Wang et al., 2016; VideoMAE).

    Width and height are 1, 7/8, 3/4 or 0.66 of the frame's short side, and are at most one step of this list apart.
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
    """Return the largest centred square."""
    side = min(width, height)
    return Rectangle((width - side) // 2, (height - side) // 2, side, side)


def square_views(width: int, height: int, *, num_crops: int) -> list[Rectangle]:
    """Return squares as wide as the frame's short side, evenly spaced along the long side. One square is centred."""
    side = min(width, height)
    if num_crops == 1:
        return [centre_square(width, height)]
    fractions = [index / (num_crops - 1) for index in range(num_crops)]
    return [Rectangle(round((width - side) * part), round((height - side) * part), side, side) for part in fractions]


def rectangle_of(
    rule: CropRule,
    *,
    width: int,
    height: int,
    min_area: float,
    simple_fraction: float = SIMPLE_FRACTION,
    rng: np.random.Generator | None,
) -> Rectangle:
    """Return the crop rectangle of a clip: the centre square in an evaluation, where `rng` is None."""
    if rng is None or rule == "centre":
        return centre_square(width, height)
    if rule == "simple":
        return simple_rectangle(width, height, fraction=simple_fraction, rng=rng)
    if rule == "multi-scale":
        return multi_scale_rectangle(width, height, rng=rng)
    return random_resized_rectangle(width, height, min_area=min_area, rng=rng)


Planes = NDArray[np.uint8]  # [T, S * S * 3 / 2]
_Item = TypeVar("_Item", bound=Hashable)

_PLANAR = frozenset({"yuv420p", "yuvj420p"})
_AREA_FACTOR = 2  # areas are averaged if width or height shrinks by at least this factor
cv2.setNumThreads(1)  # the loader's threads already use all cores


def as_yuv420(frame: "av.VideoFrame") -> "av.VideoFrame":
    """Return a frame as 8-bit YUV 4:2:0. Other formats are converted by swscale; RGB becomes limited-range BT.601."""
    return frame if frame.format.name in _PLANAR else frame.reformat(format="yuv420p")


def crop_clip(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """Crop frames (yuv420p or yuvj420p) to `rectangle` and resize them; return uint8 [T, size_px * size_px * 3 / 2].

    A frame that occurs several times in the list is resized only once.
    """
    crop = CroppedPlanes(len(frames), rectangle, size_px=size_px)
    for indices in indices_of(map(id, frames)).values():
        crop.add(frames[indices[0]], indices)
    return crop.planes


def indices_of(items: Iterable[_Item]) -> dict[_Item, list[int]]:
    """Return the distinct items, each with the indices at which it occurs."""
    indices: dict[_Item, list[int]] = {}
    for index, item in enumerate(items):
        indices.setdefault(item, []).append(index)
    return indices


class CroppedPlanes:
    """Planes of the frames of a clip. Each frame is cropped to `rectangle` and resized when it is added.

    Resizing is bilinear. If width or height shrinks to half or less, areas are averaged instead, because bilinear
    interpolation would skip pixels. If OpenCV has Intel's IPP (x86), resizing is a third faster and rounds to the
    nearest level, with identical results for SSE4.2, AVX2 and AVX-512. Without IPP, OpenCV rounds the weights, so 5 %
    of the pixels are darker by one level.

    Args:
        size_px: Height of the resized frames, and their width unless `width_px` is given. Both must be even.

    Attributes:
        planes: Planes of the frames, uint8 [num_frames, size_px * width_px * 3 / 2]. They are uninitialised until all
            frames have been added.
    """

    def __init__(self, num_frames: int, rectangle: Rectangle, *, size_px: int, width_px: int | None = None) -> None:
        width_px = width_px or size_px
        # Chroma has half the resolution, so use the smallest chroma rectangle that covers the crop.
        left, top = rectangle.left // 2, rectangle.top // 2
        right, bottom = -(-(rectangle.left + rectangle.width) // 2), -(-(rectangle.top + rectangle.height) // 2)
        chroma = Rectangle(left, top, right - left, bottom - top)
        self.planes: Planes = np.empty((num_frames, size_px * width_px * 3 // 2), np.uint8)
        self._parts = []
        begin = 0
        half = (size_px // 2, width_px // 2)
        for (height, width), part in (((size_px, width_px), rectangle), (half, chroma), (half, chroma)):
            end = begin + height * width
            resized = self.planes[:, begin:end].reshape(num_frames, height, width)
            shrinks_much = part.width >= _AREA_FACTOR * width or part.height >= _AREA_FACTOR * height
            self._parts.append((part, resized, cv2.INTER_AREA if shrinks_much else cv2.INTER_LINEAR))
            begin = end

    def add(self, frame: "av.VideoFrame", indices: Sequence[int]) -> None:
        """Crop and resize a frame (yuv420p or yuvj420p), and store the result at `indices`."""
        first_index, *other_indices = indices
        was_inexact = cv2.ipp.useIPP_NotExact()
        cv2.ipp.setUseIPP_NotExact(True)  # for this thread only
        try:
            for plane, (part, resized, interpolation) in zip(frame.planes, self._parts, strict=True):
                line_bytes = plane.line_size
                size, begin = (part.height, part.width), part.top * line_bytes + part.left
                crop = np.ndarray(size, np.uint8, buffer=memoryview(plane), offset=begin, strides=(line_bytes, 1))
                cv2.resize(crop, resized.shape[:0:-1], dst=resized[first_index], interpolation=interpolation)
        finally:
            cv2.ipp.setUseIPP_NotExact(was_inexact)
        for index in other_indices:
            self.planes[index] = self.planes[first_index]


def crop_clip_in_graph(frames: "Sequence[av.VideoFrame]", rectangle: Rectangle, *, size_px: int) -> Planes:
    """Crop and resize frames in libav's filter graph, as AVION's decoder does (swscale, bilinear), for comparisons."""
    from av.filter import Graph

    graph = Graph()
    source = graph.add_buffer(
        width=frames[0].width, height=frames[0].height, format=frames[0].format, time_base=frames[0].time_base
    )
    part = f"{rectangle.width}:{rectangle.height}:{rectangle.left}:{rectangle.top}:exact=1"
    links = [source, graph.add("crop", part), graph.add("scale", f"{size_px}:{size_px}:flags=bilinear")]
    links += [graph.add("format", frames[0].format.name), graph.add("buffersink")]
    graph.link_nodes(*links).configure()
    resized_frames = []
    for index, frame in enumerate(frames):
        frame.pts = index  # the graph requires increasing timestamps, and a frame may occur twice
        graph.push(frame)
        resized_frames.append(graph.pull().to_ndarray().reshape(-1))
    return np.stack(resized_frames)


def rgb_frames(
    video: NDArray[np.uint8], colour: int, *, size_px: int, width_px: int | None = None
) -> NDArray[np.uint8]:
    """Convert the frames of a YUV clip, uint8 [T, S * W * 3 / 2], to RGB [T, S, W, 3] on the CPU.

    The result equals `clipmill.train.augment.model_input.to_rgb_uint8` up to rounding. OpenCV does the conversion,
    because torch's threads are slow inside the loader's threads.

    Args:
        colour: Colour matrix and range (clipmill.train.augment.colour).
        size_px: Height S.
        width_px: Width W; None for W = S.
    """
    width_px = width_px or size_px
    num_luma = size_px * width_px
    rgb_TSWC = np.empty((len(video), size_px, width_px, 3), np.uint8)
    yuv, full_chroma = np.empty(rgb_TSWC.shape[1:], np.uint8), np.empty((2, size_px, width_px), np.uint8)
    for planes, rgb_SWC in zip(video, rgb_TSWC, strict=True):
        for chroma, plane in zip(planes[num_luma:].reshape(2, size_px // 2, width_px // 2), full_chroma, strict=True):
            cv2.resize(chroma, (width_px, size_px), dst=plane, interpolation=cv2.INTER_LINEAR)
        cv2.merge([planes[:num_luma].reshape(size_px, width_px), *full_chroma], dst=yuv)
        cv2.transform(yuv, _matrices()[colour], dst=rgb_SWC)
    return rgb_TSWC


@cache
def _matrices() -> NDArray[np.float64]:
    return rgb_matrices() * 255


_FrameFormat = tuple[int, int, int]  # width, height and colour encoding of a frame


@dataclass(frozen=True, kw_only=True)
class Views:
    """Views of a clip in an evaluation: `num_clips` temporal views, each with `num_crops` square crops."""

    num_clips: int = 1
    num_crops: int = 1

    def __len__(self) -> int:
        return self.num_clips * self.num_crops


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """Rules for sampling, cropping and resizing the frames of a clip.

    Attributes:
        sampling: Rule that chooses the moments of a clip.
        size_px: Side length of square frames, or height of uncropped frames, in pixels.
        crop: Rule for the crop in training.
        min_crop_area: Minimum area of a "random" crop, as a fraction of the frame's area.
        simple_fraction: Side length of a "simple" crop, as a fraction of the frame's short side.
        rgb: True for RGB; False for YUV 4:2:0. RGB takes twice the memory and is converted on the CPU, so it is slower.
        views: Temporal and spatial views of an evaluation.
        width_px: Width to which complete frames are resized without a crop; None for square crops.
    """

    sampling: Sampling
    size_px: int
    crop: CropRule = "random"
    min_crop_area: float = 0.5
    simple_fraction: float = SIMPLE_FRACTION
    rgb: bool = False
    views: Views = Views()
    width_px: int | None = None


@dataclass(frozen=True)
class Clip:
    """Frames of a clip.

    Attributes:
        video: Frames, uint8 [T, S * S * 3 / 2], or [T, S, S, 3] as RGB (clipmill.train.data.batch). Views follow one
            another, ordered by temporal view and then by crop.
        colour: Colour matrix and range of the decoded frames (clipmill.train.augment.colour).
    """

    video: NDArray[np.uint8]
    colour: int


class ClipBuilder:
    """Builder of a clip. Frames can be added in any order, and can be released once they have been added.

    All frames are cropped to the same rectangle, or to the square of each spatial view, and resized.

    Args:
        num_frames: Total number of frames in all temporal views.
        rng: Random number generator for the crop rectangle; None in an evaluation, which crops squares.
        key: Key of the clip's first chunk, for errors.
    """

    def __init__(self, shape: ClipShape, *, num_frames: int, rng: np.random.Generator | None, key: str) -> None:
        self._shape, self._num_frames, self._rng, self._key = shape, num_frames, rng, key
        self._format: _FrameFormat | None = None
        self._crops: list[CroppedPlanes] = []

    def add(self, frame: "av.VideoFrame", indices: Sequence[int]) -> None:
        """Crop and resize a frame, and store it at these indices of the clip.

        Raises:
            SampleFailed: The frame differs from earlier frames in resolution or colour, because its chunk differs.
        """
        planar_frame = as_yuv420(frame)
        frame_format = _format_of(planar_frame)
        if self._format is None:
            self._format = frame_format
            self._crops = [
                CroppedPlanes(self._num_frames, rectangle, size_px=self._shape.size_px, width_px=self._shape.width_px)
                for rectangle in _rectangles(self._shape, frame_format, rng=self._rng)
            ]
        elif frame_format != self._format:
            raise _format_failure({self._format, frame_format}, key=self._key)
        for crop in self._crops:
            crop.add(planar_frame, indices)

    def clip(self) -> Clip:
        """Return the clip. All frames must have been added."""
        assert self._format is not None, "a clip without frames"
        return _clip_of([crop.planes for crop in self._crops], self._shape, self._format)


def make_clip(
    frames: "Sequence[av.VideoFrame]", shape: ClipShape, *, rng: np.random.Generator | None, in_graph: bool, key: str
) -> Clip:
    """Return the clip that consists of these frames. A frame that occurs several times is resized only once.

    Args:
        rng, key: See `ClipBuilder`.
        in_graph: True to crop and resize in libav's filter graph.

    Raises:
        SampleFailed: Frames differ in resolution or colour.
    """
    if not in_graph:
        builder = ClipBuilder(shape, num_frames=len(frames), rng=rng, key=key)
        for indices in indices_of(map(id, frames)).values():
            builder.add(frames[indices[0]], indices)
        return builder.clip()
    frames_by_id = {id(frame): as_yuv420(frame) for frame in frames}
    planar_frames = [frames_by_id[id(frame)] for frame in frames]
    formats = {_format_of(frame) for frame in planar_frames}
    if len(formats) > 1:
        raise _format_failure(formats, key=key)
    (frame_format,) = formats
    rectangles = _rectangles(shape, frame_format, rng=rng)
    crops = [crop_clip_in_graph(planar_frames, rectangle, size_px=shape.size_px) for rectangle in rectangles]
    return _clip_of(crops, shape, frame_format)


def _rectangles(shape: ClipShape, frame_format: _FrameFormat, *, rng: np.random.Generator | None) -> list[Rectangle]:
    width, height, _ = frame_format
    if shape.width_px is not None:
        return [Rectangle(0, 0, width, height)]
    if rng is None and shape.views.num_crops > 1:
        return square_views(width, height, num_crops=shape.views.num_crops)
    return [
        rectangle_of(
            shape.crop,
            width=width,
            height=height,
            min_area=shape.min_crop_area,
            simple_fraction=shape.simple_fraction,
            rng=rng,
        )
    ]


def _clip_of(crops: list[NDArray[np.uint8]], shape: ClipShape, frame_format: _FrameFormat) -> Clip:
    video, colour = crops[0], frame_format[2]
    if len(crops) > 1:
        # M crops of [N * T, ...] frames become [N * M * T, ...].
        num_frames = shape.sampling.num_frames
        stacked = np.stack([crop.reshape(-1, num_frames, *crop.shape[1:]) for crop in crops], axis=1)
        video = stacked.reshape(-1, *stacked.shape[3:])
    if shape.rgb:
        video = rgb_frames(video, colour, size_px=shape.size_px, width_px=shape.width_px)
    return Clip(video, colour)


def _format_failure(formats: set[_FrameFormat], *, key: str) -> SampleFailed:
    detail = f"chunks of the clip differ in width, height or colour: {sorted(formats)}"
    return SampleFailed(key, reason="chunks_differ", detail=detail)


def _format_of(frame: "av.VideoFrame") -> _FrameFormat:
    colour = colour_encoding(
        colorspace=int(frame.colorspace),
        color_range=int(frame.color_range),
        is_full_format=frame.format.name.startswith("yuvj"),
    )
    return frame.width, frame.height, colour
