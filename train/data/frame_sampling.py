"""Sampling of the frames of a clip, with exact integer arithmetic and without I/O.

A caption has a span [begin, end) in its video, and `moments_of` samples T moments from the span:

    uniform  one moment from each of T equal segments: a random moment in training, the centre in an evaluation
    stride   T moments that are `stride` frames apart (VideoMAE's 16 x 4). The window of T x stride frames lies at a
             random offset in the span in training, and in the middle of the span in an evaluation. If the span is
             shorter than the window, the stride is span / T
    lavila   LaViLa's rule: the span without its last frame is divided into T segments, with boundaries rounded half to
             even to frames. Training shows a random frame between two boundaries (inclusive); an evaluation shows the
             lower middle frame

An evaluation with several views of a clip uses the moments at `view_offsets` instead of the middle.

`locate_frames` finds the chunk that covers a moment, and the frame of this chunk that is on screen: frame i of a chunk
is shown during [start + i / fps, start + (i + 1) / fps). A clip may use frames from several chunks.

Times are in microseconds. The times of captions are floating-point seconds, which are rounded once, so that 3.3 s is
the start of frame 33 at 10 fps and not the end of frame 32. Nothing is rounded afterwards: moments are numerators over
a common denominator.

All frames of a segment of latents are in memory; `spread_frames` (uniform) and `window_frames` (stride) select from
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
# Starts of chunks are stored in milliseconds, so the gap or overlap between two chunks may be up to this long.
START_ROUNDING_US = 1000
MIDDLE = Fraction(1, 2)
_JITTER_STEPS = 1 << 20

SamplingRule = Literal["uniform", "stride", "lavila"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rule for sampling moments from a span.

    Attributes:
        num_frames: Number of moments.
        rule: Name of the rule.
        stride: Distance between moments for the rule "stride", in frames of the chunk.
    """

    num_frames: int
    rule: SamplingRule = "uniform"
    stride: int = 4

    @property
    def window(self) -> str:
        """Description of the window of the rule "stride"."""
        return f"{self.num_frames} x {self.stride} frames"


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Times of a chunk and of its frames in the video.

    Attributes:
        start_ms: Start of the chunk in the video, in milliseconds.
        num_frames: Number of frames.
        fps_num, fps_den: Numerator and denominator of the frame rate.
    """

    start_ms: int
    num_frames: int
    fps_num: int
    fps_den: int

    @property
    def end_us(self) -> Fraction:
        """Time in the video at which the last frame ends, microseconds, exact."""
        return self.start_ms * 1000 + Fraction(self.num_frames * self.fps_den * US_PER_S, self.fps_num)

    def frame_at(self, numerator: int, denominator: int) -> int:
        """Return the frame on screen at numerator / denominator microseconds, which must not precede the chunk."""
        after_start = numerator - self.start_ms * 1000 * denominator
        return min(after_start * self.fps_num // (self.fps_den * US_PER_S * denominator), self.num_frames - 1)

    def frame_begin_us(self, frame: int) -> Fraction:
        """Return the time in the video at which a frame begins, exact, in microseconds."""
        # Use a single fraction, because a sum takes twice as long, and every clip needs the times of its frames.
        return Fraction(self.start_ms * 1000 * self.fps_num + frame * self.fps_den * US_PER_S, self.fps_num)

    def nominal_frame(self, index: int) -> int:
        """Return the frame that is shown as frame `index` at the nominal frame rate."""
        return index


@dataclass(frozen=True, kw_only=True)
class SourceTimes(ChunkTimes):
    """Times of a chunk whose frames are in a source file and may begin at any time.

    `num_frames` is the number of frames at the nominal frame rate.

    Attributes:
        source: Frames of the chunk in the source file.
    """

    source: SourceFrames

    def frame_at(self, numerator: int, denominator: int) -> int:
        """Return the frame on screen at numerator / denominator microseconds."""
        return self.source.frame_at(numerator, denominator)

    def frame_begin_us(self, frame: int) -> Fraction:
        """Return the time in the video at which a frame begins, exact, in microseconds."""
        return self.source.begin_us(frame)

    def nominal_frame(self, index: int) -> int:
        """Return the frame on screen in the middle of frame `index` at the nominal frame rate."""
        moment = (super().frame_begin_us(index) + super().frame_begin_us(index + 1)) / 2
        return self.source.frame_at(*moment.as_integer_ratio())


def to_seconds(time_us: Fraction) -> float:
    """Convert an exact time in microseconds to the nearest float in seconds."""
    numerator, denominator = time_us.as_integer_ratio()
    return numerator / (denominator * US_PER_S)


@dataclass(frozen=True)
class Moments:
    """Exact moments in a video, in the order of the frames: moment i is numerators[i] / denominator microseconds."""

    numerators: tuple[int, ...]
    denominator: int


@dataclass(frozen=True)
class FrameIndex:
    """Frame in a list of chunks: the index of the chunk in the list, and the index of the frame in the chunk."""

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
    """Return the frames that are sampled from the span [begin_us, end_us).

    Args:
        chunks: Chunks that cover the span. The frame rate of the first chunk is used for rules that count frames.
        rng: Random number generator in training; None in an evaluation.
        num_views: Number of temporal views in an evaluation. The frames of the views follow one another.
    """
    fps_num, fps_den = chunks[0].fps_num, chunks[0].fps_den
    frames: list[FrameIndex] = []
    for offset in view_offsets(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(begin_us, end_us, sampling, fps_num=fps_num, fps_den=fps_den, rng=rng, view_offset=offset)
        frames += locate_frames(moments, chunks)
    return frames


def view_offsets(rule: SamplingRule, num_views: int) -> tuple[Fraction, ...]:
    """Return the offset of each temporal view, as a fraction from 0 to 1 of the space in which the rule can choose.

    For "stride", the windows are spread from the start to the end of the span (VideoMAE's test clips). For the other
    rules, each segment is divided into equal parts, and the views show their middles. A single view is always in the
    middle.
    """
    if num_views == 1:
        return (MIDDLE,)
    if rule == "stride":
        return tuple(Fraction(index, num_views - 1) for index in range(num_views))
    return tuple(Fraction(2 * index + 1, 2 * num_views) for index in range(num_views))


def to_us(seconds: float) -> int:
    """Round seconds to the nearest microsecond; raise ValueError if `seconds` is not finite."""
    if not np.isfinite(seconds):
        raise ValueError(f"{seconds} s is not a time")
    return round(seconds * US_PER_S)


_MAX_S = 1e9  # longer than any video, but in microseconds far below the limit of int64


def to_whole_us(times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round seconds to microseconds. Times beyond the end of any video, such as inf, are clipped to fit into int64."""
    return np.rint(np.clip(times_s, -_MAX_S, _MAX_S) * US_PER_S).astype(np.int64)


def moments_of(
    begin_us: int,
    end_us: int,
    sampling: Sampling,
    *,
    fps_num: int,
    fps_den: int,
    rng: np.random.Generator | None,
    view_offset: Fraction = MIDDLE,
) -> Moments:
    """Sample moments from the span [begin_us, end_us).

    Args:
        fps_num, fps_den: Numerator and denominator of the frame rate, for rules that count frames.
        rng: Random number generator in training; None in an evaluation.
        view_offset: Offset of the view in an evaluation (`view_offsets`).

    Raises:
        ValueError: The span is empty, or the number of frames is less than 1.
    """
    count = sampling.num_frames
    if end_us <= begin_us or count < 1:
        raise ValueError(f"cannot sample {count} moments from [{begin_us}, {end_us}) us")
    if sampling.rule == "lavila":
        return _lavila_moments(
            begin_us, end_us, count, fps_num=fps_num, fps_den=fps_den, rng=rng, view_offset=view_offset
        )
    if sampling.rule == "stride":
        if rng is None:
            offset, steps = view_offset.as_integer_ratio()
        else:
            offset, steps = int(rng.integers(_JITTER_STEPS)), _JITTER_STEPS
        # All numbers below are integers in units of 1 / (count * fps_num * steps) us.
        span = (end_us - begin_us) * fps_num * steps
        step = min(sampling.stride * fps_den * US_PER_S * steps * count, span)
        first = begin_us * count * fps_num * steps + (span * count - step * count) // steps * offset
        return Moments(tuple(first + index * step for index in range(count)), count * fps_num * steps)
    if rng is None:
        offsets, steps = [view_offset.numerator] * count, view_offset.denominator
    else:
        offsets, steps = rng.integers(_JITTER_STEPS, size=count).tolist(), _JITTER_STEPS
    scale, span_us = count * steps, end_us - begin_us
    return Moments(
        tuple(begin_us * scale + (index * steps + offset) * span_us for index, offset in enumerate(offsets)), scale
    )


def _lavila_moments(
    begin_us: int,
    end_us: int,
    count: int,
    *,
    fps_num: int,
    fps_den: int,
    rng: np.random.Generator | None,
    view_offset: Fraction,
) -> Moments:
    frame_us_num = fps_den * US_PER_S  # over fps_num
    first = begin_us * fps_num // frame_us_num
    last_end = max(first + 1, -(-end_us * fps_num // frame_us_num))
    boundaries = [first + round(Fraction((last_end - first - 1) * index, count)) for index in range(count + 1)]
    frames = [
        low + math.floor((high - low) * view_offset) if rng is None else int(rng.integers(low, high + 1))
        for low, high in pairwise(boundaries)
    ]
    # Return the middle of each frame's time on screen, moved into the span if the frame extends beyond the span.
    scale = 2 * fps_num
    earliest, latest = begin_us * scale, end_us * scale - 1
    return Moments(tuple(min(max((2 * frame + 1) * frame_us_num, earliest), latest) for frame in frames), scale)


def locate_frames(moments: Moments, chunks: Sequence[ChunkTimes]) -> list[FrameIndex]:
    """Return the frame on screen at each moment.

    Args:
        chunks: Chunks of the same video, ordered by time.

    Raises:
        ValueError: A moment is not covered by any chunk.
    """
    return [_locate(numerator, moments.denominator, chunks) for numerator in moments.numerators]


def _locate(numerator: int, denominator: int, chunks: Sequence[ChunkTimes]) -> FrameIndex:
    for index in reversed(range(len(chunks))):
        chunk = chunks[index]
        if numerator < chunk.start_ms * 1000 * denominator:
            continue
        if numerator < (chunk.end_us + START_ROUNDING_US) * denominator:
            return FrameIndex(index, chunk.frame_at(numerator, denominator))
        break
    raise ValueError(f"no chunk contains the moment {numerator / denominator / US_PER_S:.3f} s")


def window_frames(
    latents_BFCHW: "torch.Tensor", *, num_frames: int, offset_B: NDArray[np.float64] | None
) -> "torch.Tensor":
    """Return `num_frames` consecutive frames of each segment.

    Args:
        offset_B: Start of the frames, as a fraction in [0, 1) of the possible starts; None for the middle.
    """
    import torch

    from clipmill.train.device.transfer import send

    num_free = latents_BFCHW.shape[1] - num_frames
    if offset_B is None:
        return latents_BFCHW[:, num_free // 2 : num_free // 2 + num_frames]
    begin_B = send((offset_B * (num_free + 1)).astype(np.int64), latents_BFCHW.device)
    frames_BT = begin_B[:, None] + torch.arange(num_frames, device=latents_BFCHW.device)
    return latents_BFCHW[torch.arange(len(frames_BT), device=latents_BFCHW.device)[:, None], frames_BT]


def spread_frames(
    latents_BFCHW: "torch.Tensor", *, num_frames: int, offset_BK: NDArray[np.float64] | None
) -> "torch.Tensor":
    """Return a frame from each of `num_frames` equal parts of a segment.

    Args:
        offset_BK: Position of the frame in each part, as a fraction in [0, 1) of the part; None for the middle.
    """
    import torch

    from clipmill.train.device.transfer import send

    size, length = latents_BFCHW.shape[:2]
    if offset_BK is None:
        offset_BK = np.full((size, num_frames), 0.5)
    frames_BK = ((np.arange(num_frames) + offset_BK) * length / num_frames).astype(np.int64).clip(max=length - 1)
    segments_B1 = torch.arange(size, device=latents_BFCHW.device)[:, None]
    return latents_BFCHW[segments_B1, send(frames_BK, latents_BFCHW.device)]
