"""Split a video file into windows, and make a clip of each, as evaluations of a run do.

The frames of a window are those that are displayed at the run's sampling times, cropped to the largest centred square
and resized like those of chunks. Chunks were resized and encoded before, so that clips from a file are nearly, and not
exactly, equal to those from its shards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import parse_length
from clipmill.train.augment.colour import colour_kind
from clipmill.train.data.decoding.pictures import Planes, Rectangle, as_yuv420, crop_clip
from clipmill.train.data.frame_sampling import US_PER_S, Moments, Sampling, moments_of
from clipmill.train.tasks.caption.videos.source import TimedFrame, VideoFailed, VideoTiming, frames_of, read_timing

if TYPE_CHECKING:
    import av

_LARGEST_RATE = 1_000_000  # one frame per microsecond
_SHORTEST_US, _LONGEST_US = US_PER_S // 10, 3600 * US_PER_S
# A remainder shorter than this fraction of a window is added to the last window.
_MIN_REMAINDER = Fraction(1, 4)


@dataclass(frozen=True)
class Window:
    """A span [begin_us, end_us) of a video, from the container's start as in players."""

    begin_us: int
    end_us: int


def windows_of(video_us: int, *, length_us: int) -> Iterator[Window]:
    """The consecutive windows of a video that lasts `video_us`, in exact arithmetic.

    The remainder at the end is a shorter window, or is added to the last one if it is shorter than a quarter of a
    window. A video shorter than a window is one window.
    """
    full, rest = divmod(video_us, length_us)
    if full and rest < _MIN_REMAINDER * length_us:
        full, rest = full - 1, rest + length_us
    yield from (Window(number * length_us, (number + 1) * length_us) for number in range(full))
    if rest:
        yield Window(full * length_us, full * length_us + rest)


def length_us(length: str, *, flag: str = "--len") -> int:
    """Parse a length such as `10s` or `500ms` to microseconds.

    Raises:
        UserError: it is not a length, or is out of range.
    """
    found_us = round(parse_length(length, flag=flag) * US_PER_S)
    if not _SHORTEST_US <= found_us <= _LONGEST_US:
        raise UserError(
            f"{flag} {length} is out of range",
            hint="use 100ms to 3600s; most captioned clips have about 10s",
            flags=(flag,),
        )
    return found_us


@dataclass(frozen=True)
class WindowClip:
    """The frames of a window.

    Attributes:
        video: uint8 [T, S * S * 3 / 2], YUV 4:2:0 (clipmill.train.data.decoding.pictures).
        colour: matrix and range (clipmill.train.augment.colour).
        video_us: duration of the whole video.
    """

    window: Window
    video: Planes
    colour: int
    video_us: int


def window_clips(path: Path, sampling: Sampling, *, size_px: int, length_us: int) -> Iterator[WindowClip]:
    """The clips of a video's windows; only one of them is in memory at a time.

    Raises:
        VideoFailed: the video cannot be read, or not to its end. Clips before that are valid.
    """
    timing = read_timing(path)
    pictures = _Pictures(frames_of(path, timing), size_px=size_px)
    # Of a truncated video, the whole windows before its end are valid.
    good_us = timing.end_us - timing.end_us % length_us if timing.missing_us else timing.end_us
    for window in windows_of(good_us, length_us=length_us):
        video, colour = pictures.at(_moments(window, sampling, timing))
        # Decode to the end of the window, so that damage after its last frame is found too.
        pictures.go_to(window.end_us)
        if timing.missing_us and pictures.are_over_before(timing.last_us):
            break
        yield WindowClip(window, video, colour, timing.end_us)
    if timing.missing_us:
        end_s, promised_s = timing.end_us / US_PER_S, (timing.end_us + timing.missing_us) / US_PER_S
        raise VideoFailed(f"it is cut off: its header promises {promised_s:.2f} s, and it ends at {end_s:.2f} s")


def _moments(window: Window, sampling: Sampling, timing: VideoTiming) -> Moments:
    # Sampling rules in frames refer to frames of the file.
    fps = timing.fps.limit_denominator(_LARGEST_RATE)
    return moments_of(
        window.begin_us, window.end_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=None
    )


class _Pictures:
    """Samples pictures at ascending times in one pass over the frames; holds two of them at a time."""

    def __init__(self, frames: Iterator[TimedFrame], *, size_px: int) -> None:
        self._frames, self._size_px = frames, size_px
        self._now = next(frames)  # also for times before its own, as in chunks
        self._next = next(frames, None)
        self._picture: tuple[Planes, int] | None = None

    def at(self, moments: Moments) -> tuple[Planes, int]:
        """The pictures displayed at these times, [T, S * S * 3 / 2], and the colour of the first one.

        Where tags of the colours change within a clip, pictures keep their values, as in chunks.
        """
        pictures = []
        for numerator in moments.numerators:
            self.go_to(Fraction(numerator, moments.denominator))
            if self._picture is None:
                self._picture = picture_of(self._now.frame, aspect=self._now.aspect, size_px=self._size_px)
            pictures.append(self._picture)
        return np.stack([planes for planes, _ in pictures]), pictures[0][1]

    def are_over_before(self, time_us: int) -> bool:
        """Whether the last picture was reached, and began before this time."""
        return self._next is None and round(self._now.begin_us) < time_us

    def go_to(self, moment_us: Fraction | int) -> None:
        """Advance to the picture displayed at a time; the one after it is decoded too."""
        while self._next is not None and self._next.begin_us <= moment_us:
            self._step()

    def _step(self) -> None:
        assert self._next is not None
        self._now, self._next, self._picture = self._next, None, None
        self._next = next(self._frames, None)


def picture_of(frame: "av.VideoFrame", *, aspect: Fraction, size_px: int) -> tuple[Planes, int]:
    """The largest centred square of an upright frame: planes, uint8 [S * S * 3 / 2], and colour."""
    planar = as_yuv420(frame)
    rectangle = shown_square(planar.width, planar.height, aspect=aspect)
    [planes] = crop_clip([planar], rectangle, size_px=size_px)
    colour = colour_kind(
        colorspace=int(planar.colorspace),
        color_range=int(planar.color_range),
        is_full_format=planar.format.name.startswith("yuvj"),
    )
    return planes, colour


def shown_square(width: int, height: int, *, aspect: Fraction) -> Rectangle:
    """The part of a coded picture that is displayed as its largest centred square.

    Args:
        aspect: width of a pixel divided by its height.
    """
    side = min(width * aspect, Fraction(height))
    cut_width, cut_height = max(1, int(side / aspect)), max(1, int(side))
    return Rectangle((width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height)
