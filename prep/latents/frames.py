"""Which part of a chunk is encoded: choosing frames, and choosing a square crop for each segment.

The crops are a function of settings, key and frame size; all randomness comes from `generator`.
"""

import hashlib
from dataclasses import astuple, dataclass
from fractions import Fraction

import numpy as np

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.latents.recipe import LatentsSettings

# For chunks of the default height of 288 pixels, this gives crops of 256 pixels, which need no resizing.
_RANDOM_SIDE = (8, 9)


def frames_on_screen(num_frames: int, *, chunk_fps: Fraction, fps: Fraction) -> list[int]:
    """Return the indices of the frames that a chunk of `num_frames` shows at 0, 1 / fps, 2 / fps ... seconds."""
    num_moments = -(-num_frames * fps // chunk_fps)
    return [int(moment * chunk_fps // fps) for moment in range(num_moments)]


@dataclass(frozen=True)
class Square:
    """A square region of a frame, in pixels."""

    left: int
    top: int
    side: int


def segment_squares(num_segments: int, *, key: str, width: int, height: int, settings: LatentsSettings) -> list[Square]:
    """Return the crop of each segment of the chunk `key`, whose frames have `width` x `height` pixels.

    Raises:
        SourceFailure: frames_differ, if an exact crop is larger than the frames.
    """
    short = min(width, height)
    if settings.crop == "centre":
        return [Square((width - short) // 2, (height - short) // 2, short)] * num_segments
    side = settings.size if settings.crop == "exact" else max(1, short * _RANDOM_SIDE[0] // _RANDOM_SIDE[1])
    if side > short:
        message = f"the frames have {width} x {height} pixels, and --crop exact needs {side}; --crop random resizes"
        raise SourceFailure(FailureCode.FRAMES_DIFFER, message)
    squares = []
    for segment in range(num_segments):
        rng = generator(settings.seed, key, f"crop {segment}")
        left, top = (int(rng.integers(length - side + 1)) for length in (width, height))
        squares.append(Square(left, top, side))
    return squares


def generator(seed: int, key: str, purpose: str) -> np.random.Generator:
    """Return a random generator that depends on these values alone."""
    digest = hashlib.blake2b(f"{seed}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def as_numbers(squares: list[Square]) -> list[int]:
    """Return left, top, width and height of all squares in one list, as stored in the index."""
    return [number for square in squares for number in (*astuple(square), square.side)]
