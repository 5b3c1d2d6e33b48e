"""From decoded frames to the clip of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.train.augment.colour import colour_kind
from clipmill.train.data.decoding.pictures import (
    SIMPLE_SHARE,
    CroppedPlanes,
    CropRule,
    Rectangle,
    as_yuv420,
    crop_clip_in_graph,
    indices_of,
    rectangle_of,
    rgb_pictures,
    square_views,
)
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av

_FrameFormat = tuple[int, int, int]  # width, height and colour kind of a frame


@dataclass(frozen=True, kw_only=True)
class Views:
    """Views of a clip in an evaluation: `num_clips` sets of moments, each cropped to `num_crops` squares."""

    num_clips: int = 1
    num_crops: int = 1

    def __len__(self) -> int:
        return self.num_clips * self.num_crops


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """How a clip is made: its moments, the size of its frames, and how these are cropped in training.

    Attributes:
        views: of an evaluation.
        min_crop_area: minimum share of a frame's area that a "random" crop keeps.
        simple_share: share of a frame's short side that a "simple" crop keeps.
        rgb: return RGB in place of YUV 4:2:0 (slower: twice the bytes, converted on the CPU).
    """

    sampling: Sampling
    size_px: int
    crop: CropRule = "random"
    min_crop_area: float = 0.5
    simple_share: float = SIMPLE_SHARE
    rgb: bool = False
    views: Views = Views()


@dataclass(frozen=True)
class Clip:
    """The frames of a clip.

    Attributes:
        video: uint8 [T, S * S * 3 / 2], or [T, S, S, 3] as RGB (clipmill.train.data.batch); views follow one another,
            all crops of the first moments first.
        colour: colour matrix and range of the decoded frames (clipmill.train.augment.colour).
    """

    video: NDArray[np.uint8]
    colour: int


class ClipBuilder:
    """A clip built from one frame after another, in any order; a frame is not needed once it was added.

    All frames are cropped to the same rectangle, or to the square of each view, and resized.

    Args:
        num_frames: frames of all sets of moments.
        rng: draws the rectangle once the size of the first frame is known; None in evaluation, which crops squares.
        key: of the clip's first chunk, for the error.
    """

    def __init__(self, shape: ClipShape, *, num_frames: int, rng: np.random.Generator | None, key: str) -> None:
        self._shape, self._num_frames, self._rng, self._key = shape, num_frames, rng, key
        self._format: _FrameFormat | None = None
        self._crops: list[CroppedPlanes] = []

    def add(self, frame: "av.VideoFrame", indices: Sequence[int]) -> None:
        """Crop and resize a frame, and store it at `indices` of the clip.

        Raises:
            SampleFailed: its size or colour differs from earlier frames, as frames of neighbouring chunks may.
        """
        planar = as_yuv420(frame)
        found = _format_of(planar)
        if self._format is None:
            self._format = found
            self._crops = [
                CroppedPlanes(self._num_frames, rectangle, size_px=self._shape.size_px)
                for rectangle in _rectangles(self._shape, found, rng=self._rng)
            ]
        elif found != self._format:
            raise _format_failure({self._format, found}, key=self._key)
        for crop in self._crops:
            crop.add(planar, indices)

    def clip(self) -> Clip:
        """The clip, once all its frames were added."""
        assert self._format is not None, "a clip of no frames"
        return _clip_of([crop.planes for crop in self._crops], self._shape, self._format)


def make_clip(
    frames: "Sequence[av.VideoFrame]", shape: ClipShape, *, rng: np.random.Generator | None, in_graph: bool, key: str
) -> Clip:
    """Build a clip from all its frames; a frame that occurs several times in the list is resized once.

    Args:
        rng, key: see `ClipBuilder`.
        in_graph: crop and resize in libav's filter graph.

    Raises:
        SampleFailed: frames differ in size or colour.
    """
    if not in_graph:
        building = ClipBuilder(shape, num_frames=len(frames), rng=rng, key=key)
        for indices in indices_of(map(id, frames)).values():
            building.add(frames[indices[0]], indices)
        return building.clip()
    converted = {id(frame): as_yuv420(frame) for frame in frames}
    planar = [converted[id(frame)] for frame in frames]
    formats = {_format_of(frame) for frame in planar}
    if len(formats) > 1:
        raise _format_failure(formats, key=key)
    (found,) = formats
    rectangles = _rectangles(shape, found, rng=rng)
    return _clip_of([crop_clip_in_graph(planar, part, size_px=shape.size_px) for part in rectangles], shape, found)


def _rectangles(shape: ClipShape, found: _FrameFormat, *, rng: np.random.Generator | None) -> list[Rectangle]:
    width, height, _ = found
    if rng is None and shape.views.num_crops > 1:
        return square_views(width, height, num_crops=shape.views.num_crops)
    return [
        rectangle_of(
            shape.crop,
            width=width,
            height=height,
            min_area=shape.min_crop_area,
            simple_share=shape.simple_share,
            rng=rng,
        )
    ]


def _clip_of(crops: list[NDArray[np.uint8]], shape: ClipShape, found: _FrameFormat) -> Clip:
    video, colour = crops[0], found[2]
    if len(crops) > 1:
        # Crops [M] of [N * T, ...] frames to [N * M * T, ...].
        num_frames = shape.sampling.num_frames
        stacked = np.stack([crop.reshape(-1, num_frames, *crop.shape[1:]) for crop in crops], axis=1)
        video = stacked.reshape(-1, *stacked.shape[3:])
    return Clip(rgb_pictures(video, colour, size_px=shape.size_px) if shape.rgb else video, colour)


def _format_failure(formats: set[_FrameFormat], *, key: str) -> SampleFailed:
    detail = f"chunks of the clip differ in width, height or colour: {sorted(formats)}"
    return SampleFailed(key, reason="chunks_differ", detail=detail)


def _format_of(frame: "av.VideoFrame") -> _FrameFormat:
    colour = colour_kind(
        colorspace=int(frame.colorspace),
        color_range=int(frame.color_range),
        is_full_format=frame.format.name.startswith("yuvj"),
    )
    return frame.width, frame.height, colour
