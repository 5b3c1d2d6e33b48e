"""Which frames of a video make which chunk, and which chunks make a span. Pure arithmetic on frame counts.

A video of `F` output frames (at the recipe's rate) has full chunks of `n` frames and, where F is no multiple of n,
a tail. A span is a run of `span_chunks` chunks that one encoder pass makes: its bytes depend on where it begins, so
spans never move: span `s` begins with chunk `s * span_chunks` whatever the video's length.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Span:
    """One encoder pass.

    Attributes:
        index: of the span in its video.
        first_frame: of its first chunk, in output frames from the start of the video.
        chunk_frames: frames of each chunk, in order.
        is_last: whether the video ends with it.
    """

    index: int
    first_frame: int
    chunk_frames: tuple[int, ...]
    is_last: bool

    @property
    def num_frames(self) -> int:
        return sum(self.chunk_frames)

    def chunk_starts(self) -> list[int]:
        """First frame of each chunk, from the start of the video."""
        starts = [self.first_frame]
        for frames in self.chunk_frames[:-1]:
            starts.append(starts[-1] + frames)
        return starts


def num_output_frames(end_s: np.ndarray, *, fps: Fraction) -> np.ndarray:
    """Output frames of videos that end at `end_s` seconds: int64, same shape; any video has one at least."""
    return np.maximum(1, np.rint(end_s * float(fps))).astype(np.int64)


def num_chunks_of(num_frames: np.ndarray, *, chunk_frames: int, tail: str) -> np.ndarray:
    """How many chunks `chunks_of` makes of each of many videos: int64, same shape as `num_frames`."""
    full, rest = np.divmod(num_frames, chunk_frames)
    has_tail = {"keep": rest > 0, "drop": np.zeros_like(rest, bool), "merge": (rest > 0) & (full == 0)}
    return full + has_tail[tail]


def chunks_of(num_frames: int, *, chunk_frames: int, tail: str) -> list[int]:
    """Frames of each chunk of a video of `num_frames` frames.

    Args:
        num_frames: of the whole video.
        chunk_frames: of a full chunk.
        tail: what becomes of the rest: `keep` it as a chunk of its own, `drop` it, or `merge` it into the chunk before
            (a video shorter than one chunk is kept as one).
    """
    full, rest = divmod(num_frames, chunk_frames)
    chunks = [chunk_frames] * full
    if rest and tail == "merge" and full:
        chunks[-1] += rest
    elif rest and tail != "drop":
        chunks.append(rest)
    return chunks


def span_of(chunks: list[int], *, index: int, span_chunks: int) -> Span:
    """Span `index` of a video whose chunks have the frames `chunks`."""
    begin = index * span_chunks
    return Span(
        index=index,
        first_frame=sum(chunks[:begin]),
        chunk_frames=tuple(chunks[begin : begin + span_chunks]),
        is_last=begin + span_chunks >= len(chunks),
    )


def start_ms(first_frame: int, *, fps: Fraction) -> int:
    """Start of a chunk in milliseconds; exact, since chunk lengths are whole milliseconds."""
    return round(first_frame / fps * 1000)
