"""Windows of video files: decode any video file, divide it into windows of fixed length, and caption the windows.

Files are opened only as video containers, through the file protocol, so a playlist that is named like a video cannot
open other files. clipmill.shards.timeline determines which frame is displayed at which time, as for the chunks that
prep makes.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from clipmill.manifests.errors import ClipmillError, UserError
from clipmill.manifests.formatting import count_noun, parse_length
from clipmill.manifests.progress import Activity, ProgressRate, amount_text, join_parts
from clipmill.shards.timeline.model import Timeline, TimelineError, TrackPackets, find_track, open_container
from clipmill.shards.timeline.pictures import displayed_frames, first_picture
from clipmill.shards.timeline.reading import read_timeline
from clipmill.train.augment.colour import colour_encoding
from clipmill.train.data.clip_frames import Planes, Rectangle, as_yuv420, crop_clip
from clipmill.train.data.frame_sampling import US_PER_S, Moments, Sampling, moments_of
from clipmill.train.tasks.caption.tokenizer import one_line

if TYPE_CHECKING:
    import av
    from av.container import InputContainer


_SLACK_S = 1  # tolerated gap at the end, because a decoder may not output the last frames of a video

# Suffixes of video files in folders. Files that are passed directly may have any suffix.
SUFFIXES = frozenset(
    (
        *(".3gp", ".asf", ".avi", ".flv", ".gif", ".ivf", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg"),
        *(".mts", ".mxf", ".ogv", ".rm", ".rmvb", ".ts", ".vob", ".webm", ".wmv", ".wtv"),
    )
)


class VideoFailed(ClipmillError):
    """Error for a video that cannot be read, or cannot be read to its end. The message contains the reason."""


@dataclass(frozen=True, kw_only=True)
class VideoTiming:
    """Timing of a video, read from its packets.

    Attributes:
        end_us: End of the last frame.
        last_us: Presentation time of the last frame.
        missing_us: Part of the duration in the header that no packet covers; 0 if rounding may be the reason.
        fps: Frames per second; the mean rate if the rate varies.
        timeline: Times and shape of the frames.
        packets: Packets of the video track.
    """

    end_us: int
    last_us: int
    missing_us: int
    fps: Fraction
    timeline: Timeline
    packets: TrackPackets


@dataclass(frozen=True)
class TimedFrame:
    """An upright, cropped frame.

    Attributes:
        begin_us: Presentation time in microseconds.
        aspect: Pixel aspect ratio (width / height).
    """

    begin_us: Fraction
    frame: "av.VideoFrame"
    aspect: Fraction


def read_timing(path: Path) -> VideoTiming:
    """Read all packets of a video without decoding them.

    Raises:
        VideoFailed: The file is not a video, or has no frames with times.
    """
    with _open_container(path) as container, path.open("rb") as file:
        timeline, packets = read_timeline(container, file=file)
    with _open_container(path) as container:
        picture = first_picture(container, find_track(container, timeline.track))
        timeline = replace(timeline, shape=picture.shape)
    num_frames = int(packets.is_shown.sum())
    mean_interval_s = timeline.last / (num_frames - 1) if num_frames > 1 else Fraction(0)
    return VideoTiming(
        end_us=max(1, round(timeline.end * US_PER_S)),
        last_us=round(timeline.last * US_PER_S),
        missing_us=round(timeline.missing * US_PER_S),
        fps=timeline.rate or (1 / mean_interval_s if mean_interval_s > 0 else Fraction(30)),
        timeline=timeline,
        packets=packets,
    )


def frames_of(path: Path, timing: VideoTiming) -> Iterator[TimedFrame]:
    """Yield the frames of a video in presentation order, decoded once from start to end.

    Raises:
        VideoFailed: The decoder reports an error, a frame is damaged, or the last frames are missing. All earlier
            frames are valid.
    """
    last_s, num_frames, timeline = Fraction(-1), 0, timing.timeline
    try:
        with _open_container(path) as container:
            stream = find_track(container, timeline.track)
            stream.thread_type = "AUTO"
            stream.codec_context.options = {"err_detect": "explode"}  # report errors instead of concealing them
            for time_s, frame in displayed_frames(container, timeline, timing.packets):
                if frame.is_corrupt:
                    # Skip damaged frames at the start: a recording may start between two key frames.
                    if not num_frames:
                        continue
                    raise VideoFailed(f"the frame at {float(time_s):.2f} s is damaged")
                num_frames += 1
                last_s = max(last_s, time_s)
                yield TimedFrame(time_s * US_PER_S, frame, timeline.aspect_at(time_s))
    except _Unreadable as error:
        position = f"after {float(last_s):.2f} s" if num_frames else "from the start"
        raise VideoFailed(f"cannot be decoded {position}: {error}") from error
    if not num_frames:
        raise VideoFailed("no frame can be decoded")
    if last_s < timeline.last - _SLACK_S:
        expected_s = float(timeline.last)
        raise VideoFailed(
            f"the last decoded frame is at {float(last_s):.2f} s, but the video has frames until {expected_s:.2f} s"
        )


class _Unreadable(VideoFailed):
    """Error that libav reports while reading or decoding a video."""


@contextmanager
def _open_container(path: Path) -> "Iterator[InputContainer]":
    import av

    try:
        if not path.is_file():
            raise VideoFailed("not a regular file" if path.exists() else "there is no such file")
        if not path.stat().st_size:
            raise VideoFailed("the file is empty")
        container = open_container(f"file:{os.fspath(path)}")
    except (OSError, ValueError) as error:  # base classes of libav's errors
        raise VideoFailed(f"cannot be opened as a video: {_reason(error)}") from error
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
    """Return the given files, and all videos in the given folders and their subfolders, sorted within each folder.

    The result contains each file once.

    Raises:
        UserError: A file or folder does not exist, or a folder contains no videos.
    """
    video_of_path: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise UserError(
                f"there is no file or folder {shown_name(path)}", hint="pass video files, or folders with videos"
            )
        videos = _list_videos(path) if path.is_dir() else [path]
        if not videos:
            raise UserError(
                f"the folder {shown_name(path)} contains no videos",
                hint=f"use a folder with files that end in one of: {' '.join(sorted(SUFFIXES))}",
            )
        for video in videos:
            video_of_path.setdefault(os.path.realpath(video), video)
    if not video_of_path:
        raise UserError("there are no videos to caption", hint="pass videos, or folders with videos")
    return list(video_of_path.values())


def _list_videos(folder: Path) -> list[Path]:
    videos = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible_names = (name for name in sorted(names) if not name.startswith("."))
        videos += [Path(parent, name) for name in visible_names if Path(name).suffix.lower() in SUFFIXES]
    return videos


def shown_name(path: Path) -> str:
    """Return a path as printable text. File names may contain arbitrary bytes."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


