"""Find and read video files of any origin: their timing, from packets, and their frames.

Files are only opened as video containers, through the file protocol, so that a playlist disguised as a video reads
nothing else. What is on show at which time says `clipmill.shards.timeline`, as for the chunks that prep makes.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import ClipmillError, UserError
from clipmill.shards.timeline.model import Timeline, TimelineError, TrackPackets, open_container, track_of
from clipmill.shards.timeline.pictures import first_picture, shown_frames
from clipmill.shards.timeline.reading import read_timeline
from clipmill.train.data.frame_sampling import US_PER_S

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

_SLACK_S = 1  # a decoder may keep the last frames of a damaged file

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
    """Timing of a video, from its packets.

    Attributes:
        end_us: End of the last existing frame.
        last_us: Time of the last existing frame.
        missing_us: Duration that the header promises beyond the last packet, if it is more than containers round.
        fps: Frames per second, averaged where they vary.
        timeline: Times and shape of the video.
        packets: Its packets.
    """

    end_us: int
    last_us: int
    missing_us: int
    fps: Fraction
    timeline: Timeline
    packets: TrackPackets


@dataclass(frozen=True)
class TimedFrame:
    """A frame, upright and cropped, with its presentation time in microseconds and the aspect of its pixels."""

    begin_us: Fraction
    frame: "av.VideoFrame"
    aspect: Fraction


def read_timing(path: Path) -> VideoTiming:
    """Read all packets of a video without decoding them.

    Raises:
        VideoFailed: It is not a video file, or has no frames with times.
    """
    with _open_container(path) as container, path.open("rb") as file:
        timeline, packets = read_timeline(container, file=file)
    with _open_container(path) as container:
        picture = first_picture(container, track_of(container, timeline.track))
        timeline = replace(timeline, shape=picture.shape)
    num_frames = int(packets.is_shown.sum())
    mean = timeline.last / (num_frames - 1) if num_frames > 1 else Fraction(0)
    return VideoTiming(
        end_us=max(1, round(timeline.end * US_PER_S)),
        last_us=round(timeline.last * US_PER_S),
        missing_us=round(timeline.missing * US_PER_S),
        fps=timeline.rate or (1 / mean if mean > 0 else Fraction(30)),
        timeline=timeline,
        packets=packets,
    )


def frames_of(path: Path, timing: VideoTiming) -> Iterator[TimedFrame]:
    """Yield the frames of a video in presentation order, decoded once from start to end.

    Raises:
        VideoFailed: The decoder reports an error, a frame is damaged, or the last ones are missing. Frames before that
            are valid.
    """
    last, num_frames, timeline = Fraction(-1), 0, timing.timeline
    try:
        with _open_container(path) as container:
            stream = track_of(container, timeline.track)
            stream.thread_type = "AUTO"
            stream.codec_context.options = {"err_detect": "explode"}  # report errors instead of concealing them
            for time, frame in shown_frames(container, timeline, timing.packets):
                if frame.is_corrupt:
                    # A recording may begin between two key frames: frames that refer to the first one are missing.
                    if not num_frames:
                        continue
                    raise VideoFailed(f"the frame at {float(time):.2f} s is damaged")
                num_frames += 1
                last = max(last, time)
                yield TimedFrame(time * US_PER_S, frame, timeline.aspect_at(time))
    except _Unreadable as error:
        where = f"after {float(last):.2f} s" if num_frames else "from the start"
        raise VideoFailed(f"it cannot be decoded {where}: {error}") from error
    if not num_frames:
        raise VideoFailed("no frame of it can be decoded")
    if last < timeline.last - _SLACK_S:
        shown, due = float(last), float(timeline.last)
        raise VideoFailed(f"the last decoded frame is at {shown:.2f} s, but the video has frames until {due:.2f} s")


class _Unreadable(VideoFailed):
    """libav reports an error while it reads or decodes."""


@contextmanager
def _open_container(path: Path) -> "Iterator[InputContainer]":
    import av

    try:
        if not path.is_file():
            raise VideoFailed("not a regular file" if path.exists() else "there is no such file")
        if not path.stat().st_size:
            raise VideoFailed("the file is empty")
        container = open_container(f"file:{os.fspath(path)}")
    except (OSError, ValueError) as error:  # libav's errors derive from both
        raise VideoFailed(f"it cannot be opened as a video: {_reason(error)}") from error
    try:
        with container:
            yield container
    except TimelineError as error:
        raise VideoFailed(str(error)) from error
    except (av.FFmpegError, ValueError) as error:
        raise _Unreadable(_reason(error)) from error


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
