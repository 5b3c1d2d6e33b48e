"""Which square of the chunk's frames is encoded: one for each segment, a function of settings, key and frame size."""

import hashlib
from dataclasses import astuple, dataclass

import numpy as np

from prep.latents.settings import LatentsSettings

# Of 288 pixels, the default height of a chunk, it leaves 256: then nothing is resized.
_RANDOM_SIDE = (8, 9)


@dataclass(frozen=True)
class Square:
    """A part of a frame, in pixels."""

    left: int
    top: int
    side: int


def segment_squares(num_segments: int, *, key: str, width: int, height: int, settings: LatentsSettings) -> list[Square]:
    """The square of each segment of the chunk `key`, whose frames have `width` x `height` pixels."""
    short = min(width, height)
    if settings.crop == "centre":
        return [Square((width - short) // 2, (height - short) // 2, short)] * num_segments
    side = max(1, short * _RANDOM_SIDE[0] // _RANDOM_SIDE[1])
    squares = []
    for segment in range(num_segments):
        rng = generator(settings.seed, key, f"crop {segment}")
        left, top = (int(rng.integers(length - side + 1)) for length in (width, height))
        squares.append(Square(left, top, side))
    return squares


def generator(seed: int, key: str, purpose: str) -> np.random.Generator:
    """A generator that depends on these values alone."""
    digest = hashlib.blake2b(f"{seed}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def as_numbers(squares: list[Square]) -> list[int]:
    """left, top, width and height of each square, one after another, as the index has them."""
    return [number for square in squares for number in (*astuple(square), square.side)]
