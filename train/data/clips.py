"""Which frames a clip is made of: exact arithmetic on integers and fractions, no I/O.

A caption names a span [begin, end) of its video. T moments are taken from it, one from each of T equal
segments: the segment's centre in evaluation, a seeded place in it in training. A moment belongs to the chunk
that covers it and there to the frame that is on screen: frame i of a chunk is shown during
[start + i / fps, start + (i + 1) / fps). A clip may need frames of several chunks.

Times are microseconds. Captions arrive as floating-point seconds and are rounded once, so that 3.3 s is the
beginning of frame 33 at 10 fps and not the end of frame 32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

US_PER_S = 1_000_000
_JITTER_STEPS = 1 << 20
# Starts of chunks are stored in whole milliseconds: up to this much lies between two neighbours, or is claimed twice.
START_ROUNDING_US = 1000


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
class FramePlace:
    """One frame: the chunk's position in the list that was given, and the frame's index in the chunk."""

    chunk: int
    frame: int


def to_us(seconds: float) -> int:
    """Seconds as the nearest whole microsecond."""
    return round(seconds * US_PER_S)


def segment_times_us(
    begin_us: int, end_us: int | Fraction, *, num_frames: int, rng: np.random.Generator | None
) -> list[Fraction]:
    """One moment in each of `num_frames` equal segments of [begin_us, end_us): centres, or seeded places.

    Raises:
        ValueError: the span is empty, or no frame is asked for.
    """
    if end_us <= begin_us or num_frames < 1:
        raise ValueError(f"no {num_frames} moments in [{begin_us}, {end_us}) us")
    segment = Fraction(end_us - begin_us, num_frames)
    if rng is None:
        offsets = [Fraction(1, 2)] * num_frames
    else:
        offsets = [Fraction(int(step), _JITTER_STEPS) for step in rng.integers(_JITTER_STEPS, size=num_frames)]
    return [begin_us + (number + offset) * segment for number, offset in enumerate(offsets)]


def locate_frames(times_us: Sequence[Fraction], chunks: Sequence[ChunkTimes]) -> list[FramePlace]:
    """The frame on screen at each moment, among `chunks` of one video in order of time.

    Raises:
        ValueError: a moment lies in none of the chunks.
    """
    return [_locate(time_us, chunks) for time_us in times_us]


def _locate(time_us: Fraction, chunks: Sequence[ChunkTimes]) -> FramePlace:
    for number in reversed(range(len(chunks))):
        chunk = chunks[number]
        after_start = time_us - chunk.start_ms * 1000
        if after_start < 0:
            continue
        frame = after_start * chunk.fps_num // (chunk.fps_den * US_PER_S)
        if frame < chunk.num_frames:
            return FramePlace(number, frame)
        if time_us < chunk.end_us + START_ROUNDING_US:
            return FramePlace(number, chunk.num_frames - 1)
        break
    raise ValueError(f"no chunk holds the moment {float(time_us) / US_PER_S:.6f} s")
