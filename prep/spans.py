"""Which frames of a video make which chunk, and which chunks make a span. Pure arithmetic on frame counts.

A video of `F` output frames (at the recipe's rate) has full chunks of `n` frames and, where F is no multiple of n, a tail.
A span is a run of `span_chunks` chunks that one encoder pass makes: its bytes depend on where it begins, so spans never
move: span `s` begins with chunk `s * span_chunks` whatever the video's length.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Span:
    """One encoder pass.

    Attributes:
        index: of the span in its video.
        first_frame: of its first chunk, in output frames from the start of the video.
        chunk_frames: frames of each chunk, in order.
    """

    index: int
    first_frame: int
    chunk_frames: tuple[int, ...]

    @property
    def num_frames(self) -> int:
        return sum(self.chunk_frames)

    def chunk_starts(self) -> list[int]:
        """First frame of each chunk, from the start of the video."""
        starts = [self.first_frame]
        for frames in self.chunk_frames[:-1]:
            starts.append(starts[-1] + frames)
        return starts


def num_output_frames(end_s: float, fps: Fraction) -> int:
    """Output frames of a video that ends at `end_s` seconds; any video has one at least."""
    return max(1, round(Fraction(end_s).limit_denominator(10**9) * fps))


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


def num_spans(num_chunks: int, *, span_chunks: int) -> int:
    """Spans of a video with `num_chunks` chunks."""
    return -(-num_chunks // span_chunks)


def span_of(chunks: list[int], *, index: int, span_chunks: int) -> Span:
    """Span `index` of a video whose chunks have the frames `chunks`."""
    begin = index * span_chunks
    return Span(
        index=index,
        first_frame=sum(chunks[:begin]),
        chunk_frames=tuple(chunks[begin : begin + span_chunks]),
    )
