"""Which frames a clip is made of: exact arithmetic on whole numbers, no I/O.

A caption names a span [begin, end) of its video, from which T moments are taken:

    uniform  one from each of T equal segments: a seeded place in training, the centre in evaluation
    stride   T moments `stride` frames apart (VideoMAE's 16 x 4): the window of T x stride frames lies at a seeded
             place of the span in training, in its middle in evaluation; in a shorter span the stride is span / T
    lavila   LaViLa's rule: the span without its last frame in T segments, borders rounded to whole frames, half to
             even; a seeded frame between them, both included, in training, the lower middle one in evaluation

An evaluation may look at a clip several times, at `view_places`, and then takes other places than the middle.

A moment belongs to the chunk that covers it and there to the frame that is on screen: frame i of a chunk is shown
during [start + i / fps, start + (i + 1) / fps). A clip may need frames of several chunks.

Times are microseconds. Captions arrive as floating-point seconds and are rounded once, so that 3.3 s is the
beginning of frame 33 at 10 fps and not the end of frame 32. From there on nothing is rounded: moments are numerators
over one common denominator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import numpy as np

US_PER_S = 1_000_000
_JITTER_STEPS = 1 << 20
# Starts of chunks are stored in whole milliseconds: up to this much lies between two neighbours, or is claimed twice.
START_ROUNDING_US = 1000

SamplingRule = Literal["uniform", "stride", "lavila"]
MIDDLE = Fraction(1, 2)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which moments of a span are shown: `num_frames` of them; `stride` is in frames of the chunk and for that rule."""

    num_frames: int
    rule: SamplingRule = "uniform"
    stride: int = 4

    @property
    def window(self) -> str:
        """What the stride rule wants, in words."""
        return f"{self.num_frames} x {self.stride} frames"


def view_places(rule: SamplingRule, num_views: int) -> tuple[Fraction, ...]:
    """Where each of `num_views` looks at a clip takes its moments, in parts of the room that the rule leaves.

    With "stride" windows reach from the begin of the span to its end (VideoMAE's test clips); otherwise each equal
    segment is itself looked at in the middles of equal parts. One look is in the middle with every rule.
    """
    if num_views == 1:
        return (MIDDLE,)
    if rule == "stride":
        return tuple(Fraction(number, num_views - 1) for number in range(num_views))
    return tuple(Fraction(2 * number + 1, 2 * num_views) for number in range(num_views))


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """The place of one chunk in its video."""

    start_ms: int
    num_frames: int
    fps_num: int
    fps_den: int

    @property
    def end_us(self) -> Fraction:
        """Where the last frame leaves the screen."""
        return self.start_ms * 1000 + Fraction(self.num_frames * self.fps_den * US_PER_S, self.fps_num)


@dataclass(frozen=True)
class Moments:
    """Moments of a video in order, exact: moment i is numerators[i] / denominator microseconds."""

    numerators: tuple[int, ...]
    denominator: int


@dataclass(frozen=True)
class FramePlace:
    """One frame: the chunk's position in the list that was given, and the frame's index in the chunk."""

    chunk: int
    frame: int


def to_us(seconds: float) -> int:
    """Seconds as the nearest whole microsecond.

    Raises:
        ValueError: it is no finite number.
    """
    if not np.isfinite(seconds):
        raise ValueError(f"{seconds} s is no moment")
    return round(seconds * US_PER_S)


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
    """The moments of [begin_us, end_us) that `sampling` shows; with `rng` as in training, without as in evaluation.

    Args:
        fps_num, fps_den: frames per second, for the rules that count frames.
        at: where an evaluation looks (`view_places`).

    Raises:
        ValueError: the span is empty, or no frame is asked for.
    """
    count = sampling.num_frames
    if end_us <= begin_us or count < 1:
        raise ValueError(f"no {count} moments in [{begin_us}, {end_us}) us")
    if sampling.rule == "stride":
        return _strided(begin_us, end_us, sampling, fps_num=fps_num, fps_den=fps_den, rng=rng, at=at)
    if sampling.rule == "lavila":
        return _lavila(begin_us, end_us, count, fps_num=fps_num, fps_den=fps_den, rng=rng, at=at)
    if rng is None:
        places, steps = [at.numerator] * count, at.denominator
    else:
        places, steps = rng.integers(_JITTER_STEPS, size=count).tolist(), _JITTER_STEPS
    scale, span_us = count * steps, end_us - begin_us
    return Moments(
        tuple(begin_us * scale + (number * steps + place) * span_us for number, place in enumerate(places)), scale
    )


def _strided(
    begin_us: int,
    end_us: int,
    sampling: Sampling,
    *,
    fps_num: int,
    fps_den: int,
    rng: np.random.Generator | None,
    at: Fraction,
) -> Moments:
    count = sampling.num_frames
    place, steps = at.as_integer_ratio() if rng is None else (int(rng.integers(_JITTER_STEPS)), _JITTER_STEPS)
    # In units of 1 / (count * fps_num * steps) us everything below is whole.
    span = (end_us - begin_us) * fps_num * steps
    step = min(sampling.stride * fps_den * US_PER_S * steps * count, span)
    first = begin_us * count * fps_num * steps + (span * count - step * count) // steps * place
    return Moments(tuple(first + number * step for number in range(count)), count * fps_num * steps)


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
    behind = max(first + 1, -(-end_us * fps_num // frame_us_num))
    borders = [first + round(Fraction((behind - first - 1) * number, count)) for number in range(count + 1)]
    frames = [
        low + math.floor((high - low) * at) if rng is None else int(rng.integers(low, high + 1))
        for low, high in pairwise(borders)
    ]
    # The middle of the time that the frame is on screen, moved into the span where the span begins or ends within it.
    scale = 2 * fps_num
    earliest, latest = begin_us * scale, end_us * scale - 1
    return Moments(tuple(min(max((2 * frame + 1) * frame_us_num, earliest), latest) for frame in frames), scale)


def locate_frames(moments: Moments, chunks: Sequence[ChunkTimes]) -> list[FramePlace]:
    """The frame on screen at each moment, among `chunks` of one video in order of time.

    Raises:
        ValueError: a moment lies in none of the chunks.
    """
    return [_locate(numerator, moments.denominator, chunks) for numerator in moments.numerators]


def _locate(numerator: int, denominator: int, chunks: Sequence[ChunkTimes]) -> FramePlace:
    for number in reversed(range(len(chunks))):
        chunk = chunks[number]
        after_start = numerator - chunk.start_ms * 1000 * denominator
        if after_start < 0:
            continue
        frame = after_start * chunk.fps_num // (chunk.fps_den * US_PER_S * denominator)
        if frame < chunk.num_frames:
            return FramePlace(number, frame)
        if numerator < (chunk.end_us + START_ROUNDING_US) * denominator:
            return FramePlace(number, chunk.num_frames - 1)
        break
    raise ValueError(f"no chunk holds the moment {numerator / denominator / US_PER_S:.6f} s")
