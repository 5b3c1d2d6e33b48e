"""Decoding single frames of a chunk with its packet table, without decoding frames that none of them depends on."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import BytesIO

import av
import av.error
from av.video.frame import VideoFrame

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.format import PACKET_REFERENCE


def decode_frames(
    content: bytes, wanted: Sequence[int], *, fps: Fraction, packet_frame: Sequence[int], packet_flags: Sequence[int]
) -> Iterator[VideoFrame]:
    """Decode the frames `wanted` (ascending) of the MP4 file `content`, and yield them in order.

    Args:
        fps: frame rate of the chunk.
        packet_frame, packet_flags: packet table of the chunk, in decoding order (clipmill.shards.format.VIDEO_FIELDS).

    Raises:
        SourceFailure: decode_errors, or frames_differ if the decoder does not return a wanted frame.
    """
    due = iter(wanted)
    target = next(due, None)
    needed = set(wanted)
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the caller already works in parallel
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
                        yield frame
                        target = next(due, None)
                if target is None:
                    return
    except (av.error.FFmpegError, IndexError) as error:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"the chunk cannot be decoded: {error}") from None
    if target is not None:
        raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the decoder did not return frame {target}")
