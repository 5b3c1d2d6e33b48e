"""The clip that a sample shows of a video file in memory, for data without chunks: streams of tars, other files."""

import math
from fractions import Fraction

import numpy as np

from clipmill.train.data.clip_frames import Clip, ClipShape, make_clip
from clipmill.train.data.decoders import PlainVideo, require_frames
from clipmill.train.data.frame_sampling import US_PER_S, Sampling, moments_of, view_offsets
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import SampleFailed


def clip_of_file(
    content: bytes,
    shape: ClipShape,
    request: SampleRequest,
    *,
    key: str,
    begin_us: int = 0,
    end_us: int | None = None,
) -> tuple[Clip, list[float]]:
    """Return the clip that a request shows of a span of a video file. The frame rate may vary.

    The second value is the times of its frames, in seconds from the first frame of the file.

    In training, `request.generator("frames")` draws the moments of the frames, and `request.generator("crop")` draws
    the crop rectangle. In an evaluation, the frames of `shape.views.num_clips` views follow one another.

    Args:
        content: Bytes of the complete file.
        key: Key of the sample, for failures.
        begin_us, end_us: Span relative to the first frame of the file, microseconds; None for the end of the file.

    Raises:
        SampleFailed: The file is truncated or cannot be decoded, a frame is missing, frames differ in size or color, or
            no moment of the span lies in the file.
    """
    rng, num_views = request.generator("frames"), shape.views.num_clips
    try:
        video = PlainVideo(content)
        # Rounded up, because a stride of complete frames would not fit into a span shorter than the file's frames.
        end_of_file_us = math.ceil((video.end_pts - video.pts[0]) * video.time_base * US_PER_S)
        end_us = end_of_file_us if end_us is None else min(end_us, end_of_file_us)
        if end_us <= begin_us:
            detail = f"its span from {begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
            raise SampleFailed(key, reason="empty_span", detail=detail)
        frames = _frames_on_screen(video, (begin_us, end_us), shape.sampling, rng=rng, num_views=num_views)
        decoded = video.decode(frames)
        require_frames(set(frames) - decoded.keys(), key=key)
        pictures = [decoded[frame] for frame in frames]
        clip = make_clip(pictures, shape, rng=request.generator("crop"), in_graph=False, key=key)
        return clip, [float(video.time_base * (video.pts[frame] - video.pts[0])) for frame in frames]
    except SampleFailed:
        raise
    except Exception as error:  # if libav raises any error for a foreign file, only this sample fails
        raise SampleFailed(key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error


def _frames_on_screen(
    video: PlainVideo, span_us: tuple[int, int], sampling: Sampling, *, rng: np.random.Generator | None, num_views: int
) -> list[int]:
    """Return the numbers of the frames that are on screen at the moments of a span (`moments_of`)."""
    tick_us = video.time_base * US_PER_S
    fps = Fraction(len(video.pts) * US_PER_S) / ((video.end_pts - video.pts[0]) * tick_us)
    ticks: list[int] = []
    for at in view_offsets(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(*span_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=rng, at=at)
        divisor = moments.denominator * tick_us.numerator
        ticks += [numerator * tick_us.denominator // divisor for numerator in moments.numerators]
    frames = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in frames]
