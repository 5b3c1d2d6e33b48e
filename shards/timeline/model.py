"""Timeline, frame shape and packets of a source, and functions that open a source."""

import json
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.opening import CONTAINERS, FILE_PROTOCOLS

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

DEMUXERS = f"{CONTAINERS},h264,hevc"  # allowed formats of sources: value of libav's option `format_whitelist`
CONTINUOUS_FORMAT = "nut"  # container format that supports all codecs, and timestamps in any unit

US_PER_S = 1_000_000
ONE = Fraction(1)
NO_TIME = np.iinfo(np.int64).min  # placeholder for a missing timestamp
_MIN_FRAME_BYTES = 24  # minimum size of a packet that certainly contains a frame
Filter = tuple[str, dict[str, str]]  # name and options of a filter of libavfilter


class TimelineError(ValueError):
    """The frames of a source cannot be placed on one timeline.

    Attributes:
        code: Failure code of `prep`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Shape:
    """Crop and orientation of the frames of a source.

    Attributes:
        crop: Number of pixels that the container crops at each edge: left, top, right, bottom.
        matrix: Display matrix without translation: a, b, c, d. The point (x, y) is displayed at (a x + c y, b x + d y).
    """

    crop: tuple[int, int, int, int] = (0, 0, 0, 0)
    matrix: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 1.0)

    @property
    def is_transposed(self) -> bool:
        """True if the rows of a coded frame are displayed as columns."""
        return self._kind() == "transposed"

    def crop_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of a coded frame after cropping, at least 1x1."""
        left, top, right, bottom = self.crop
        return max(1, width - left - right), max(1, height - top - bottom)

    def crop_filters(self) -> list[Filter]:
        """Return the filters that crop a frame."""
        if not any(self.crop):
            return []
        left, top, right, bottom = self.crop
        size = {"w": f"iw-{left + right}", "h": f"ih-{top + bottom}"}
        return [("crop", {**size, "x": str(left), "y": str(top), "exact": "1"})]

    def orientation_filters(self) -> list[Filter]:
        """Return the filters that turn a frame upright."""
        a, b, c, d = self.matrix
        kind = self._kind()
        if kind == "transposed":
            direction = {(True, True): "cclock_flip", (True, False): "clock", (False, True): "cclock"}
            return [("transpose", {"dir": direction.get((b > 0, c > 0), "clock_flip")})]
        if kind == "tilted":
            return [("rotate", {"a": f"{self.degrees:.3f}*PI/180"})]
        return [*([("hflip", {})] if a < 0 else []), *([("vflip", {})] if d < 0 else [])]

    @property
    def is_tilted(self) -> bool:
        """True if frames are rotated by an angle that is not a multiple of 90 degrees."""
        return self._kind() == "tilted"

    @property
    def degrees(self) -> float:
        """Clockwise rotation of frames in degrees, in [0, 360)."""
        a, b, _, _ = self.matrix
        return math.degrees(math.atan2(b, a)) % 360

    def _kind(self) -> str:
        a, b, c, d = (abs(value) for value in self.matrix)
        tolerance = 0.02 * max(a, b, c, d)  # about one degree
        if max(b, c) <= tolerance:
            return "upright"
        return "transposed" if max(a, d) <= tolerance else "tilted"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of a source, without its packets.

    Attributes:
        track: Index of the video stream in the container.
        start: Timestamp of time 0 in seconds.
        seek_start: Timestamp in seconds that libav treats as time 0 when it seeks; None if it is `start`.
        end: End of the last frame in seconds from time 0.
        last: Start of the last frame in seconds from time 0.
        rate: Average frame rate in frames per second; 0 if unknown.
        missing: Seconds from the last packet to the end stated in the header; 0 if rounding can explain the difference.
        truncation: Description of the missing end of a truncated file; empty if the file is complete.
        is_continuous: True if the timeline equals the timestamps of the file minus `start`.
        is_blind: True if the container has no list of keyframes, so that a seek may land between two keyframes, or in
            the middle of an audio frame.
        is_indexed: True if an index in the file lists its packets. Otherwise, a probe reads all packets.
        key_gap: Longest time between two keyframes in seconds; 0 if every seek lands on a keyframe.
        shape: Crop and orientation of the frames.
        aspects: Pairs (time in seconds, pixel aspect ratio), where each ratio applies until the next time. The ratio is
            width / height; the first time is 0.
        transfer: Transfer characteristics of the first frame (ISO/IEC 23091-2), 2 if unknown.
        primaries: Color primaries of the first frame (ISO/IEC 23091-2), 2 if unknown.
        notes: Unusual properties of the video, one text for each.
    """

    track: int = 0
    start: Fraction = Fraction(0)
    seek_start: Fraction | None = None
    end: Fraction = Fraction(0)
    last: Fraction = Fraction(0)
    rate: Fraction = Fraction(0)
    missing: Fraction = Fraction(0)
    truncation: str = ""
    is_continuous: bool = True
    is_blind: bool = False
    is_indexed: bool = True
    key_gap: Fraction = Fraction(0)
    shape: Shape = Shape()
    aspects: tuple[tuple[Fraction, Fraction], ...] = ((Fraction(0), ONE),)
    transfer: int = 2
    primaries: int = 2
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the fields that readers of frames need, as JSON; an empty string if all fields have default values."""
        default = Timeline()
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name in _STORED and getattr(self, name) != getattr(default, name)
        }
        values |= {name: str(values[name]) for name in ("start", "seek_start", "key_gap") if name in values}
        if "shape" in values:
            values["shape"] = [self.shape.crop, self.shape.matrix]
        if "aspects" in values:
            values["aspects"] = [[str(time), str(aspect)] for time, aspect in self.aspects]
        return json.dumps(values, separators=(",", ":")) if values else ""

    def aspect_at(self, time: Fraction) -> Fraction:
        """Return the pixel aspect ratio (width / height, after rotation) at a time in seconds."""
        aspect = [aspect for begin, aspect in self.aspects if begin <= max(time, Fraction(0))][-1]
        return 1 / aspect if self.shape.is_transposed else aspect

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Parse the output of `to_json`."""
        values: dict[str, Any] = json.loads(text) if text else {}
        values |= {name: Fraction(values[name]) for name in ("start", "seek_start", "key_gap") if name in values}
        if "shape" in values:
            crop, matrix = values["shape"]
            values["shape"] = Shape(tuple(crop), tuple(matrix))
        if "aspects" in values:
            values["aspects"] = tuple((Fraction(time), Fraction(aspect)) for time, aspect in values["aspects"])
        return cls(**values)


_STORED = frozenset(
    {
        "track",
        "start",
        "seek_start",
        "is_continuous",
        "is_blind",
        "is_indexed",
        "key_gap",
        "shape",
        "aspects",
        "transfer",
        "primaries",
    }
)


@dataclass(frozen=True)
class TrackPackets:
    """The packets of the video track in file order. Times are in units of the stream.

    Attributes:
        times: Presentation times, int64 [packets]. They are corrected if the source is not continuous.
        durations: Durations, int64 [packets]; 0 where unknown.
        is_shown: True for each packet that is displayed, bool [packets]. Edit lists hide packets that are needed only
            to decode other packets.
        restarts: Parts between restarts of the timestamps, as pairs (index of the first packet, offset that was added
            to the timestamps).
    """

    times: NDArray[np.int64]
    durations: NDArray[np.int64]
    is_shown: NDArray[np.bool_]
    restarts: tuple[tuple[int, int], ...] = ((0, 0),)


def open_container(file: "str | IO[bytes]", *, formats: str = DEMUXERS) -> "InputContainer":
    """Open a source, with an allowlist of demuxers and protocols.

    Args:
        file: URL of a local file (`file:PATH`), or a file object.
        formats: Names of the allowed demuxers, separated by commas.

    Raises:
        av.FFmpegError, OSError: The file is not a supported video container, or cannot be read.
    """
    import av

    options = {"format_whitelist": formats, "protocol_whitelist": FILE_PROTOCOLS}
    return av.open(file, "r", options=options, metadata_errors="ignore")


def video_tracks(container: "InputContainer") -> "list[VideoStream]":
    """Return the video streams of a container; the first one is the main stream.

    Cover images and thumbnails are omitted. As in players, streams that the container marks as default come first, and
    streams with a single frame come last.
    """
    import av

    still_images = av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails
    tracks = [stream for stream in container.streams.video if not stream.disposition & still_images]
    return sorted(
        tracks,
        key=lambda stream: (
            stream.codec_context is None,
            stream.frames == 1,
            not stream.disposition & av.stream.Disposition.default,
        ),
    )


def container_start(container: "InputContainer") -> Fraction:
    """Return the exact timestamp of time 0 in seconds.

    libav rounds the start of the container to microseconds, but not the starts of its streams.
    """
    start = Fraction(container.start_time or 0, US_PER_S)
    exact_starts = (
        stream.start_time * stream.time_base
        for stream in container.streams
        if stream.start_time is not None and stream.time_base
    )
    return next((time for time in exact_starts if abs(time - start) * US_PER_S <= 1), start)


def find_track(container: "InputContainer", index: int) -> "VideoStream":
    """Return the video stream with this index in the container."""
    return next(stream for stream in container.streams.video if stream.index == index)


def pixel_aspect(stream: "VideoStream") -> Fraction:
    """Return the pixel aspect ratio (width / height). As in players, the value of the container takes precedence."""
    aspect = stream.sample_aspect_ratio or ONE
    return aspect if aspect > 0 else ONE


def average_rate(stream: "VideoStream") -> Fraction:
    """Return the average frame rate of a stream in frames per second; 0 if unknown."""
    return stream.average_rate or stream.guessed_rate or Fraction(0)


def frame_times(
    source: "str | os.PathLike[str]", timeline: Timeline, *, begin: Fraction, end: Fraction
) -> NDArray[np.float64]:
    """Return the times in seconds of the frames from `begin` to `end` in a continuous source, float64 [frames].

    Some frames before `begin` and after `end` may be included. Nothing is decoded: the times are the sorted timestamps
    of the packets. Very small packets are omitted, because in some codecs they mean that the decoder skips a frame.

    Raises:
        av.FFmpegError: A packet cannot be read.
    """
    with open_container(f"file:{os.fspath(source)}", formats=f"{DEMUXERS},{CONTINUOUS_FORMAT}") as container:
        stream = find_track(container, timeline.track)
        unit = stream.time_base or ONE
        if begin > 0:
            container.seek(math.floor((begin + timeline.start) / unit), stream=stream)
        times, last = [], math.ceil((end + timeline.start) / unit)
        for packet in container.demux(stream):
            time = packet.dts if packet.pts is None else packet.pts
            if time is None or packet.size < _MIN_FRAME_BYTES or packet.is_discard:
                continue
            times.append(time)
            if packet.dts is not None and packet.dts > last:
                break
        return np.asarray(np.unique(np.array(times, np.int64)) * float(unit) - float(timeline.start), np.float64)
