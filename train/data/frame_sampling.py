"""Sampling of a clip's frames, with exact integer arithmetic and without I/O.

A caption has a span [begin, end) in its video, from which T moments are sampled (`moments_of`):

    uniform  one moment from each of T equal segments: a random moment in training, the centre in evaluation
    stride   T moments that are `stride` frames apart (VideoMAE's 16 x 4): the window of T x stride frames lies at a
             random offset in the span in training, and in its middle in evaluation; in a shorter span, the stride is
             span / T
    lavila   LaViLa's rule: the span without its last frame is cut into T segments, with boundaries rounded to frames,
             half to even; in training, a random frame between two boundaries (inclusive); in evaluation, the lower
             middle frame

An evaluation with several views of a clip takes the moments at `view_offsets` instead of the middle.

`locate_frames` finds the chunk that covers a moment, and the frame of this chunk that is on screen: frame i of a chunk
is shown during [start + i / fps, start + (i + 1) / fps). A clip may use frames from several chunks.

Times are in microseconds. Captions have floating-point seconds, which are rounded once, so that 3.3 s is the start of
frame 33 at 10 fps and not the end of frame 32. Nothing is rounded afterwards: moments are numerators over a common
denominator.

The frames of latent segments are already in memory; `spread_frames` (uniform) and `window_frames` (stride) select from
them. Shape suffixes: B batch, F frames of a segment, C channels, H and W height and width of a latent, T selected
frames, K parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.packets import SourceFrames

if TYPE_CHECKING:
    import torch

US_PER_S = 1_000_000
# Starts of chunks are stored in milliseconds, so neighbouring chunks may have a gap or an overlap of this length.
START_ROUNDING_US = 1000
MIDDLE = Fraction(1, 2)
_JITTER_STEPS = 1 << 20

SamplingRule = Literal["uniform", "stride", "lavila"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rule that samples `num_frames` moments in a span. Only the rule "stride" uses `stride`, in chunk frames."""

    num_frames: int
    rule: SamplingRule = "uniform"
    stride: int = 4

    @property
    def window(self) -> str:
        """Window of the stride rule, as text."""
        return f"{self.num_frames} x {self.stride} frames"


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Times of a chunk and its frames in the video."""

    start_ms: int
    num_frames: int
    fps_num: int
    fps_den: int

    @property
    def end_us(self) -> Fraction:
        """Time at which the last frame leaves the screen."""
        return self.start_ms * 1000 + Fraction(self.num_frames * self.fps_den * US_PER_S, self.fps_num)

    def frame_at(self, numerator: int, denominator: int) -> int:
        """Return the frame on screen at numerator / denominator microseconds, not before the start of the chunk."""
        after_start = numerator - self.start_ms * 1000 * denominator
        return min(after_start * self.fps_num // (self.fps_den * US_PER_S * denominator), self.num_frames - 1)

    def frame_begin_us(self, frame: int) -> Fraction:
        """Return the time in the video at which a frame begins, exact, microseconds."""
        # Use one fraction instead of a sum, which takes twice as long: every clip needs the times of its frames.
        return Fraction(self.start_ms * 1000 * self.fps_num + frame * self.fps_den * US_PER_S, self.fps_num)

    def nominal_frame(self, number: int) -> int:
        """Return the frame that is shown as frame `number` at the rate of the chunk."""
        return number


@dataclass(frozen=True, kw_only=True)
class SourceTimes(ChunkTimes):
    """Times of a chunk of source frames. Frames may begin at any time; `num_frames` is the count at the nominal rate.

    Attributes:
        source: Frames of the chunk.
    """

    source: SourceFrames

    def frame_at(self, numerator: int, denominator: int) -> int:
        """Return the frame on screen at numerator / denominator microseconds."""
        return self.source.frame_at(numerator, denominator)

    def frame_begin_us(self, frame: int) -> Fraction:
        """Return the time in the video at which a frame begins, exact, microseconds."""
        return self.source.begin_us(frame)

    def nominal_frame(self, number: int) -> int:
        """Return the frame on screen at the middle of frame `number` at the nominal rate."""
        moment = (super().frame_begin_us(number) + super().frame_begin_us(number + 1)) / 2
        return self.source.frame_at(*moment.as_integer_ratio())


def to_seconds(time_us: Fraction) -> float:
    """Return the float that is nearest to a time, in seconds."""
    numerator, denominator = time_us.as_integer_ratio()
    return numerator / (denominator * US_PER_S)


@dataclass(frozen=True)
class Moments:
    """Moments in a video, in order and exact: moment i is numerators[i] / denominator microseconds."""

    numerators: tuple[int, ...]
    denominator: int


@dataclass(frozen=True)
class FrameIndex:
    """A frame: index of its chunk in a list of chunks, and index of the frame in the chunk."""

    chunk: int
    frame: int


def frame_indices(
    begin_us: int,
    end_us: int,
    sampling: Sampling,
    chunks: Sequence[ChunkTimes],
    *,
    rng: np.random.Generator | None,
    num_views: int = 1,
) -> list[FrameIndex]:
    """Return the frames for the span [begin_us, end_us), which lies in `chunks`, at the frame rate of the first chunk.

    Without `rng`, as in evaluation, the function returns the frames of `num_views` views, one view after another.
    """
    fps_num, fps_den = chunks[0].fps_num, chunks[0].fps_den
    frames: list[FrameIndex] = []
    for at in view_offsets(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(begin_us, end_us, sampling, fps_num=fps_num, fps_den=fps_den, rng=rng, at=at)
        frames += locate_frames(moments, chunks)
    return frames


def view_offsets(rule: SamplingRule, num_views: int) -> tuple[Fraction, ...]:
    """Return the offset of each view of a clip, as a fraction from 0 to 1 of the free space that the rule leaves.

    With "stride", the windows are spread from the start of the span to its end (VideoMAE's test clips). With the other
    rules, each segment is sampled at the middles of equal parts. A single view is in the middle for every rule.
    """
    if num_views == 1:
        return (MIDDLE,)
    if rule == "stride":
        return tuple(Fraction(number, num_views - 1) for number in range(num_views))
    return tuple(Fraction(2 * number + 1, 2 * num_views) for number in range(num_views))


def to_us(seconds: float) -> int:
    """Round seconds to the nearest microsecond; raise ValueError if they are not finite."""
    if not np.isfinite(seconds):
        raise ValueError(f"{seconds} s is not a time")
    return round(seconds * US_PER_S)


_LONGEST_S = 1e9  # longer than any video, but far below the limit of microseconds in int64


def to_whole_us(times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Convert to microseconds. Longer times than any video lasts, such as inf, are clipped so that they fit int64."""
    return np.rint(np.clip(times_s, -_LONGEST_S, _LONGEST_S) * US_PER_S).astype(np.int64)


def moments_of(
    begin_us: int,
    end_us: int,
    sampling: Sampling,
    *,
    fps_num: int,
    fps_den: int,
    rng: np.random.Generator | None,
    at: Fraction = MIDDLE,
) -> Moments:
    """Sample moments in [begin_us, end_us) by the rule `sampling`; `rng` draws them at random, as in training.

    Args:
        fps_num, fps_den: Frames per second, for the rules that count frames.
        at: Offset of the view in an evaluation (`view_offsets`).

    Raises:
        ValueError: The span is empty, or the number of frames is less than 1.
    """
    count = sampling.num_frames
    if end_us <= begin_us or count < 1:
        raise ValueError(f"no {count} moments in [{begin_us}, {end_us}) us")
    if sampling.rule == "lavila":
        return _lavila(begin_us, end_us, count, fps_num=fps_num, fps_den=fps_den, rng=rng, at=at)
    if sampling.rule == "stride":
        offset, steps = at.as_integer_ratio() if rng is None else (int(rng.integers(_JITTER_STEPS)), _JITTER_STEPS)
        # In units of 1 / (count * fps_num * steps) us, all numbers below are integers.
        span = (end_us - begin_us) * fps_num * steps
        step = min(sampling.stride * fps_den * US_PER_S * steps * count, span)
        first = begin_us * count * fps_num * steps + (span * count - step * count) // steps * offset
        return Moments(tuple(first + number * step for number in range(count)), count * fps_num * steps)
    if rng is None:
        offsets, steps = [at.numerator] * count, at.denominator
    else:
        offsets, steps = rng.integers(_JITTER_STEPS, size=count).tolist(), _JITTER_STEPS
    scale, span_us = count * steps, end_us - begin_us
    return Moments(
        tuple(begin_us * scale + (number * steps + offset) * span_us for number, offset in enumerate(offsets)), scale
    )


def _lavila(
    begin_us: int,
    end_us: int,
    count: int,
    *,
    fps_num: int,
    fps_den: int,
    rng: np.random.Generator | None,
    at: Fraction,
) -> Moments:
    frame_us_num = fps_den * US_PER_S  # over fps_num
    first = begin_us * fps_num // frame_us_num
    last_end = max(first + 1, -(-end_us * fps_num // frame_us_num))
    boundaries = [first + round(Fraction((last_end - first - 1) * number, count)) for number in range(count + 1)]
    frames = [
        low + math.floor((high - low) * at) if rng is None else int(rng.integers(low, high + 1))
        for low, high in pairwise(boundaries)
    ]
    # Use the middle of the time that each frame is on screen, moved into the span if the frame extends beyond it.
    scale = 2 * fps_num
    earliest, latest = begin_us * scale, end_us * scale - 1
    return Moments(tuple(min(max((2 * frame + 1) * frame_us_num, earliest), latest) for frame in frames), scale)


def locate_frames(moments: Moments, chunks: Sequence[ChunkTimes]) -> list[FrameIndex]:
    """Return the frame on screen at each moment. `chunks` must be chunks of one video, ordered by time.

    Raises:
        ValueError: A moment is not covered by any chunk.
    """
    return [_locate(numerator, moments.denominator, chunks) for numerator in moments.numerators]


def _locate(numerator: int, denominator: int, chunks: Sequence[ChunkTimes]) -> FrameIndex:
    for number in reversed(range(len(chunks))):
        chunk = chunks[number]
        if numerator < chunk.start_ms * 1000 * denominator:
            continue
        if numerator < (chunk.end_us + START_ROUNDING_US) * denominator:
            return FrameIndex(number, chunk.frame_at(numerator, denominator))
        break
    raise ValueError(f"no chunk holds the moment {numerator / denominator / US_PER_S:.3f} s")


def window_frames(
    latents_BFCHW: "torch.Tensor", *, num_frames: int, offset_B: NDArray[np.float64] | None
) -> "torch.Tensor":
    """Return `num_frames` consecutive frames of each segment, from the middle or at the offset `offset_B`.

    Args:
        offset_B: Offset as a fraction in [0, 1) of the free space; None for the middle.
    """
    import torch

    from clipmill.train.device.transfer import send

    free = latents_BFCHW.shape[1] - num_frames
    if offset_B is None:
        return latents_BFCHW[:, free // 2 : free // 2 + num_frames]
    begin_B = send((offset_B * (free + 1)).astype(np.int64), latents_BFCHW.device)
    frames_BT = begin_B[:, None] + torch.arange(num_frames, device=latents_BFCHW.device)
    return latents_BFCHW[torch.arange(len(frames_BT), device=latents_BFCHW.device)[:, None], frames_BT]


def spread_frames(
    latents_BFCHW: "torch.Tensor", *, num_frames: int, offset_BK: NDArray[np.float64] | None
) -> "torch.Tensor":
    """Return a frame from each of `num_frames` equal parts of a segment, from the middle or at the offset `offset_BK`.

    Args:
        offset_BK: Offset as a fraction in [0, 1) of the part; None for the middle.
    """
    import torch

    from clipmill.train.device.transfer import send

    size, length = latents_BFCHW.shape[:2]
    if offset_BK is None:
        offset_BK = np.full((size, num_frames), 0.5)
    chosen_BK = ((np.arange(num_frames) + offset_BK) * length / num_frames).astype(np.int64).clip(max=length - 1)
    segments_B1 = torch.arange(size, device=latents_BFCHW.device)[:, None]
    return latents_BFCHW[segments_B1, send(chosen_BK, latents_BFCHW.device)]