_LARGEST_RATE = 1_000_000  # one frame per microsecond
_SHORTEST_US, _LONGEST_US = US_PER_S // 10, 3600 * US_PER_S
# A remainder shorter than this fraction of a window is merged into the last window.
_MIN_REMAINDER = Fraction(1, 4)


@dataclass(frozen=True)
class Window:
    """A time span [begin_us, end_us) of a video, relative to the start of the container, as in players."""

    begin_us: int
    end_us: int


def windows_of(video_us: int, *, length_us: int) -> Iterator[Window]:
    """Yield the consecutive windows of a video.

    A remainder at the end becomes a shorter window, or is merged into the last window if it is shorter than a quarter
    of a window. A video that is shorter than a window is a single window.

    Args:
        video_us: Duration of the video.
        length_us: Length of a window.
    """
    num_full, rest_us = divmod(video_us, length_us)
    if num_full and rest_us < _MIN_REMAINDER * length_us:
        num_full, rest_us = num_full - 1, rest_us + length_us
    yield from (Window(index * length_us, (index + 1) * length_us) for index in range(num_full))
    if rest_us:
        yield Window(num_full * length_us, num_full * length_us + rest_us)


def parse_length_us(length: str, *, flag: str = "--len") -> int:
    """Convert a length such as `10s` or `500ms` to microseconds.

    Raises:
        UserError: The string is not a length, or the length is out of range.
    """
    length_us = round(parse_length(length, flag=flag) * US_PER_S)
    if not _SHORTEST_US <= length_us <= _LONGEST_US:
        raise UserError(
            f"{flag} {length} is not between 100ms and 3600s",
            hint="use 100ms to 3600s, such as 10s, the length of most captioned clips",
            flags=(flag,),
        )
    return length_us


@dataclass(frozen=True)
class WindowClip:
    """A window with its sampled frames.

    Attributes:
        video: Frames as YUV 4:2:0 planes, uint8 [T, S * S * 3 / 2] (clipmill.train.data.clip_frames).
        colour: Index of the colour encoding (clipmill.train.augment.colour).
        video_us: Duration of the complete video.
    """

    window: Window
    video: Planes
    colour: int
    video_us: int


