"""A video file from outside: what its packets say of it, and its frames with their times.

It is only opened as a video container, through the file protocol: a playlist that poses as a video reads nothing.
Time 0 is the container's start, as in a player and as in the chunks that prep makes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import ClipmillError
from shards.containers import CONTAINERS, FILE_PROTOCOLS
from train.data.frame_sampling import US_PER_S

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Longer than any video: a time that is none. There would be no end of windows.
_LONGEST_S = 1_000_000
# Containers round the durations in their headers, and a last frame may last for longer than others.
_SLACK_S = 1
# Of a RIFF list whose end was never written into its head.
_UNKNOWN_LENGTHS = (0, 2**32 - 1)


class VideoFailed(ClipmillError):
    """A video cannot be read, or not to its end; the message says why."""


@dataclass(frozen=True, kw_only=True)
class VideoFacts:
    """What the packets of a video say.

    Attributes:
        end_us: when the last frame that there is leaves the screen.
        last_us: when it comes on.
        missing_us: what the header promises, of pictures or sound, behind the last packet (AVI: of pictures).
        fps: frames per second, averaged where they vary.
        aspect: width of a pixel by its height.
    """

    end_us: int
    last_us: int
    missing_us: int
    fps: Fraction
    aspect: Fraction

    @property
    def is_cut_off(self) -> bool:
        """Whether the header promises more than there is."""
        return self.missing_us > _SLACK_S * US_PER_S


@dataclass(frozen=True)
class TimedFrame:
    """A frame, and when it comes on the screen, in microseconds."""

    begin_us: Fraction
    frame: "av.VideoFrame"


def read_facts(path: Path) -> VideoFacts:
    """Reads the packets of a video from end to end, and decodes nothing.

    Raises:
        VideoFailed: it is no video file, or has no frames, or they have no times.
    """
    import av

    with _opened(path) as (container, stream):
        unit_us = (stream.time_base or Fraction(1)) * US_PER_S
        begin, before, end, length, count = None, None, 0, 0, 0
        any_end_us = Fraction(0)
        try:
            for packet in container.demux():
                time = packet.dts if packet.pts is None else packet.pts
                if not packet.size or time is None or packet.time_base is None:
                    continue
                any_end_us = max(any_end_us, (time + (packet.duration or 0)) * packet.time_base * US_PER_S)
                if packet.stream_index != stream.index or packet.is_discard:
                    continue
                count += 1
                if begin is None:
                    begin, end, length = time, time, packet.duration or 0
                elif time >= end:
                    before, end, length = end, time, packet.duration or 0
                else:
                    begin, before = min(begin, time), time if before is None else max(before, time)
        except (av.FFmpegError, ValueError) as error:
            raise VideoFailed(f"its packets cannot be read: {_reason(error)}") from error
        start_us = container.start_time or 0
        # A sound track may be longer than the video. Headers without durations have them made up of what there is.
        promised_us = start_us + (container.duration or 0) if _promises(container) else 0
        promised_frames_us = stream.frames * unit_us if _is_cut_avi(container, path) else 0
        rate = stream.average_rate or stream.guessed_rate
        aspect = stream.sample_aspect_ratio or Fraction(1)
    if begin is None:
        raise VideoFailed("its video stream has no frames, or they have no times")
    if (end - begin) * unit_us > _LONGEST_S * US_PER_S:
        raise VideoFailed(f"its times make no sense: it would last {float((end - begin) * unit_us) / US_PER_S:.0f} s")
    mean = Fraction(end - begin, count - 1) if count > 1 else Fraction(0)
    # Frames before it may have been left out, so that it does not last as long as they do on average.
    shown = length or (0 if before is None else end - before) or US_PER_S / (unit_us * (rate or 30))
    end_us = max(1, round((end + shown) * unit_us - start_us))
    return VideoFacts(
        end_us=end_us,
        last_us=round(end * unit_us - start_us),
        missing_us=max(0, promised_us - round(any_end_us), round(promised_frames_us) - end_us),
        fps=rate or (US_PER_S / (mean * unit_us) if mean else Fraction(30)),
        aspect=aspect if aspect > 0 else Fraction(1),
    )


def frames_of(path: Path, facts: VideoFacts) -> Iterator[TimedFrame]:
    """The frames of a video in order of presentation, decoded once from end to end.

    Raises:
        VideoFailed: the decoder takes offence, a frame is damaged, or the last ones do not come out. What came before
            is good.
    """
    import av

    last_us = Fraction(-1)
    num_frames = 0
    with _opened(path) as (container, stream):
        stream.thread_type = "AUTO"
        stream.codec_context.options = {"err_detect": "explode"}  # an error, not a patched picture
        unit_us = (stream.time_base or Fraction(1)) * US_PER_S
        start_us = container.start_time or 0
        try:
            for frame in container.decode(stream):
                if frame.pts is None:
                    raise VideoFailed("a frame has no time")
                begin_us = frame.pts * unit_us - start_us
                if frame.is_corrupt:
                    # A recording may begin between two key frames: what needs the one before is not there.
                    if not num_frames:
                        continue
                    raise VideoFailed(f"the frame at {float(begin_us) / US_PER_S:.2f} s is damaged")
                num_frames += 1
                last_us = max(last_us, begin_us)
                yield TimedFrame(begin_us, frame)
        except (av.FFmpegError, ValueError) as error:
            where = f"behind {float(last_us) / US_PER_S:.2f} s" if num_frames else "from its begin"
            raise VideoFailed(f"it cannot be decoded {where}: {_reason(error)}") from error
    if not num_frames:
        raise VideoFailed("no frame of it can be decoded")
    if last_us < facts.last_us - _SLACK_S * US_PER_S:
        shown, due = float(last_us) / US_PER_S, facts.last_us / US_PER_S
        raise VideoFailed(
            f"frames come out of the decoder until {shown:.2f} s, and there should be some until {due:.2f} s"
        )


@contextmanager
def _opened(path: Path) -> "Iterator[tuple[InputContainer, VideoStream]]":
    import av

    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": FILE_PROTOCOLS}
    try:
        if not path.is_file():
            raise VideoFailed("it is no file" if path.exists() else "there is no such file")
        if not path.stat().st_size:
            raise VideoFailed("the file is empty")
        container = av.open(os.fspath(path), options=options, metadata_errors="ignore")
    except (OSError, ValueError) as error:  # libav's errors are both
        raise VideoFailed(f"it cannot be opened as a video: {_reason(error)}") from error
    with container:
        yield container, _video_stream(container)


def _video_stream(container: "InputContainer") -> "VideoStream":
    """The first video stream that is no cover picture: the one that prep takes."""
    import av

    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            if stream.codec_context is None:
                raise VideoFailed("there is no decoder for its codec")
            return stream
    kinds = sorted({str(stream.type) for stream in container.streams})
    raise VideoFailed("it holds no video stream" + (f", only {', '.join(kinds)}" if kinds else ""))


def _promises(container: "InputContainer") -> bool:
    return any(name in container.format.name for name in ("matroska", "mp4", "flv", "asf"))


def _is_cut_avi(container: "InputContainer", path: Path) -> bool:
    """Whether the outermost lists of an AVI file go on behind its end.

    Where the index at the end is gone, libav makes a duration up of the file's size. The number of frames in the header
    says more, but alone it is wrong of a file that was written into a pipe, and where the last frames are repeats.
    """
    if container.format.name != "avi":
        return False
    size_bytes, begin = path.stat().st_size, 0
    with path.open("rb") as file:
        # Above 1 GB there are several, one behind the other.
        while begin < size_bytes:
            file.seek(begin)
            head = file.read(8)
            length_bytes = int.from_bytes(head[4:], "little")
            if head[:4] != b"RIFF" or length_bytes in _UNKNOWN_LENGTHS:
                return False
            begin += 8 + length_bytes
    return begin > size_bytes


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
