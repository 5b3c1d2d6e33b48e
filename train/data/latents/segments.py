"""Which parts of the chunks' latents are samples: exact arithmetic, arrays in, arrays out.

A segment is `num_frames` frames of one chunk; segment i of a chunk begins at frame i * num_frames. What is left at the
end of a chunk is a tail: a shorter segment, left out or filled up with zeros.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.frame_sampling import US_PER_S
from train.data.latents.records import FrameShape, LatentRecords

Tails = Literal["drop", "pad"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*s?")


@dataclass(frozen=True)
class Segments:
    """All segments of a set of chunks, numbered chunk by chunk.

    Attributes:
        num_frames: of a full segment.
        first: [chunks + 1], number of the first segment of each chunk, and then their total.
        num_tails: chunks that end with a shorter segment.
        tails: whether tails are segments too.
    """

    num_frames: int
    first: NDArray[np.int64]
    num_tails: int
    tails: Tails

    def __len__(self) -> int:
        return int(self.first[-1])

    def chunk_of(self, segments: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunk of each segment."""
        return np.searchsorted(self.first, segments, side="right") - 1


def cut(records: LatentRecords, *, num_frames: int, tails: Tails) -> Segments:
    """The segments of `records`."""
    per_chunk, rest = np.divmod(records.num_frames.astype(np.int64), num_frames)
    if tails == "pad":
        per_chunk += rest > 0
    first = np.concatenate([[0], np.cumsum(per_chunk)])
    return Segments(num_frames=num_frames, first=first, num_tails=int((rest > 0).sum()), tails=tails)


def times_us(
    records: LatentRecords, segments: Segments, numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Begin and end of segments in their videos, microseconds, rounded down; a tail ends with its last frame."""
    chunk = segments.chunk_of(numbers)
    begin = (numbers - segments.first[chunk]) * segments.num_frames
    end = np.minimum(begin + segments.num_frames, records.num_frames[chunk])
    fps = records.shape.fps
    start_us = records.start_ms[chunk] * 1000
    frame_us = US_PER_S * fps.denominator
    return start_us + begin * frame_us // fps.numerator, start_us + end * frame_us // fps.numerator


def frames_of(segment: str, shape: FrameShape) -> int:
    """Frames of a segment that is written as a number of seconds: `5s`.

    Raises:
        UserError: it is no duration, or no whole number of frames.
    """
    num_frames = seconds_of(segment) * shape.fps
    if num_frames < 1 or num_frames.denominator != 1:
        raise UserError(
            f"a segment of {segment!r} is {float(num_frames):g} frames at {shape.fps} frames a second",
            hint="give seconds that hold a whole number of frames, such as 5s",
        )
    return int(num_frames)


def seconds_of(segment: str) -> Fraction:
    """Seconds of a duration such as `5s` or `2.5`.

    Raises:
        UserError: it is none.
    """
    match = _DURATION.fullmatch(segment)
    if match is None:
        raise UserError(f"{segment!r} is no length of a segment", hint="give seconds, such as 5s")
    return Fraction(match[1])