def window_clips(path: Path, sampling: Sampling, *, size_px: int, length_us: int) -> Iterator[WindowClip]:
    """Yield the clips of a video's windows. Only one clip is in memory at a time.

    Raises:
        VideoFailed: The video cannot be read, or cannot be read to its end. All earlier clips are valid.
    """
    timing = read_timing(path)
    sampler = _FrameSampler(frames_of(path, timing), size_px=size_px)
    # In a truncated video, only complete windows are valid.
    valid_us = timing.end_us - timing.end_us % length_us if timing.missing_us else timing.end_us
    for window in windows_of(valid_us, length_us=length_us):
        # Some sampling rules count frames, so they need the frame rate of the file.
        fps = timing.fps.limit_denominator(_LARGEST_RATE)
        video, colour = sampler.sample(
            moments_of(
                window.begin_us, window.end_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=None
            )
        )
        # Decode to the end of the window to detect damage after the last sampled frame.
        sampler.go_to(window.end_us)
        if timing.missing_us and sampler.ends_before(timing.last_us):
            break
        yield WindowClip(window, video, colour, timing.end_us)
    if timing.missing_us:
        end_s, promised_s = timing.end_us / US_PER_S, (timing.end_us + timing.missing_us) / US_PER_S
        raise VideoFailed(f"the file is cut off: it ends at {end_s:.2f} s, but its header promises {promised_s:.2f} s")


class _FrameSampler:
    """Sampler of frames at ascending times, in one pass over a video. Only two frames are in memory at a time."""

    def __init__(self, frames: Iterator[TimedFrame], *, size_px: int) -> None:
        self._frames, self._size_px = frames, size_px
        self._current = next(frames)  # the first frame, displayed even before its presentation time, as in chunks
        self._next = next(frames, None)
        self._square: tuple[Planes, int] | None = None

    def sample(self, moments: Moments) -> tuple[Planes, int]:
        """Return the frames displayed at the given times, [T, S * S * 3 / 2], and the first frame's colour encoding.

        If colour tags change within a clip, frames keep their pixel values, as in chunks.
        """
        squares = []
        for numerator in moments.numerators:
            self.go_to(Fraction(numerator, moments.denominator))
            if self._square is None:
                self._square = centred_square(self._current.frame, aspect=self._current.aspect, size_px=self._size_px)
            squares.append(self._square)
        return np.stack([planes for planes, _ in squares]), squares[0][1]

    def ends_before(self, time_us: int) -> bool:
        """Return True if the last frame was reached, and its presentation time is before the given time."""
        return self._next is None and round(self._current.begin_us) < time_us

    def go_to(self, moment_us: Fraction | int) -> None:
        """Advance to the frame that is displayed at a time, and decode the frame after it."""
        while self._next is not None and self._next.begin_us <= moment_us:
            # Release the current frame before decoding another frame, so that only two frames are in memory.
            self._current, self._next, self._square = self._next, None, None
            self._next = next(self._frames, None)


def centred_square(frame: "av.VideoFrame", *, aspect: Fraction, size_px: int) -> tuple[Planes, int]:
    """Crop an upright frame to its largest centred square, and resize it.

    Returns:
        Planes, uint8 [S * S * 3 / 2], and the colour encoding.
    """
    planar = as_yuv420(frame)
    rectangle = shown_square(planar.width, planar.height, aspect=aspect)
    [planes] = crop_clip([planar], rectangle, size_px=size_px)
    colour = colour_encoding(
        colorspace=int(planar.colorspace),
        color_range=int(planar.color_range),
        is_full_format=planar.format.name.startswith("yuvj"),
    )
    return planes, colour


