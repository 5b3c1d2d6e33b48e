"""The division of a video into chunks and spans: pure arithmetic on frame counts.

With `--cut even`, a video of `F` output frames (at the recipe's frame rate) has full chunks of `n` frames and, if F is
not a multiple of n, a tail. With `--cut shots`, chunks begin and end at shot boundaries
(`clipmill.prep.video.cutting`).

A span is a run of `span_chunks` chunks that one encoder pass makes. Its bytes depend on where it begins, so that spans
never move: span `s` begins with chunk `s * span_chunks`, whatever the length of the video.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from clipmill.prep.sources.access import SourceFacts


@dataclass(frozen=True)
class Span:
    """One encoder pass.

    Attributes:
        index: number of the span within its video.
        first_frame: first frame of its first chunk, in output frames from the start of the video.
        chunk_frames: number of frames of each chunk, in order.
        is_last: True for the last span of a video.
        gaps: number of frames left out before each chunk, 0 for the first; empty if there are none.
    """

    index: int
    first_frame: int
    chunk_frames: tuple[int, ...]
    is_last: bool
    gaps: tuple[int, ...] = ()

    @property
    def num_frames(self) -> int:
        """Number of frames of the encoder pass, from the first chunk to the end of the last."""
        return sum(self.chunk_frames) + sum(self.gaps)

    def pieces(self) -> list[tuple[int, bool]]:
        """Return the consecutive pieces of the encoder pass: (number of frames, whether it is a chunk)."""
        gaps = self.gaps or (0,) * len(self.chunk_frames)
        both = zip(gaps, self.chunk_frames, strict=True)
        return [piece for gap, frames in both for piece in ((gap, False), (frames, True)) if piece[0]]

    def chunk_starts(self) -> list[int]:
        """Return the first frame of each chunk, counted from the start of the video."""
        starts, position = [], self.first_frame
        for frames, is_chunk in self.pieces():
            if is_chunk:
                starts.append(position)
            position += frames
        return starts


@dataclass(frozen=True)
class SpanPlan:
    """One span of a plan: its video, its chunks, and the fingerprint of its encoder pass."""

    video_id: str
    source_id: str
    dataset: str
    path: str
    source: SourceFacts
    span: Span
    fingerprint: str


def num_output_frames(end_s: np.ndarray, *, fps: Fraction) -> np.ndarray:
    """Return the number of output frames of videos that end at `end_s` seconds: int64, same shape, at least 1."""
    return np.maximum(1, np.rint(end_s * float(fps))).astype(np.int64)


def num_chunks_of(num_frames: np.ndarray, *, chunk_frames: int, tail: str) -> np.ndarray:
    """Return the number of chunks that `chunks_of` makes of each video: int64, same shape as `num_frames`."""
    full, rest = np.divmod(num_frames, chunk_frames)
    has_tail = {"keep": rest > 0, "drop": np.zeros_like(rest, bool), "merge": (rest > 0) & (full == 0)}
    return full + has_tail[tail]


def chunks_of(num_frames: int, *, chunk_frames: int, tail: str) -> list[int]:
    """Return the number of frames in each chunk of a video of `num_frames` frames.

    Args:
        num_frames: number of frames of the whole video.
        chunk_frames: number of frames of a full chunk.
        tail: what to do with the remainder: `keep` it as a chunk of its own, `drop` it, or `merge` it into the previous
            chunk (a video shorter than one chunk is kept as one).
    """
    full, rest = divmod(num_frames, chunk_frames)
    chunks = [chunk_frames] * full
    if rest and tail == "merge" and full:
        chunks[-1] += rest
    elif rest and tail != "drop":
        chunks.append(rest)
    return chunks


def span_of(chunks: list[int], *, index: int, span_chunks: int) -> Span:
    """Return span `index` of a video whose chunks have the numbers of frames in `chunks`."""
    begin = index * span_chunks
    return Span(
        index=index,
        first_frame=sum(chunks[:begin]),
        chunk_frames=tuple(chunks[begin : begin + span_chunks]),
        is_last=begin + span_chunks >= len(chunks),
    )


def start_ms(first_frame: int, *, fps: Fraction) -> int:
    """Return the start of a chunk in milliseconds.

    It is exact with `--cut even`, since chunk lengths are whole milliseconds. With `--cut shots` it is the nearest
    millisecond, which is different for every frame, since a frame lasts more than 4 ms.
    """
    return round(first_frame / fps * 1000)
