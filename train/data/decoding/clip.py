"""From the frames of a clip to what a batch has of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from train.augment.colour import colour_kind
from train.data.decoding.crop import CropRule, Rectangle, rectangle_of, square_views
from train.data.decoding.pictures import CroppedPlanes, as_yuv420, crop_clip_in_graph, places_of, rgb_pictures
from train.data.frame_sampling import ChunkTimes, FramePlace, Sampling, locate_frames, moments_of, view_places
from train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av

_Look = tuple[int, int, int]  # width, height and colour of a frame


@dataclass(frozen=True, kw_only=True)
class Views:
    """How often an evaluation looks at a clip: at `num_clips` sets of moments, each cut out as `num_crops` squares."""

    num_clips: int = 1
    num_crops: int = 1

    def __len__(self) -> int:
        return self.num_clips * self.num_crops


@dataclass(frozen=True, kw_only=True)
class ClipShape:
    """How a clip is shown: which moments, as pictures of `size_px` x `size_px`, cut out how in training.

    Attributes:
        views: of an evaluation.
        min_crop_area: part of a picture that a "random" crop keeps at least.
        rgb: hand over RGB in place of YUV 4:2:0 (slower: twice the bytes, converted on the CPU).
    """

    sampling: Sampling
    size_px: int
    crop: CropRule = "random"
    min_crop_area: float = 0.5
    rgb: bool = False
    views: Views = Views()


@dataclass(frozen=True)
class Clip:
    """The pictures of a clip.

    Attributes:
        video: uint8 [T, S * S * 3 / 2], or [T, S, S, 3] as RGB (train.data.batch); of several views one after another,
            the crops of the first moments first.
        colour: matrix and range of what was decoded (train.augment.colour).
    """

    video: NDArray[np.uint8]
    colour: int


def frame_places(
    begin_us: int,
    end_us: int,
    sampling: Sampling,
    chunks: Sequence[ChunkTimes],
    *,
    rng: np.random.Generator | None,
    num_views: int = 1,
) -> list[FramePlace]:
    """The frames of the span [begin_us, end_us), which lies in `chunks`; their rate is that of the first.

    Without `rng` those of `num_views` sets of moments, one set after another.
    """
    fps_num, fps_den = chunks[0].fps_num, chunks[0].fps_den
    places: list[FramePlace] = []
    for at in view_places(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(begin_us, end_us, sampling, fps_num=fps_num, fps_den=fps_den, rng=rng, at=at)
        places += locate_frames(moments, chunks)
    return places


class ClipMaking:
    """A clip that is made of one frame after another, in any order, none of which is needed after it was added.

    One rectangle is cut out of all of them and resized, or each of the views' squares.

    Args:
        num_frames: of one set of moments, or of each of the views'.
        rng: draws the rectangle when the first frame tells its size; None in evaluation, which shows squares.
        key: of the clip's first chunk, for the error.
    """

    def __init__(self, shape: ClipShape, *, num_frames: int, rng: np.random.Generator | None, key: str) -> None:
        self._shape, self._num_frames, self._rng, self._key = shape, num_frames, rng, key
        self._look: _Look | None = None
        self._crops: list[CroppedPlanes] = []

    def add(self, frame: "av.VideoFrame", places: Sequence[int]) -> None:
        """The clip's pictures at `places`.

        Raises:
            SampleFailed: it differs from those before in size or colour, as frames of neighbouring chunks may.
        """
        planar = as_yuv420(frame)
        look = _look_of(planar)
        if self._look is None:
            self._look = look
            self._crops = [
                CroppedPlanes(self._num_frames, rectangle, size_px=self._shape.size_px)
                for rectangle in _rectangles(self._shape, look, rng=self._rng)
            ]
        elif look != self._look:
            raise _differing({self._look, look}, key=self._key)
        for crop in self._crops:
            crop.add(planar, places)

    def clip(self) -> Clip:
        """The clip, when frames for all places were added."""
        assert self._look is not None, "a clip of no frames"
        return _clip_of([crop.planes for crop in self._crops], self._shape, self._look)


def make_clip(
    frames: "Sequence[av.VideoFrame]", shape: ClipShape, *, rng: np.random.Generator | None, in_graph: bool, key: str
) -> Clip:
    """The same of frames that are all there; one that stands in the list several times is resized once.

    Args:
        frames, rng, key: as those of `ClipMaking`.
        in_graph: by libav's filter graph.

    Raises:
        SampleFailed: frames differ in size or colour.
    """
    if in_graph:
        return _clip_in_graph(frames, shape, rng=rng, key=key)
    making = ClipMaking(shape, num_frames=len(frames), rng=rng, key=key)
    for places in places_of(map(id, frames)).values():
        making.add(frames[places[0]], places)
    return making.clip()


def _clip_in_graph(
    frames: "Sequence[av.VideoFrame]", shape: ClipShape, *, rng: np.random.Generator | None, key: str
) -> Clip:
    converted = {id(frame): as_yuv420(frame) for frame in frames}
    planar = [converted[id(frame)] for frame in frames]
    looks = {_look_of(frame) for frame in planar}
    if len(looks) > 1:
        raise _differing(looks, key=key)
    (look,) = looks
    rectangles = _rectangles(shape, look, rng=rng)
    return _clip_of([crop_clip_in_graph(planar, part, size_px=shape.size_px) for part in rectangles], shape, look)


def _rectangles(shape: ClipShape, look: _Look, *, rng: np.random.Generator | None) -> list[Rectangle]:
    width, height, _ = look
    if rng is None and shape.views.num_crops > 1:
        return square_views(width, height, num_crops=shape.views.num_crops)
    return [rectangle_of(shape.crop, width=width, height=height, min_area=shape.min_crop_area, rng=rng)]


def _clip_of(crops: list[NDArray[np.uint8]], shape: ClipShape, look: _Look) -> Clip:
    video = crops[0] if len(crops) == 1 else _by_view(crops, num_frames=shape.sampling.num_frames)
    colour = look[2]
    return Clip(np.stack(rgb_pictures(video, colour, size_px=shape.size_px)) if shape.rgb else video, colour)


def _differing(looks: set[_Look], *, key: str) -> SampleFailed:
    detail = f"chunks of the clip differ in width, height or colour: {sorted(looks)}"
    return SampleFailed(key, reason="chunks_differ", detail=detail)


def _by_view(crops: list[NDArray[np.uint8]], *, num_frames: int) -> NDArray[np.uint8]:
    """Crops [M] of [N * T, ...] pictures to [N * M * T, ...]."""
    stacked = np.stack([crop.reshape(-1, num_frames, *crop.shape[1:]) for crop in crops], axis=1)
    return stacked.reshape(-1, *stacked.shape[3:])


def _look_of(frame: "av.VideoFrame") -> _Look:
    colour = colour_kind(
        colorspace=int(frame.colorspace),
        color_range=int(frame.color_range),
        is_full_format=frame.format.name.startswith("yuvj"),
    )
    return frame.width, frame.height, colour