def shown_square(width: int, height: int, *, aspect: Fraction) -> Rectangle:
    """Return the rectangle of a coded frame that is displayed as the largest centred square.

    Args:
        width, height: Resolution of the coded frame in pixels.
        aspect: Pixel aspect ratio (width / height).
    """
    side = min(width * aspect, Fraction(height))
    cut_width, cut_height = max(1, int(side / aspect)), max(1, int(side))
    return Rectangle((width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height)


@dataclass(frozen=True)
class Caption:
    """A generated caption.

    Attributes:
        source: Name of the model as a source of captions.
        likelihood: Mean log probability per token (clipmill.train.tasks.caption.decoding).
    """

    text: str
    source: str = ""
    likelihood: float | None = None


# Function that generates one caption per clip.
CaptionClips = Callable[[list[WindowClip]], list[Caption]]


@dataclass(frozen=True)
class CaptionedWindow:
    """A window with its caption.

    Attributes:
        caption: Caption on a single line.
        video_us: Duration of the complete video.
    """

    video: Path
    begin_us: int
    end_us: int
    caption: str
    video_us: int
    source: str = ""
    likelihood: float | None = None


@dataclass(frozen=True)
class VideoEnd:
    """End of a video.

    Attributes:
        failure: Reason why the video could not be read to its end; None on success. All earlier windows are valid.
    """

    video: Path
    failure: str | None = None


Clip = tuple[Path, WindowClip]
Group = list[Clip | VideoEnd]


def caption_videos(
    videos: Iterable[Path],
    caption: CaptionClips,
    *,
    sampling: Sampling,
    size_px: int,
    length_us: int,
    batch: int,
) -> Iterator[CaptionedWindow | VideoEnd]:
    """Yield the captioned windows of videos in order, and a `VideoEnd` after the windows of each video.

    Args:
        caption: Function that captions clips.
        sampling: Rule for the choice of frames in a window.
        size_px: Side length of the frames.
        length_us: Length of a window.
        batch: Number of windows to caption together.
    """
    items = _clips(videos, sampling=sampling, size_px=size_px, length_us=length_us)
    for group in _decode_ahead(_groups(items, batch=batch)):
        clips = [item[1] for item in group if not isinstance(item, VideoEnd)]
        captions = iter(caption(clips) if clips else [])
        for item in group:
            if isinstance(item, VideoEnd):
                yield item
                continue
            video, clip = item
            window, generated = clip.window, next(captions)
            yield CaptionedWindow(
                video=video,
                begin_us=window.begin_us,
                end_us=window.end_us,
                caption=one_line(generated.text),
                video_us=clip.video_us,
                source=generated.source,
                likelihood=generated.likelihood,
            )


def _decode_ahead(groups: Iterator[Group]) -> Iterator[Group]:
    """Decode the next group in a thread while the model captions the current group."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
    try:
        future = pool.submit(next, groups, None)
        while (group := future.result()) is not None:
            future = pool.submit(next, groups, None)
            yield group
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _groups(clips: Iterator[Clip | VideoEnd], *, batch: int) -> Iterator[Group]:
    """Yield groups of up to `batch` clips. The end of a video follows the clips of the video."""
    group: Group = []
    num_clips = 0
    for item in clips:
        group.append(item)
        num_clips += not isinstance(item, VideoEnd)
        if num_clips == batch or not num_clips:
            yield group
            group, num_clips = [], 0
    if group:
        yield group


def _clips(videos: Iterable[Path], *, sampling: Sampling, size_px: int, length_us: int) -> Iterator[Clip | VideoEnd]:
    for video in videos:
        failure = None
        try:
            for clip in window_clips(video, sampling, size_px=size_px, length_us=length_us):
                yield video, clip
        except VideoFailed as error:
            failure = str(error)
        yield VideoEnd(video, failure)


class VideoProgress:
    """Display of progress and failures on standard error.

    Args:
        num_videos: Number of videos to caption.
    """

    def __init__(self, *, num_videos: int) -> None:
        self._num_videos, self._num_done, self._num_failed = num_videos, 0, 0
        self._finished_us = self._now_us = self._num_windows = self._num_empty = 0
        self._begin_s, self._pace = time.monotonic(), ProgressRate()
        self._activity = Activity("decoding and captioning the first windows")

    def __enter__(self) -> Self:
        self._activity.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.__exit__(kind, error, trace)

    def say_done(self, where: str) -> None:
        """Print a summary with the amount of captioned video and the number of empty captions.

        Args:
            where: Location of the captions, appended to the first part of the summary.
        """
        windows, videos = count_noun(self._num_windows, "window"), count_noun(self._num_videos, "video")
        rates = f"{self._captioned_s():.0f} s of video, {self._speed()}"
        empty = (
            f"; {self._num_empty:,} of {count_noun(self._num_windows, 'caption')} are empty" if self._num_empty else ""
        )
        print(f"done: captions of {windows} of {videos}{where}{empty}; {rates}", file=sys.stderr, flush=True)

    def show(self, event: CaptionedWindow | VideoEnd) -> None:
        """Show a captioned window, or the end of a video."""
        fraction = 0.0
        if isinstance(event, CaptionedWindow):
            self._num_windows += 1
            self._num_empty += not event.caption
            self._now_us, fraction = event.end_us, min(event.end_us / event.video_us, 1.0)
        else:
            self._num_done += 1
            self._finished_us, self._now_us = self._finished_us + self._now_us, 0
            if event.failure is not None:
                self._num_failed += 1
                print(f"{shown_name(event.video)}: {event.failure}", file=sys.stderr, flush=True)
        num_done = self._num_done + fraction
        self._pace.add(num_done)
        amount = amount_text(round(num_done, 1), self._num_videos, "video")
        self._activity.say(
            lambda: join_parts(amount, self._speed(), self._pace.time_left(self._num_videos)),
            work="captioning",
            fraction=num_done / self._num_videos,
        )

    def _captioned_s(self) -> float:
        return (self._finished_us + self._now_us) / US_PER_S

    def _speed(self) -> str:
        speed = self._captioned_s() / max(time.monotonic() - self._begin_s, 1e-9)
        return join_parts(f"{speed:.1f}x real time", f"{self._num_failed} failed" if self._num_failed else "")
