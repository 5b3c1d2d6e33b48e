"""Find and read video files of any origin: their timing, from packets, and their frames.

Files are only opened as video containers, through the file protocol, so that a playlist disguised as a video reads
nothing else. Time 0 is the container's start, as in players and in the chunks that prep makes.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import ClipmillError, UserError
from clipmill.shards.containers import CONTAINERS, FILE_PROTOCOLS
from clipmill.train.data.frame_sampling import US_PER_S

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Longer than any video: such times are invalid, and would make endless windows.
_LONGEST_S = 1_000_000
# Containers round the durations in their headers, and a last frame may be longer than others.
_SLACK_S = 1
# In the header of a RIFF list that was never finished.
_UNKNOWN_LENGTHS = (0, 2**32 - 1)


# Video files in folders; a file that is named itself is opened whatever its suffix.
SUFFIXES = frozenset(
    (
        *(".3gp", ".asf", ".avi", ".flv", ".gif", ".ivf", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg"),
        *(".mts", ".mxf", ".ogv", ".rm", ".rmvb", ".ts", ".vob", ".webm", ".wmv", ".wtv"),
    )
)


class VideoFailed(ClipmillError):
    """A video cannot be read, or not to its end; the message says why."""


@dataclass(frozen=True, kw_only=True)
class VideoTiming:
    """Timing and pixel shape of a video, from its packets.

    Attributes:
        end_us: end of the last existing frame.
        last_us: time of the last existing frame.
        missing_us: duration that the header promises beyond the last packet, of video or audio (AVI: of video).
        fps: frames per second, averaged where they vary.
        aspect: width of a pixel divided by its height.
    """

    end_us: int
    last_us: int
    missing_us: int
    fps: Fraction
    aspect: Fraction

    @property
    def is_cut_off(self) -> bool:
        """Whether the header promises more than the file contains."""
        return self.missing_us > _SLACK_S * US_PER_S


@dataclass(frozen=True)
class TimedFrame:
    """A frame with its presentation time in microseconds."""

    begin_us: Fraction
    frame: "av.VideoFrame"


def read_timing(path: Path) -> VideoTiming:
    """Read all packets of a video without decoding them.

    Raises:
        VideoFailed: it is not a video file, or has no frames with times.
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
        # An audio track may be longer than the video. Without durations in the header, libav derives them from packets.
        promised_us = start_us + (container.duration or 0) if _promises(container) else 0
        promised_frames_us = stream.frames * unit_us if _is_cut_avi(container, path) else 0
        rate = stream.average_rate or stream.guessed_rate
        aspect = stream.sample_aspect_ratio or Fraction(1)
    if begin is None:
        raise VideoFailed("its video stream has no frames, or they have no times")
    if (end - begin) * unit_us > _LONGEST_S * US_PER_S:
        raise VideoFailed(
            f"its timestamps are not plausible: it would last {float((end - begin) * unit_us) / US_PER_S:.0f} s"
        )
    mean = Fraction(end - begin, count - 1) if count > 1 else Fraction(0)
    # Earlier frames may be missing, so the average duration is not used for the last frame.
    shown = length or (0 if before is None else end - before) or US_PER_S / (unit_us * (rate or 30))
    end_us = max(1, round((end + shown) * unit_us - start_us))
    return VideoTiming(
        end_us=end_us,
        last_us=round(end * unit_us - start_us),
        missing_us=max(0, promised_us - round(any_end_us), round(promised_frames_us) - end_us),
        fps=rate or (US_PER_S / (mean * unit_us) if mean else Fraction(30)),
        aspect=aspect if aspect > 0 else Fraction(1),
    )


