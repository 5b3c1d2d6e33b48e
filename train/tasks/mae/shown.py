"""The clips of a reconstruction as the results page shows them: which frames, from when, as pictures in the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.latents.loader import LatentLoader
from train.data.latents.segments import times_us
from train.data.latents.sets import SPREAD
from train.data.loader import Visit
from train.evaluation.pages import evenly_spaced, evenly_within, jpeg_uri, png_uri
from train.tasks.mae.reconstruction import Look, Pictures, ShownClip
from train.tasks.mae.samples import ChunkClips
from train.tasks.mae.settings import MaeSettings
from train.weights.converted import IMAGENET_MEAN, IMAGENET_STD

_NUM_SHOWN = 4
_MAX_FRAMES = 4
_FEW_PX = 96  # pictures of smaller sides are enlarged pixel by pixel, and not blurred by JPEG
Samples = ChunkClips | LatentLoader


def chosen_pictures(settings: MaeSettings, num_samples: int, *, every: int) -> Pictures:
    """Clips spread evenly over every `every`-th of `num_samples`, and frames from the middles of equal parts."""
    chosen = evenly_spaced(range(0, num_samples, every), at_most=_NUM_SHOWN)
    frames = evenly_within(range(settings.num_frames), at_most=_MAX_FRAMES)
    return Pictures(frozenset(chosen), frames, _look(settings))


def _look(settings: MaeSettings) -> Look:
    """From what the model takes to values from 0 to 1: the pixels; latents as false colours."""
    if settings.input == "latents":
        return lambda latents: latents / (2 * SPREAD) + 0.5
    mean_C111, std_C111 = (
        torch.tensor(values)[:, None, None, None]
        for values in (settings.init.pixel_mean or IMAGENET_MEAN, settings.init.pixel_std or IMAGENET_STD)
    )
    return lambda pixels: pixels * std_C111.to(pixels.device) + mean_C111.to(pixels.device)


def shown_json(clips: Sequence[ShownClip], samples: Samples, *, num_frames: int) -> list[dict[str, Any]]:
    """Clips as plain values, in the order of their numbers."""
    shown = []
    for clip in sorted(clips, key=lambda clip: clip.sample):
        begin_s, end_s = span_s(samples, clip.sample, num_frames=num_frames)
        pictures = {
            name: [picture_uri(frame) for frame in getattr(clip, name)] for name in ("original", "masked", "filled")
        }
        shown.append({"key": clip.key, "begin_s": begin_s, "end_s": end_s, "loss": clip.loss, **pictures})
    return shown


def has_few_pixels(clips: Sequence[ShownClip]) -> bool:
    """Whether pictures are so small that their pixels are to be seen one by one."""
    return any(clip.original.shape[2] < _FEW_PX for clip in clips)


def span_s(samples: Samples, sample: int, *, num_frames: int) -> tuple[float, float]:
    """From when to when in its video the frames of an evaluated clip are on screen, seconds."""
    if isinstance(samples, ChunkClips):
        places = samples.clips.plan(Visit(sample, sample, None)).places
        times = [(samples.clips.chunks.table.times(chunk), frame) for chunk, frame in (places[0], places[-1])]
        (first, first_frame), (last, last_frame) = times
        return (
            first.start_ms / 1000 + first_frame * first.fps_den / first.fps_num,
            last.start_ms / 1000 + (last_frame + 1) * last.fps_den / last.fps_num,
        )
    segments = samples.samples
    begin_us, _ = times_us(segments.records, segments.segments, np.array([sample]))
    fps = samples.frame_shape.fps
    begin_s = float(begin_us[0]) / 1e6 + float((samples.segment_frames - num_frames) // 2 / fps)
    return begin_s, begin_s + float(num_frames / fps)


def picture_uri(frame: NDArray[np.uint8]) -> str:
    """A picture (uint8 RGB [H, W, 3]) as a data URI: JPEG, and PNG where it has few pixels."""
    return png_uri(frame) if min(frame.shape[:2]) < _FEW_PX else jpeg_uri(frame)
