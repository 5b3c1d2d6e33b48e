"""Which frames of a file a clip shows: those on screen at its moments, at a constant rate or not."""

import math
from fractions import Fraction

import numpy as np

from train.data.decoding.plain import PlainVideo
from train.data.failures import SampleFailed
from train.data.frame_sampling import US_PER_S, Sampling, moments_of
from train.data.streams.clips import StreamedClip


def frames_on_screen(
    video: PlainVideo, clip: StreamedClip, sampling: Sampling, *, rng: np.random.Generator | None
) -> list[int]:
    """Numbers of the frames of `video` that `clip` shows; with `rng` as in training, without as in evaluation.

    Raises:
        SampleFailed: no moment of the clip lies in the file.
    """
    tick_us = video.time_base * US_PER_S
    length_us = (video.end_pts - video.pts[0]) * tick_us
    # Rounded up: in a span that is shorter than the file's frames, a stride of whole frames would not fit.
    end_of_file_us = math.ceil(length_us)
    end_us = end_of_file_us if clip.end_us is None else min(clip.end_us, end_of_file_us)
    if end_us <= clip.begin_us:
        detail = f"its span from {clip.begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
        raise SampleFailed(clip.key, reason="empty_span", detail=detail)
    fps = Fraction(len(video.pts) * US_PER_S) / length_us
    moments = moments_of(clip.begin_us, end_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=rng)
    ticks = [
        numerator * tick_us.denominator // (moments.denominator * tick_us.numerator) for numerator in moments.numerators
    ]
    found = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in found]
