"""From the frames of a clip to what a batch has of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from train.augment.colour import colour_kind
from train.data.clips import ChunkTimes, FramePlace, Sampling, locate_frames, moments_of, view_places
from train.data.crop import CropRule, rectangle_of, square_views
from train.data.decoding.filtered import crop_clip_in_graph
from train.data.decoding.planes import as_yuv420, crop_clip
from train.data.decoding.rgb import rgb_pictures
from train.data.failures import SampleFailed

if TYPE_CHECKING:
    import av


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


def make_clip(
    frames: "Sequence[av.VideoFrame]", shape: ClipShape, *, rng: np.random.Generator | None, in_graph: bool, key: str
) -> Clip:
    """Cuts one rectangle out of all frames and resizes it; without `rng` each of the views' squares.

    Args:
        frames: of one set of moments, or of each of the views'.
        rng: as in training, or None as in evaluation.
        in_graph: by libav's filter graph.
        key: of the clip's first chunk, for the error.

    Raises:
        SampleFailed: frames differ in size or colour, as those of neighbouring chunks may.
    """
    planar = _converted(frames)
    looks = {(frame.width, frame.height, _kind(frame)) for frame in planar}
    if len(looks) > 1:
        detail = f"chunks of the clip differ in width, height or colour: {sorted(looks)}"
        raise SampleFailed(key, reason="chunks_differ", detail=detail)
    ((width, height, colour),) = looks
    crop = crop_clip_in_graph if in_graph else crop_clip
    num_crops = 1 if rng is not None else shape.views.num_crops
    if num_crops == 1:
        rectangles = [rectangle_of(shape.crop, width=width, height=height, min_area=shape.min_crop_area, rng=rng)]
    else:
        rectangles = square_views(width, height, num_crops=num_crops)
    crops = [crop(planar, rectangle, size_px=shape.size_px) for rectangle in rectangles]
    clip = Clip(crops[0] if num_crops == 1 else _by_view(crops, num_frames=shape.sampling.num_frames), colour)
    return Clip(np.stack(rgb_pictures(clip.video, colour, size_px=shape.size_px)), colour) if shape.rgb else clip


def _by_view(crops: list[NDArray[np.uint8]], *, num_frames: int) -> NDArray[np.uint8]:
    """Crops [M] of [N * T, ...] pictures to [N * M * T, ...]."""
    stacked = np.stack([crop.reshape(-1, num_frames, *crop.shape[1:]) for crop in crops], axis=1)
    return stacked.reshape(-1, *stacked.shape[3:])


def _converted(frames: "Sequence[av.VideoFrame]") -> "list[av.VideoFrame]":
    """Frames as YUV 4:2:0; one that stands in the list several times stays one object."""
    converted = {id(frame): as_yuv420(frame) for frame in frames}
    return [converted[id(frame)] for frame in frames]


def _kind(frame: "av.VideoFrame") -> int:
    return colour_kind(
        colorspace=int(frame.colorspace),
        color_range=int(frame.color_range),
        is_full_format=frame.format.name.startswith("yuvj"),
    )
