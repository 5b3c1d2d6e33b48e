"""Plain decoding of any video file in memory, by way of its container: the path for what has no packet table.

A file is only opened as one of `shards.containers.CONTAINERS`, and nothing else is opened on its behalf. A wanted frame
that does not come out is an error; no other frame stands in for it.
"""

import io
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from shards.containers import CONTAINERS, NO_PROTOCOLS

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

_OPTIONS = {"format_whitelist": CONTAINERS, "protocol_whitelist": NO_PROTOCOLS}
# Twice the pixels of 8K video. A file of a few bytes can claim pictures of any size, and a decoder makes room for them.
_MAX_PIXELS = 1 << 26


class PlainVideo:
    """The first video stream of a file; frames are numbered in order of presentation.

    Args:
        content: the whole file.

    Attributes:
        pts: of every frame, ascending, in units of `time_base` seconds.
        time_base: seconds, exact.
        end_pts: where the last frame leaves the screen: after as long as the median frame.
        width, height: in pixels.

    Raises:
        av.FFmpegError: it cannot be opened or read.
        ValueError: it has no video stream, or one of too large pictures, or a packet has no time.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        with self._open() as (container, stream):
            self.time_base = stream.time_base or Fraction(1)
            self.width, self.height = stream.width, stream.height
            times: list[int] = []
            key_times: list[int] = []
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                if packet.pts is None:
                    raise ValueError("a packet has no time")
                times.append(packet.pts)
                if packet.is_keyframe:
                    key_times.append(packet.pts)
        if not times:
            raise ValueError("it has no frames")
        self.pts = sorted(times)
        self._key_pts = sorted(key_times)
        gaps = sorted(after - before for before, after in pairwise(self.pts))
        self.end_pts = self.pts[-1] + (gaps[len(gaps) // 2] if gaps else 1)

    def decode(self, frames: Collection[int]) -> "dict[int, av.VideoFrame]":
        """Those of `frames` that come out whole, by their number.

        Raises:
            av.FFmpegError: the decoder takes offence at the file.
        """
        found: dict[int, av.VideoFrame] = {}
        with self._open() as (container, stream):
            decoder = container.decode(stream)
            now: int | None = None  # time of the last frame that came out
            for number in sorted(set(frames)):
                if not 0 <= number < len(self.pts):
                    continue
                target = self.pts[number]
                before = bisect_right(self._key_pts, target) - 1
                # Seeking pays only over a key frame that has not been reached yet.
                if before > 0 and (now is None or self._key_pts[before] > now):
                    container.seek(self._key_pts[before], stream=stream)
                    decoder = container.decode(stream)
                for frame in decoder:
                    if frame.pts is None:
                        continue
                    now = frame.pts
                    if now == target and not frame.is_corrupt:
                        found[number] = frame
                    if now >= target:
                        break
        return found

    @contextmanager
    def _open(self) -> "Iterator[tuple[InputContainer, VideoStream]]":
        import av

        content = io.BytesIO(self._content)
        with av.open(content, mode="r", options=_OPTIONS, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise ValueError("it has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError("there is no decoder for its codec")
            if stream.width * stream.height > _MAX_PIXELS:
                raise ValueError(f"pictures of {stream.width} x {stream.height} are larger than {_MAX_PIXELS:,} pixels")
            stream.codec_context.options = {"max_pixels": str(_MAX_PIXELS)}  # what the packets say may differ
            stream.codec_context.thread_count = 1  # the loader's threads are the parallel part
            yield container, stream