def frames_of(path: Path, timing: VideoTiming) -> Iterator[TimedFrame]:
    """The frames of a video in presentation order, decoded once from start to end.

    Raises:
        VideoFailed: the decoder reports an error, a frame is damaged, or the last ones are missing. Frames before that
            are valid.
    """
    import av

    last_us = Fraction(-1)
    num_frames = 0
    with _opened(path) as (container, stream):
        stream.thread_type = "AUTO"
        stream.codec_context.options = {"err_detect": "explode"}  # report errors instead of concealing them
        unit_us = (stream.time_base or Fraction(1)) * US_PER_S
        start_us = container.start_time or 0
        try:
            for frame in container.decode(stream):
                if frame.pts is None:
                    raise VideoFailed("a frame has no time")
                begin_us = frame.pts * unit_us - start_us
                if frame.is_corrupt:
                    # A recording may begin between two key frames: frames that refer to the first one are missing.
                    if not num_frames:
                        continue
                    raise VideoFailed(f"the frame at {float(begin_us) / US_PER_S:.2f} s is damaged")
                num_frames += 1
                last_us = max(last_us, begin_us)
                yield TimedFrame(begin_us, frame)
        except (av.FFmpegError, ValueError) as error:
            where = f"after {float(last_us) / US_PER_S:.2f} s" if num_frames else "from the start"
            raise VideoFailed(f"it cannot be decoded {where}: {_reason(error)}") from error
    if not num_frames:
        raise VideoFailed("no frame of it can be decoded")
    if last_us < timing.last_us - _SLACK_S * US_PER_S:
        shown, due = float(last_us) / US_PER_S, timing.last_us / US_PER_S
        raise VideoFailed(f"the last decoded frame is at {shown:.2f} s, but the video has frames until {due:.2f} s")


@contextmanager
def _opened(path: Path) -> "Iterator[tuple[InputContainer, VideoStream]]":
    import av

    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": FILE_PROTOCOLS}
    try:
        if not path.is_file():
            raise VideoFailed("not a regular file" if path.exists() else "there is no such file")
        if not path.stat().st_size:
            raise VideoFailed("the file is empty")
        container = av.open(os.fspath(path), options=options, metadata_errors="ignore")
    except (OSError, ValueError) as error:  # libav's errors derive from both
        raise VideoFailed(f"it cannot be opened as a video: {_reason(error)}") from error
    with container:
        yield container, _video_stream(container)


def _video_stream(container: "InputContainer") -> "VideoStream":
    """The first video stream that is not a cover picture, as in prep."""
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
    """Whether the outermost lists of an AVI file extend beyond its end.

    Without the index at the end, libav estimates the duration from the file size. The number of frames in the header is
    more reliable, but it is wrong for files that were written to a pipe, or whose last frames are repeats.
    """
    if container.format.name != "avi":
        return False
    size_bytes, begin = path.stat().st_size, 0
    with path.open("rb") as file:
        # Above 1 GB there are several, one after another.
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


def find_videos(paths: Iterable[Path]) -> list[Path]:
    """The named files, and the videos of named folders, recursively and sorted; each file once.

    Raises:
        UserError: there is no such file or folder, or a folder holds no videos.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no {shown_name(path)}", hint="name videos, or folders of videos")
        videos = _in_folder(path) if path.is_dir() else [path]
        if not videos:
            raise UserError(
                f"the folder {shown_name(path)} holds no videos",
                hint=f"videos are recognised by their suffixes: {' '.join(sorted(SUFFIXES))}",
            )
        for video in videos:
            found.setdefault(os.path.realpath(video), video)
    if not found:
        raise UserError("no video is named", hint="name videos, or folders of videos")
    return list(found.values())


def _in_folder(folder: Path) -> list[Path]:
    videos = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        folders[:] = [name for name in folders if not name.startswith(".")]
        kept = (name for name in sorted(names) if not name.startswith("."))
        videos += [Path(place, name) for name in kept if Path(name).suffix.lower() in SUFFIXES]
    return videos


def shown_name(path: Path) -> str:
    """A path as printable text; file names may be arbitrary bytes."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(one if one.isprintable() else "\ufffd" for one in text)
