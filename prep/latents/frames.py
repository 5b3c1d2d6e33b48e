"""Choose what to encode from a chunk: the frames of its segments, and a square crop for each segment.

The crops depend only on the settings, the content of the chunk and the frame size. All randomness comes from
`generator`.
"""

import hashlib
from dataclasses import astuple, dataclass
from fractions import Fraction

import numpy as np

from clipmill.prep.core.chunk_input import ChunkLength
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.latents.recipe import Encoding, LatentsSettings

# Side length of a random crop as a fraction of the frame's short side. Chunks with the default height of 288 pixels get
# crops of 256 pixels, which need no resizing.
_RANDOM_SIDE = (8, 9)


def frames_on_screen(num_frames: int, *, chunk_fps: Fraction, fps: Fraction) -> list[int]:
    """Return the indices of the frames that a chunk with `num_frames` frames shows at 0, 1 / fps, 2 / fps, ... s."""
    num_moments = -(-num_frames * fps // chunk_fps)
    return [int(moment * chunk_fps // fps) for moment in range(num_moments)]


@dataclass(frozen=True)
class SegmentFrames:
    """Frames of a chunk to encode, one segment after another.

    Attributes:
        frames: Index of each frame in the chunk, ascending. A frame on the boundary of two segments occurs in both.
        has_next_frame: True if the last segment ends with a frame of the next chunk.
        num_repeated: Number of copies of the last frame that complete the last segment.
        lengths: Number of frames in each segment, without the copies of the last frame; empty for an image VAE.
    """

    frames: list[int]
    has_next_frame: bool = False
    num_repeated: int = 0
    lengths: tuple[int, ...] = ()


def video_segments(sampled_frames: list[int], *, segment_frames: int, has_next: bool, tail: str) -> SegmentFrames:
    """Divide frames of a chunk (the result of `frames_on_screen`) into segments for a video VAE.

    Segments have `segment_frames` frames, and the last frame of a segment is also the first frame of the next segment.
    If a segment ends where the chunk ends, its last frame comes from the next chunk. If there is no next chunk, an
    incomplete segment at the end is omitted if `tail` is `drop`, and completed with copies of the last frame if `tail`
    is `repeat`. If there is a next chunk, an incomplete segment is omitted.
    """
    step = segment_frames - 1
    count, remainder = divmod(len(sampled_frames), step)
    has_next_frame = has_next and count > 0 and remainder == 0
    if not has_next and tail == "repeat":
        count += remainder > 1 or not count  # a single remaining frame already ends the previous segment
    elif not has_next and remainder == 0:
        count = max(0, count - 1)
    parts = [sampled_frames[begin : begin + segment_frames] for begin in range(0, count * step, step)]
    lengths = [len(part) for part in parts]
    if has_next_frame:
        lengths[-1] += 1
    num_repeated = segment_frames - lengths[-1] if lengths else 0
    return SegmentFrames([frame for part in parts for frame in part], has_next_frame, num_repeated, tuple(lengths))


def segments_of(length: ChunkLength, encoding: Encoding) -> SegmentFrames:
    """Return the frames of a chunk to encode. An image VAE encodes every frame at the sampling rate."""
    sampled_frames = frames_on_screen(length.num_frames, chunk_fps=length.fps, fps=encoding.settings.fps_exact)
    if not encoding.is_video:
        return SegmentFrames(sampled_frames)
    return video_segments(
        sampled_frames, segment_frames=encoding.segment_frames, has_next=length.has_next, tail=encoding.settings.tail
    )


def has_segment(recipe: Recipe[LatentsSettings], length: ChunkLength) -> bool:
    """Return True if at least one frame of a chunk is encoded. A video VAE encodes only complete segments."""
    encoding = Encoding.from_recipe(recipe)
    return not encoding.is_video or bool(segments_of(length, encoding).lengths)


@dataclass(frozen=True)
class Square:
    """Square region of a frame, in pixels."""

    left: int
    top: int
    side: int


def segment_squares(
    num_segments: int, *, content: str, width: int, height: int, settings: LatentsSettings
) -> list[Square]:
    """Return the crop of each segment of a chunk.

    Args:
        content: Hash of the content of the chunk.
        width, height: Resolution of the frames in pixels.

    Raises:
        SourceFailure: frames_differ, if an exact crop is larger than the frames.
    """
    short_side_px = min(width, height)
    if settings.crop == "centre":
        return [Square((width - short_side_px) // 2, (height - short_side_px) // 2, short_side_px)] * num_segments
    side = settings.size if settings.crop == "exact" else max(1, short_side_px * _RANDOM_SIDE[0] // _RANDOM_SIDE[1])
    if side > short_side_px:
        message = f"--crop exact needs {side} x {side} pixels, but the frames have {width} x {height}"
        raise SourceFailure(FailureCode.FRAMES_DIFFER, f"{message}; use --crop random, which resizes")
    squares = []
    for segment in range(num_segments):
        rng = generator(settings.seed, content, f"crop {segment}")
        left, top = (int(rng.integers(length - side + 1)) for length in (width, height))
        squares.append(Square(left, top, side))
    return squares


def generator(seed: int, content: str, purpose: str) -> np.random.Generator:
    """Return a random generator that depends only on the arguments."""
    digest = hashlib.blake2b(f"{seed}/{content}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def flatten_squares(squares: list[Square]) -> list[int]:
    """Return left, top, width and height of all squares as one flat list, as stored in the index."""
    return [number for square in squares for number in (*astuple(square), square.side)]
