"""Which part of a chunk is encoded: choosing and decoding frames, and choosing a square crop for each segment.

The crops are a function of settings, key and frame size; all randomness comes from `generator`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from io import BytesIO

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from prep.core.failures import FailureCode, SourceFailure
from prep.latents.recipe import LatentsSettings
from shards.format import PACKET_REFERENCE

# For chunks of the default height of 288 pixels, this gives crops of 256 pixels, which need no resizing.
_RANDOM_SIDE = (8, 9)
RgbFrame = NDArray[np.uint8]  # [H, W, 3]


def frames_on_screen(num_frames: int, *, chunk_fps: Fraction, fps: Fraction) -> list[int]:
    """Return the indices of the frames that a chunk of `num_frames` shows at 0, 1 / fps, 2 / fps ... seconds."""
    num_moments = -(-num_frames * fps // chunk_fps)
    return [int(moment * chunk_fps // fps) for moment in range(num_moments)]


def decode_frames(
    content: bytes, wanted: Sequence[int], *, fps: Fraction, packet_frame: Sequence[int], packet_flags: Sequence[int]
) -> Iterator[RgbFrame]:
    """Decode the frames `wanted` (ascending) of the MP4 file `content`, skipping frames that none of them depends on.

    Args:
        fps: frame rate of the chunk.
        packet_frame, packet_flags: packet table of the chunk, in decoding order (shards.format.VIDEO_FIELDS).

    Raises:
        SourceFailure: decode_errors, or frames_differ if the decoder does not return a wanted frame.
    """
    due = iter(wanted)
    target = next(due, None)
    needed = set(wanted)
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the caller already decodes in parallel threads
            frames_per_tick = (stream.time_base or Fraction(0)) * fps
            number = 0
            for packet in container.demux(stream):
                if packet.size:
                    is_needed = packet_flags[number] & PACKET_REFERENCE or packet_frame[number] in needed
                    number += 1
                    if not is_needed:
                        continue
                for frame in packet.decode():
                    if target is not None and frame.pts is not None and frame.pts * frames_per_tick == target:
                        if frame.is_corrupt:
                            raise SourceFailure(FailureCode.DECODE_ERRORS, f"frame {target} is damaged")
                        yield np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
                        target = next(due, None)
                if target is None:
                    return
    except (av.error.FFmpegError, IndexError) as error:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"the chunk cannot be decoded: {error}") from None
    if target is not None:
        raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the decoder did not return frame {target}")


@dataclass(frozen=True)
class Square:
    """A square region of a frame, in pixels."""

    left: int
    top: int
    side: int


def segment_squares(num_segments: int, *, key: str, width: int, height: int, settings: LatentsSettings) -> list[Square]:
    """Return the crop of each segment of the chunk `key`, whose frames have `width` x `height` pixels."""
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
    """Return a random generator that depends on these values alone."""
    digest = hashlib.blake2b(f"{seed}/{key}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def as_numbers(squares: list[Square]) -> list[int]:
    """Return left, top, width and height of all squares in one list, as stored in the index."""
    return [number for square in squares for number in (*astuple(square), square.side)]
