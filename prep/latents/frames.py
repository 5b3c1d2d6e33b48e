"""Which frames of a chunk are encoded, and decoding just those."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import BytesIO

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from prep.core.failures import FailureCode, SourceFailure
from shards.format import PACKET_REFERENCE

RgbFrame = NDArray[np.uint8]  # [H, W, 3]


def frames_on_screen(num_frames: int, *, chunk_fps: Fraction, fps: Fraction) -> list[int]:
    """Indices of the frames that a chunk of `num_frames` shows at 0, 1 / fps, 2 / fps ... seconds after its begin."""
    num_moments = -(-num_frames * fps // chunk_fps)
    return [int(moment * chunk_fps // fps) for moment in range(num_moments)]


def decode_frames(
    content: bytes, wanted: Sequence[int], *, fps: Fraction, packet_frame: Sequence[int], packet_flags: Sequence[int]
) -> Iterator[RgbFrame]:
    """Decodes `wanted` (ascending) of the mp4 file `content`; frames that no other needs are skipped.

    Args:
        fps: of the chunk.
        packet_frame, packet_flags: its packet table, in decode order (shards.format.VIDEO_FIELDS).

    Raises:
        SourceFailure: decode_errors, or frames_differ where a wanted frame does not come out.
    """
    due = iter(wanted)
    target = next(due, None)
    needed = set(wanted)
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the caller's threads are the parallel part
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
        raise SourceFailure(FailureCode.FRAMES_DIFFER, f"frame {target} does not come out of the decoder")
