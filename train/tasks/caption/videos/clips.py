"""From a video file to clips as an evaluation of a run shows them, one for each window.

The pictures of a window are those on the screen at the moments that the run's sampling names, cut to the largest
centred square and resized as those of chunks are. Chunks went through an encoder and another size before, so that
pictures from a file are nearly, and not exactly, those from its shards.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.augment.colour import colour_kind
from train.data.decoding.crop import Rectangle
from train.data.decoding.pictures import Planes, as_yuv420, crop_clip
from train.data.frame_sampling import US_PER_S, Moments, Sampling, moments_of
from train.tasks.caption.videos.source import TimedFrame, VideoFacts, VideoFailed, frames_of, read_facts

if TYPE_CHECKING:
    import av


# Which parts of a video are captioned: exact arithmetic on whole microseconds, no I/O.


_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|ms)", re.ASCII)
_SHORTEST_US, _LONGEST_US = US_PER_S // 10, 3600 * US_PER_S
# A rest shorter than this part of a window joins the window before it.
_JOINS = Fraction(1, 4)


@dataclass(frozen=True)
class Window:
    """A span [begin_us, end_us) of a video, counted from the container's start as players do."""

    begin_us: int
    end_us: int


def windows_of(video_us: int, *, length_us: int) -> Iterator[Window]:
    """The windows of a video that lasts `video_us`: one behind the other, from its begin to its end.

    What is left at the end is a shorter window; less than a quarter of a window joins the one before instead. A video
    shorter than a window is one.
    """
    full, rest = divmod(video_us, length_us)
    if full and rest < _JOINS * length_us:
        full, rest = full - 1, rest + length_us
    yield from (Window(number * length_us, (number + 1) * length_us) for number in range(full))
    if rest:
        yield Window(full * length_us, full * length_us + rest)


def length_us(length: str) -> int:
    """Microseconds of a length as `10s` or `500ms`.

    Raises:
        UserError: it is none, or too short or long for a caption.
    """
    match = _LENGTH.fullmatch(length)
    if match is None:
        raise UserError(f'--len "{length}" is not a length', hint="write a number with its unit: 10s or 500ms")
    found_us = round(Fraction(match["number"]) * (1000 if match["unit"] == "ms" else US_PER_S))
    if not _SHORTEST_US <= found_us <= _LONGEST_US:
        raise UserError(f"--len {length} does not work", hint="give 100ms to 3600s; 10s is what most captions are of")
    return found_us


_LARGEST_RATE = 1_000_000  # of what can be told apart in microseconds


@dataclass(frozen=True)
class WindowClip:
    """The pictures of a window.

    Attributes:
        video: uint8 [T, S * S * 3 / 2], YUV 4:2:0 (train.data.decoding.pictures).
        colour: matrix and range (train.augment.colour).
        video_us: how long the whole video is.
    """

    window: Window
    video: Planes
    colour: int
    video_us: int


def window_clips(path: Path, sampling: Sampling, *, size_px: int, length_us: int) -> Iterator[WindowClip]:
    """The clips of a video's windows; only the pictures of one window are in memory.

    Raises:
        VideoFailed: the video cannot be read, or not to its end. Clips that came before are good.
    """
    facts = read_facts(path)
    pictures = _Pictures(frames_of(path, facts), aspect=facts.aspect, size_px=size_px)
    # Of a video that is cut off, whole windows before the cut are good.
    good_us = facts.end_us - facts.end_us % length_us if facts.is_cut_off else facts.end_us
    for window in windows_of(good_us, length_us=length_us):
        video, colour = pictures.at(_moments(window, sampling, facts))
        # What is damaged between the last moment and the window's end is of this window too.
        pictures.go_to(window.end_us)
        if facts.is_cut_off and pictures.are_over_before(facts.last_us):
            break
        yield WindowClip(window, video, colour, facts.end_us)
    if facts.is_cut_off:
        end_s, promised_s = facts.end_us / US_PER_S, (facts.end_us + facts.missing_us) / US_PER_S
        raise VideoFailed(f"it is cut off: its header promises {promised_s:.2f} s, and it ends at {end_s:.2f} s")


def _moments(window: Window, sampling: Sampling, facts: VideoFacts) -> Moments:
    # Rules that count frames count those of the file.
    fps = facts.fps.limit_denominator(_LARGEST_RATE)
    return moments_of(
        window.begin_us, window.end_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=None
    )


class _Pictures:
    """Takes moments in order and goes through the frames once; holds two of them at any time."""

    def __init__(self, frames: Iterator[TimedFrame], *, aspect: Fraction, size_px: int) -> None:
        self._frames, self._aspect, self._size_px = frames, aspect, size_px
        self._now = next(frames)  # also before it comes on the screen, as in chunks
        self._next = next(frames, None)
        self._picture: tuple[Planes, int] | None = None

    def at(self, moments: Moments) -> tuple[Planes, int]:
        """What is on the screen at these moments: pictures [T, S * S * 3 / 2], and their colour."""
        pictures = []
        colours = set()
        for numerator in moments.numerators:
            self.go_to(Fraction(numerator, moments.denominator))
            if self._picture is None:
                self._picture = picture_of(self._now.frame, aspect=self._aspect, size_px=self._size_px)
            pictures.append(self._picture[0])
            colours.add(self._picture[1])
        if len(colours) > 1:
            raise VideoFailed(f"its colours change their kind at {float(self._now.begin_us) / US_PER_S:.2f} s")
        return np.stack(pictures), colours.pop()

    def are_over_before(self, time_us: int) -> bool:
        """Whether the last picture has come, and it came on before this time."""
        return self._next is None and round(self._now.begin_us) < time_us

    def go_to(self, moment_us: Fraction | int) -> None:
        """Goes to the picture that is on the screen at a moment; the one behind it is decoded too."""
        while self._next is not None and self._next.begin_us <= moment_us:
            self._step()

    def _step(self) -> None:
        assert self._next is not None
        self._now, self._next, self._picture = self._next, None, None
        self._next = next(self._frames, None)


def picture_of(frame: "av.VideoFrame", *, aspect: Fraction, size_px: int) -> tuple[Planes, int]:
    """The largest centred square of a frame as it is shown: uint8 [S * S * 3 / 2], and its kind of colour."""
    planar = as_yuv420(frame)
    rectangle = shown_square(planar.width, planar.height, aspect=aspect)
    [planes] = crop_clip([planar], rectangle, size_px=size_px)
    colour = colour_kind(
        colorspace=int(planar.colorspace),
        color_range=int(planar.color_range),
        is_full_format=planar.format.name.startswith("yuvj"),
    )
    return turned(planes, quarters=frame.rotation // 90, size_px=size_px), colour


def shown_square(width: int, height: int, *, aspect: Fraction) -> Rectangle:
    """The part of a coded picture that is its largest centred square when it is shown.

    Args:
        aspect: width of a pixel by its height.
    """
    side = min(width * aspect, Fraction(height))
    cut_width, cut_height = max(1, int(side / aspect)), max(1, int(side))
    return Rectangle((width - cut_width) // 2, (height - cut_height) // 2, cut_width, cut_height)


def turned(planes: NDArray[np.uint8], *, quarters: int, size_px: int) -> NDArray[np.uint8]:
    """A square picture of planes, turned counter-clockwise by quarters."""
    if quarters % 4 == 0:
        return planes
    parts = np.split(planes, [size_px * size_px, size_px * size_px * 5 // 4])
    sides = (size_px, size_px // 2, size_px // 2)
    return np.concatenate(
        [np.rot90(part.reshape(side, side), quarters).ravel() for part, side in zip(parts, sides, strict=True)]
    )
