"""The timeline of a source: what is on show at time t, and in which shape. No other module interprets a source's times.

Time 0 is the start of the container, as in players: the earliest timestamp of its tracks. A frame is on show from its
timestamp until the next frame begins; the last frame lasts as long as its packet says. Three readers ask for it: the
probe, which reads every packet once (or the index of an MP4), readers of frames (`shown_frames`), and the encoder,
whose ffmpeg gets the file's own timestamps and never corrects them.

A timeline is *continuous* if the file's timestamps, minus `start`, are the timeline. Otherwise its packets get other
timestamps (`timed_packets`): parts whose timestamps start again follow one another, and frames without timestamps
(AVI) are shown one after another in presentation order. ffmpeg gets such a source as a copy with these timestamps
(`write_continuous`), which is not encoded again.

The shape of a picture is its crop and its orientation, both of the container, and the width of its pixels, which may
change within the stream. libav is loaded by the first function that opens a source.
"""

import io
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.containers import CONTAINERS, FILE_PROTOCOLS

if TYPE_CHECKING:
    import av
    from av.container import InputContainer, OutputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.stream import VideoStream

DEMUXERS = f"{CONTAINERS},h264,hevc"
CONTINUOUS_FORMAT = "nut"  # holds any codec, and timestamps in any unit

_US_PER_S = 1_000_000
# Packets without a container. The timestamps that libav generates for them change after a seek.
_RAW = frozenset({"h264", "hevc", "mpegvideo"})
# Formats in which a seek lands on any packet instead of a key frame, because they have no list of key frames.
_BLIND_SEEKS = frozenset({"mpegts", "mpeg", "wtv", "rm"})
# Timestamps of 33 bits, which libav continues above their limit: a part may seem to begin a day after the part before.
_WRAPPING = frozenset({"mpegts", "mpeg", "wtv"})
# Formats that store decoding times. In the others, libav derives them from presentation times.
_WITH_DECODING_TIMES = ("mpegts", "mpeg", "wtv", "mp4", "avi", "flv", "mxf")
# Containers whose duration was not estimated from the bitrate, and those whose duration is the end of the last frame
# whenever the first frame begins.
_WITH_HEADER_DURATION = ("matroska", "mp4", "flv", "asf", "mxf", "ivf")
_DURATION_IS_END = ("matroska", "asf")
_HEADER_SLACK_S = Fraction(1)  # containers round and pad the durations in their headers
# Limits that reject damaged timestamps, which can span centuries. In total: a day, or 600 seconds per frame if that is
# more; for a single frame: an hour.
_LONGEST_S, _LONGEST_MEAN_FRAME_S, _LONGEST_FRAME_S = 24 * 3600, 600, 3600
_RESTART_S = Fraction(1, 5)  # decoding times that go back by less are the rounding of a muxer
_GAP_S, _GAP_FRAMES = 5.0, 50  # a longer pause between two frames is mentioned
_MAX_ASPECT = 64  # beyond it, a few rows in a damaged header would become a picture of gigabytes
_TRANSFERS = {16: "PQ", 18: "HLG"}
_NO_TIME = np.iinfo(np.int64).min
_FLV_HEADER = b"FLV\1"
_MPEG_VIDEO = frozenset({"mpeg1video", "mpeg2video"})
_MAX_GUESS_FRAMES = 4  # by which libav's guess of a missing timestamp may be wrong
_MIN_FRAME_BYTES = 24  # of a packet that certainly holds a frame
_MAX_SHAPES = 200  # of a stream; a damaged one would change with every key frame
_ONE = Fraction(1)


Filter = tuple[str, dict[str, str]]  # name and options of a filter of libavfilter


class TimelineError(ValueError):
    """A source cannot be shown on one timeline.

    Attributes:
        code: Kind of the problem, a failure code of `prep`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Shape:
    """Crop and orientation of the pictures of a source.

    Attributes:
        crop: Pixels that the container cuts off: left, top, right, bottom.
        matrix: The display matrix without its shift: a, b, c, d, where (x, y) is shown at (a x + c y, b x + d y).
    """

    crop: tuple[int, int, int, int] = (0, 0, 0, 0)
    matrix: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 1.0)

    @property
    def is_transposed(self) -> bool:
        """Whether rows of the coded picture are shown as columns."""
        return self._kind() == "transposed"

    def cropped(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of a coded picture after the crop; at least one pixel is left."""
        left, top, right, bottom = self.crop
        return max(1, width - left - right), max(1, height - top - bottom)

    def crop_filters(self) -> list[Filter]:
        """Return the filters that crop a picture."""
        if not any(self.crop):
            return []
        left, top, right, bottom = self.crop
        size = {"w": f"iw-{left + right}", "h": f"ih-{top + bottom}"}
        return [("crop", {**size, "x": str(left), "y": str(top), "exact": "1"})]

    def orientation_filters(self) -> list[Filter]:
        """Return the filters that turn a picture upright."""
        a, b, c, d = self.matrix
        kind = self._kind()
        if kind == "transposed":
            direction = {(True, True): "cclock_flip", (True, False): "clock", (False, True): "cclock"}
            return [("transpose", {"dir": direction.get((b > 0, c > 0), "clock_flip")})]
        if kind == "turned":
            return [("rotate", {"a": f"{self.degrees:.3f}*PI/180"})]
        return [*([("hflip", {})] if a < 0 else []), *([("vflip", {})] if d < 0 else [])]

    @property
    def is_turned(self) -> bool:
        """Whether the picture is rotated by an angle that is no quarter turn."""
        return self._kind() == "turned"

    @property
    def degrees(self) -> float:
        """Clockwise rotation of the picture in degrees, from 0 up to 360."""
        a, b, _, _ = self.matrix
        return math.degrees(math.atan2(b, a)) % 360

    def _kind(self) -> str:
        a, b, c, d = (abs(value) for value in self.matrix)
        slack = 0.02 * max(a, b, c, d)  # about one degree
        if max(b, c) <= slack:
            return "upright"
        return "transposed" if max(a, d) <= slack else "turned"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of a source, without its packets.

    Attributes:
        track: Index of the video stream in the container.
        start: Timestamp of time 0 in seconds.
        seek_start: Timestamp from which libav counts when it seeks, if that is not `start`.
        end: End of the last frame in seconds from time 0.
        last: Time of the last frame in seconds.
        rate: Frames per second, the average if it varies; 0 if unknown.
        missing: Seconds that the header promises beyond the last packet, if they are more than containers round.
        cut: What is missing at the end of a truncated file; empty if nothing is.
        is_continuous: Whether the timestamps of the file, minus `start`, are the timeline.
        is_blind: Whether a seek may land between two key frames, and inside a frame of the sound.
        key_gap: Longest time between two key frames in seconds; 0 if a seek lands on a key frame.
        shape: Crop and orientation of the pictures.
        aspects: Width of a pixel divided by its height, with the times in seconds from which it holds; the first is 0.
        transfer: Transfer characteristics of the first frame (ISO/IEC 23091-2), 2 if unknown.
        primaries: Colour primaries, likewise.
        notes: What may surprise in the pictures, in a sentence each.
    """

    track: int = 0
    start: Fraction = Fraction(0)
    seek_start: Fraction | None = None
    end: Fraction = Fraction(0)
    last: Fraction = Fraction(0)
    rate: Fraction = Fraction(0)
    missing: Fraction = Fraction(0)
    cut: str = ""
    is_continuous: bool = True
    is_blind: bool = False
    key_gap: Fraction = Fraction(0)
    shape: Shape = Shape()
    aspects: tuple[tuple[Fraction, Fraction], ...] = ((Fraction(0), _ONE),)
    transfer: int = 2
    primaries: int = 2
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return what a reader of frames needs as JSON text; empty for an ordinary source."""
        ordinary = Timeline()
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name in _STORED and getattr(self, name) != getattr(ordinary, name)
        }
        values |= {name: str(values[name]) for name in ("start", "seek_start", "key_gap") if name in values}
        if "shape" in values:
            values["shape"] = [self.shape.crop, self.shape.matrix]
        if "aspects" in values:
            values["aspects"] = [[str(time), str(aspect)] for time, aspect in self.aspects]
        return json.dumps(values, separators=(",", ":")) if values else ""

    def aspect_at(self, time: Fraction) -> Fraction:
        """Return the width of a pixel divided by its height, as shown upright, at a time in seconds."""
        aspect = [aspect for begin, aspect in self.aspects if begin <= max(time, Fraction(0))][-1]
        return 1 / aspect if self.shape.is_transposed else aspect

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Return the timeline that `to_json` wrote."""
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
        "key_gap",
        "shape",
        "aspects",
        "transfer",
        "primaries",
    }
)


@dataclass(frozen=True)
class TrackPackets:
    """The packets of the video track in the order of the file; times in units of the stream.

    Attributes:
        times: Presentation times, int64 [packets]: timestamps of the file, in a source that is not continuous those
            that it should have.
        durations: Durations, 0 where unknown, int64 [packets].
        is_shown: Whether the packet is shown: edit lists hide packets that others need for decoding, bool [packets].
        restarts: The first packet of each part, and what is added to its timestamps and to the following ones.
    """

    times: NDArray[np.int64]
    durations: NDArray[np.int64]
    is_shown: NDArray[np.bool_]
    restarts: tuple[tuple[int, int], ...] = ((0, 0),)


def open_container(file: "str | IO[bytes]", *, formats: str = DEMUXERS) -> "InputContainer":
    """Open a source with an allowlist of demuxers and protocols.

    Args:
        file: URL of a local file (`file:PATH`), or its bytes.
        formats: Names of the demuxers that may open it.

    Raises:
        av.FFmpegError, OSError: It is not a supported video container, or cannot be read.
    """
    import av

    options = {"format_whitelist": formats, "protocol_whitelist": FILE_PROTOCOLS}
    return av.open(file, "r", options=options, metadata_errors="ignore")


def video_tracks(container: "InputContainer") -> "list[VideoStream]":
    """Return the video streams that may be the video, the best one first.

    Cover pictures and thumbnails are none. As in players, a stream that the container marks as default comes first,
    and a stream with a single frame comes last.
    """
    import av

    pictures = av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails
    tracks = [stream for stream in container.streams.video if not stream.disposition & pictures]
    return sorted(
        tracks,
        key=lambda stream: (
            stream.codec_context is None,
            stream.frames == 1,
            not stream.disposition & av.stream.Disposition.default,
        ),
    )


def start_of(container: "InputContainer") -> Fraction:
    """Return the timestamp of time 0 in seconds; libav rounds it to microseconds, its streams do not."""
    start = Fraction(container.start_time or 0, _US_PER_S)
    exact = (
        stream.start_time * stream.time_base
        for stream in container.streams
        if stream.start_time is not None and stream.time_base
    )
    return next((time for time in exact if abs(time - start) * _US_PER_S <= 1), start)


def has_index(container: "InputContainer", stream: "VideoStream") -> bool:
    """Whether the file has an index with the time and position of each packet (MP4), so that none has to be read."""
    is_listed = "mp4" in container.format.name and bool(stream.duration) and stream.frames > 0
    return is_listed and stream.frames == len(stream.index_entries)


def indexed_timeline(container: "InputContainer", stream: "VideoStream", *, size_bytes: int) -> Timeline:
    """Return the timeline of a video for which `has_index` is true.

    Only the end of the file is read, and only if the index and the duration in the header disagree.

    Raises:
        TimelineError: The file is shorter than its index says, or its times are impossible.
        av.FFmpegError: A packet cannot be read.
    """
    entries, unit = stream.index_entries, stream.time_base or _ONE
    held_bytes = max(entries[row].pos + entries[row].size for row in range(max(0, len(entries) - 100), len(entries)))
    if held_bytes > size_bytes:
        raise TimelineError(
            "source_truncated",
            f"truncated: the index refers to bytes up to {held_bytes}, but the file has {size_bytes} bytes",
        )
    last = len(entries) - 1
    while last > 0 and entries[last].is_discard:
        last -= 1
    first = next((row for row in range(last) if not entries[row].is_discard), 0)
    step = (entries[last].timestamp - entries[max(first, last - 20)].timestamp) / max(1, min(20, last - first))
    begin = stream.start_time or 0
    listed = begin + entries[last].timestamp - entries[first].timestamp + step
    end: int | Fraction = begin + stream.duration
    if last != len(entries) - 1 or abs(listed - end) > 2 * step + 1:
        end = _end_behind(container, stream, entries[last].timestamp)
    start = start_of(container)
    timeline = Timeline(track=stream.index, start=start, end=end * unit - start, rate=_rate_of(stream))
    return _checked(timeline, num_packets=len(entries))


def _rate_of(stream: "VideoStream") -> Fraction:
    return stream.average_rate or stream.guessed_rate or Fraction(0)


def _end_behind(container: "InputContainer", stream: "VideoStream", timestamp: int) -> int:
    """Return the end of the last frame in units of the stream, from the packets behind the key frame before a time."""
    container.seek(timestamp, stream=stream)
    end = last = 0
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None and not packet.is_discard and packet.pts >= last:
            last, end = packet.pts, packet.pts + (packet.duration or 0)
    return end


def read_timeline(
    container: "InputContainer", *, file: "IO[bytes] | None" = None, on_read: Callable[[], None] = lambda: None
) -> tuple[Timeline, TrackPackets]:
    """Read all packets of a source once, without decoding them.

    Args:
        container: A container just opened, from which nothing has been read.
        file: The bytes of the file, for what libav does not tell of an AVI.
        on_read: Called for every packet.

    Raises:
        TimelineError: There is no video, or its times are impossible.
        av.FFmpegError: A packet cannot be read.
    """
    start = start_of(container)
    tracks = video_tracks(container)
    if not tracks:
        kinds = sorted({str(stream.type) for stream in container.streams})
        raise TimelineError("no_video", f"no video stream (streams: {', '.join(kinds) or 'none'})")
    lists = {stream.index: _PacketList(stream) for stream in tracks}
    any_end, held_bytes = start, 0
    for packet in container.demux():
        on_read()
        if not packet.size:
            continue
        held_bytes = max(held_bytes, (packet.pos or 0) + packet.size)
        if packet.stream_index in lists:
            lists[packet.stream_index].add(packet)
        time = packet.dts if packet.pts is None else packet.pts
        if time is not None and packet.time_base:
            any_end = max(any_end, (time + (packet.duration or 0)) * packet.time_base)
    filled = [stream for stream in tracks if len(lists[stream.index].times) > 1]
    track = lists[(filled or tracks)[0].index]
    timeline, packets = track.on_timeline(container, file=file, start=start)
    if container.format.name == "flv" and file is not None:
        file.seek(held_bytes)
        if _FLV_HEADER in file.read(1024):
            raise TimelineError(
                "bad_timestamps",
                f"another FLV file begins behind byte {held_bytes}, at {float(timeline.end):.2f} s, and libav does not read"
                " it: split the file there",
            )
    missing, cut = _missing_end(container, track, timeline, any_end=any_end, file=file)
    return _checked(replace(timeline, missing=missing, cut=cut), num_packets=len(track.times)), packets


class _PacketList:
    """The packets of one video stream, as they are read."""

    def __init__(self, stream: "VideoStream") -> None:
        self.stream = stream
        self.times: list[int] = []  # presentation times; decoding times where they are missing
        self.decoding_times: list[int] = []
        self.durations: list[int] = []
        self.flags: list[int] = []  # 1: key frame, 2: hidden by an edit list
        self.num_untimed = 0  # before the first packet with a timestamp
        self.is_cut = False
        self.is_bidirectional: list[bool] = []  # of MPEG-1 and MPEG-2 pictures
        self.key_packets: list[tuple[int, bytes]] = []  # those with another sequence header than the one before
        self._header = b""

    def add(self, packet: "Packet[Stream]") -> None:
        """Append a packet."""
        pts, dts = packet.pts, packet.dts
        self.is_cut = packet.is_corrupt
        time = dts if pts is None else pts
        if time is None:
            self.num_untimed += not any(known != _NO_TIME for known in self.times[-1:])
            time = _NO_TIME
        self.times.append(time)
        self.decoding_times.append(time if dts is None else dts)
        self.durations.append(packet.duration or 0)
        self.flags.append(packet.is_keyframe + 2 * packet.is_discard)
        codec = self.stream.codec_context.name if self.stream.codec_context else ""
        if codec in _MPEG_VIDEO:
            self.is_bidirectional.append(_is_b_picture(packet))
        if packet.is_keyframe and len(self.key_packets) < _MAX_SHAPES:
            header = _sequence_header(packet, codec=codec)
            if header and header != self._header:
                self._header = header
                self.key_packets.append((len(self.times) - 1, bytes(packet)))

    def on_timeline(
        self, container: "InputContainer", *, file: "IO[bytes] | None", start: Fraction
    ) -> "tuple[Timeline, TrackPackets]":
        """Return the timeline and the packets of this stream."""
        stream, name, num_packets = self.stream, container.format.name, len(self.times)
        if name in _RAW or self.num_untimed == num_packets > 0:
            codec = stream.codec_context.name if stream.codec_context else "unknown"
            raise TimelineError(
                "bad_timestamps",
                f"the frames have no timestamps, as in a raw {codec} stream; convert it to a container with timestamps:"
                " ffmpeg -r RATE -i IN OUT.mkv",
            )
        if self.num_untimed:
            message = f"the first {self.num_untimed} of {num_packets} frames have no timestamps"
            raise TimelineError("bad_timestamps", message)
        unit = stream.time_base or _ONE
        times, dts = np.array(self.times, np.int64), np.array(self.decoding_times, np.int64)
        durations, flags = np.array(self.durations, np.int64), np.array(self.flags, np.int64)
        if (missing := times == _NO_TIME).any():  # in the middle of the stream
            times[missing] = np.maximum.accumulate(times)[missing]
            dts[missing] = times[missing]
        is_shown, is_key = flags & 2 == 0, flags & 1 == 1
        order = _decoded_order(container, stream, num_packets=num_packets) if name == "avi" else None
        is_retimed = order is not None
        if order is not None:
            times = np.sort(dts)[order]
        elif name == "mpeg" and self.is_bidirectional:
            read, times = times, _times_in_display_order(times, durations, np.array(self.is_bidirectional))
            is_retimed = bool((times != read).any())
        steps = np.diff(np.unique(times))  # a frame without a duration lasts as long as the one before it
        frame = int(steps[-1]) if len(steps) else max(1, round(1 / (_rate_of(stream) or Fraction(30)) / unit))
        lengths = np.where(durations > 0, durations, frame)
        has_dts = any(known in name for known in _WITH_DECODING_TIMES)
        steps_s = np.diff(dts if has_dts else _key_steps(times, is_key)) * float(unit)
        restarts = _restarts(steps_s, times, lengths, unit=unit, may_wrap=name in _WRAPPING)
        notes = []
        for (first, offset), (behind, _) in zip(restarts, [*restarts[1:], (num_packets, 0)], strict=True):
            times[first:behind] += offset
        if len(restarts) > 1:
            first, many = restarts[1][0], "again" if len(restarts) == 2 else f"again {len(restarts) - 1} times"
            where = f"at packet {first} ({float(int(times[first:].min()) * unit - start):.2f} s)"
            notes.append(f"timestamps start {many}, first {where}: the parts follow one another")
        last = int(np.argmax(np.where(is_shown, times, _NO_TIME))) if num_packets else 0
        end = int(times[last] + lengths[last]) if num_packets else 0
        if name == "avi" and file is not None and stream.average_rate == 1 / unit:
            end = max(end, _num_avi_frames(file, stream.index))  # dropped frames at the end repeat the last one
        aspects, changes = self._changes(times, unit=unit, start=start)
        is_blind = name in _BLIND_SEEKS
        keys = np.concatenate([np.sort(times[is_key & is_shown]), [end]])
        timeline = Timeline(
            track=stream.index,
            start=start,
            end=end * unit - start,
            last=int(times[last]) * unit - start if num_packets else Fraction(0),
            rate=_rate_of(stream),
            is_continuous=len(restarts) == 1 and not is_retimed,
            is_blind=is_blind,
            key_gap=int(np.diff(keys).max(initial=0)) * unit if is_blind else Fraction(0),
            aspects=aspects,
            notes=(*notes, *_gap_notes(times[is_shown], unit=unit, start=start), *changes),
        )
        return timeline, TrackPackets(times, durations, is_shown, restarts)

    def _changes(
        self, times: NDArray[np.int64], *, unit: Fraction, start: Fraction
    ) -> tuple[tuple[tuple[Fraction, Fraction], ...], list[str]]:
        """Return the pixel aspects with the times from which they hold, and a note if the picture changes."""
        stream = self.stream
        aspect = stream.sample_aspect_ratio or _ONE
        aspects = [(Fraction(0), aspect if aspect > 0 else _ONE)]
        sizes: list[tuple[Fraction, str]] = []
        for row, packet in self.key_packets if len(self.key_packets) > 1 else []:
            if (shape := _decoded_shape(stream, packet)) is None:
                continue
            width, height, aspect = shape
            time = Fraction(0) if not sizes else int(times[row]) * unit - start
            text = f"{width}x{height}" + ("" if aspect == 1 else f" with pixels of {aspect}")
            if not sizes or sizes[-1][1] != text:
                sizes.append((time, text))
            if time and aspects[-1][1] != aspect:
                aspects.append((time, aspect))
        if len(sizes) < 2:
            return tuple(aspects), []
        time, text = sizes[1]
        more = f", and {len(sizes) - 2} more times" if len(sizes) > 2 else ""
        note = (
            f"the picture changes from {sizes[0][1]} to {text} at {float(time):.2f} s{more}: each part keeps its shape"
        )
        return tuple(aspects), [note]


def _is_b_picture(packet: "Packet[Stream]") -> bool:
    """Whether an MPEG-1 or MPEG-2 picture is a B picture (ISO/IEC 13818-2, 6.2.3)."""
    head = bytes(memoryview(packet)[:2048])
    begin = head.find(b"\0\0\1\0")
    return 0 <= begin < len(head) - 5 and head[begin + 5] >> 3 & 7 == 3


def _times_in_display_order(
    times: NDArray[np.int64], durations: NDArray[np.int64], is_b: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the presentation times of MPEG-1 or MPEG-2 pictures in a program stream.

    It has a timestamp for every few pictures only, and libav guesses the others, at times wrongly. A picture follows
    the one before it in display order, in which B pictures come before the reference that precedes them in the file.
    Only a timestamp that is further away than a few pictures counts: there is a gap, or time starts again.
    """
    display: list[int] = []
    held = None
    for row, is_bidirectional in enumerate(is_b.tolist()):
        if is_bidirectional:
            display.append(row)
        else:
            display += [] if held is None else [held]
            held = row
    display += [] if held is None else [held]
    found, due = times.copy(), int(times[display[0]])
    for row in display:
        length = int(durations[row])
        if not length or abs(int(times[row]) - due) > _MAX_GUESS_FRAMES * length:
            due = int(times[row])
        found[row] = due
        due += length
    return found


def _key_steps(times: NDArray[np.int64], is_key: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return times that go back only where timestamps start again, for a container without decoding times.

    A key frame is shown after all frames before it.
    """
    latest = np.maximum.accumulate(times)
    restarts = np.flatnonzero(is_key[1:] & (times[1:] < latest[:-1])) + 1
    for first, behind in pairwise([0, *restarts.tolist(), len(times)]):
        latest[first:behind] = np.maximum.accumulate(times[first:behind])
    return latest


def _restarts(
    steps_s: NDArray[np.float64],
    times: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    unit: Fraction,
    may_wrap: bool,
) -> tuple[tuple[int, int], ...]:
    """Return where timestamps start again: the first packet of each part, and what is added to its timestamps.

    Args:
        steps_s: Seconds from each packet to the next in decoding order.
        may_wrap: Whether a part that starts again may seem to begin hours later.

    Raises:
        TimelineError: A timestamp is damaged.
    """
    is_jump = steps_s > _LONGEST_FRAME_S
    firsts = (np.flatnonzero((steps_s < -_RESTART_S) | is_jump) + 1).tolist()
    restarts, offset = [(0, 0)], 0
    for first, behind in pairwise([*firsts, len(times)]):
        if (is_jump[first - 1] and not may_wrap) or (behind - first < 2 and first > 1):
            jump = f"jump by {steps_s[first - 1] / 3600:,.1f} hours" if is_jump[first - 1] else "go back"
            where = f"at packet {first} ({float((int(times[first - 1]) - int(times[0])) * unit):.2f} s)"
            raise TimelineError("bad_timestamps", f"the timestamps {jump} {where}")
        begin = restarts[-1][0]
        last = begin + int(np.argmax(times[begin:first]))
        offset += int(times[last] + lengths[last]) - int(times[first:behind].min())
        restarts.append((first, offset))
    return tuple(restarts)


def _gap_notes(times: NDArray[np.int64], *, unit: Fraction, start: Fraction) -> list[str]:
    """Return a note if there are pauses that are much longer than a frame."""
    shown = np.sort(times)
    steps = np.diff(shown)
    if not len(steps):
        return []
    gaps = np.flatnonzero(steps > max(_GAP_S / float(unit), _GAP_FRAMES * float(np.median(steps))))
    if not len(gaps):
        return []
    begin_s, length_s = float(int(shown[gaps[0]]) * unit - start), float(int(steps[gaps[0]]) * unit)
    more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    return [f"no frames for {length_s:.1f} s from {begin_s:.2f} s{more}: the last one stays on show"]


def _sequence_header(packet: "Packet[Stream]", *, codec: str) -> bytes:
    """Return the bytes at the beginning of a key packet that fix the size of its pictures; empty if unknown."""
    if codec not in ("h264", "hevc", "mpeg1video", "mpeg2video", "vp8"):
        return b""
    head = bytes(memoryview(packet)[:2048])
    if codec == "vp8":
        return head[6:10]
    units = head.split(b"\0\0\1")[1:]
    if codec == "h264":
        return next((unit for unit in units if unit and unit[0] & 31 == 7), b"")
    if codec == "hevc":
        return next((unit for unit in units if unit and unit[0] >> 1 & 63 == 33), b"")
    return next((unit[1:5] for unit in units if unit[:1] == b"\xb3"), b"")


def _decoded_shape(stream: "VideoStream", content: bytes) -> tuple[int, int, Fraction] | None:
    """Return width, height and pixel aspect of a key packet; None if it cannot be decoded on its own."""
    import av

    decoder = av.CodecContext.create(stream.codec_context.codec.name, "r")
    decoder.thread_count = 1
    try:
        frames = [*decoder.decode(av.Packet(content)), *decoder.decode(None)]
    except av.FFmpegError:
        return None
    if not frames:
        return None
    aspect = decoder.sample_aspect_ratio or _ONE
    return frames[0].width, frames[0].height, aspect if aspect > 0 else _ONE


def _decoded_order(container: "InputContainer", stream: "VideoStream", *, num_packets: int) -> NDArray[np.int64] | None:
    """Return the rank of each packet in presentation order, by decoding; None if packets are shown as they come.

    The container has decoding times only, and the decoder alone knows the order.
    """
    import av

    context = stream.codec_context
    if context is None or not context.has_b_frames:
        return None
    context.thread_count = 1
    container.seek(0, stream=stream)
    shown, number = [], 0
    for packet in container.demux(stream):
        if packet.size:
            packet.pts = packet.dts = number
            number += 1
        try:
            shown += [frame.pts for frame in packet.decode()]
        except av.error.InvalidDataError:
            continue
    if sorted(shown) != list(range(num_packets)):
        return None  # a packet holds two frames or none: libav's times are as good
    order = np.empty(num_packets, np.int64)
    order[shown] = np.arange(num_packets)
    return order


def _num_avi_frames(file: "IO[bytes]", track: int) -> int:
    """Return the number of frames that the index of an AVI lists, frames without bytes included; 0 if it has none."""
    position, size_bytes = 12, file.seek(0, io.SEEK_END)
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] == b"idx1":
            entries = np.frombuffer(file.read(length // 16 * 16), "S4, V12")["f0"]
            return int(np.isin(entries, [f"{track:02d}{kind}".encode() for kind in ("dc", "db")]).sum())
        position += 8 + length + length % 2
    return 0


def _missing_end(
    container: "InputContainer",
    track: _PacketList,
    timeline: Timeline,
    *,
    any_end: Fraction,
    file: "IO[bytes] | None",
) -> tuple[Fraction, str]:
    """Return how many seconds the header promises beyond the last packet, and what is missing, in words."""
    header = Fraction(container.duration or 0, _US_PER_S)
    if not any(name in container.format.name for name in _DURATION_IS_END):
        header += timeline.start
    has_header = any(name in container.format.name for name in _WITH_HEADER_DURATION)
    if container.format.name == "avi" and timeline.rate and file is not None and _is_cut_avi(file):
        # Without the index at its end, libav estimates the duration of an AVI from its size.
        header, has_header = timeline.start + track.stream.frames / timeline.rate, True
    if "mp4" in container.format.name and 0 < track.stream.frames == len(track.times):
        has_header = False  # every packet of its index was read
    if has_header and any_end < header - _HEADER_SLACK_S:
        cut = f"truncated: {float(header):.2f} s in the header, but the packets end at {float(any_end):.2f} s"
        return header - any_end, cut
    return Fraction(0), f"the last of {len(track.times)} frames is truncated" if track.is_cut else ""


def _is_cut_avi(file: "IO[bytes]") -> bool:
    """Whether the outermost lists of an AVI extend beyond its end; above 1 GB there are several, one after another."""
    position, size_bytes = 0, file.seek(0, io.SEEK_END)
    while position < size_bytes:
        file.seek(position)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] != b"RIFF" or length in (0, 2**32 - 1):  # lists that were never finished
            return False
        position += 8 + length
    return position > size_bytes


def _checked(timeline: Timeline, *, num_packets: int) -> Timeline:
    if timeline.end <= 0:
        raise TimelineError("zero_duration", "the video stream has zero duration")
    if timeline.end > max(_LONGEST_S, _LONGEST_MEAN_FRAME_S * num_packets):
        frames = "1 frame" if num_packets == 1 else f"{num_packets:,} frames"
        message = f"implausible duration of {float(timeline.end / 3600):,.0f} hours for {frames}"
        raise TimelineError("bad_timestamps", message)
    return timeline


@dataclass(frozen=True)
class Picture:
    """The first picture of a source, as it is shown: upright, cropped, with square pixels."""

    width: int
    height: int
    shape: Shape
    transfer: int
    primaries: int
    notes: tuple[str, ...]


def first_picture(container: "InputContainer", stream: "VideoStream") -> Picture:
    """Decode the first frame of a container just opened.

    Raises:
        TimelineError: There is no decoder, no frame, or its shape is implausible.
        av.FFmpegError: It cannot be decoded.
    """
    if stream.codec_context is None:
        raise TimelineError("decode_errors", "no decoder for the video stream")
    stream.codec_context.thread_count = 1  # only one frame is decoded; more threads would use more memory
    frame = next(container.decode(stream), None)
    if frame is None:
        raise TimelineError("zero_duration", "the video stream has no frames")
    aspect = stream.sample_aspect_ratio or _ONE
    if aspect > _MAX_ASPECT or 0 < aspect * _MAX_ASPECT < 1:
        raise TimelineError("decode_errors", f"implausible pixel aspect ratio in the header: {aspect}")
    shape = Shape(_container_crop(container, stream), _display_matrix(frame))
    if sum(shape.crop[::2]) >= frame.width or sum(shape.crop[1::2]) >= frame.height:
        raise TimelineError("decode_errors", f"the crop in the header leaves nothing of {frame.width}x{frame.height}")
    width, height = shape.cropped(frame.width, frame.height)
    notes = []
    if (num_tracks := len(video_tracks(container))) > 1:
        notes.append(f"{num_tracks} video tracks: stream {stream.index} is taken, the others are left out")
    if frame.color_trc in _TRANSFERS:
        notes.append(f"HDR ({_TRANSFERS[frame.color_trc]}): colours are kept as they are, without tone mapping")
    if any(shape.crop):
        notes.append(f"the container crops {frame.width}x{frame.height} to {width}x{height}")
    if shape.is_turned:
        notes.append(f"rotated by {shape.degrees:.0f} degrees inside its frame, with black corners")
    if frame.interlaced_frame:
        notes.append("interlaced, and not deinterlaced")
    if aspect > 0:
        width = max(1, round(width * aspect))
    if shape.is_transposed:
        width, height = height, width
    return Picture(width, height, shape, frame.color_trc, frame.color_primaries, tuple(notes))


def _display_matrix(frame: "av.VideoFrame") -> tuple[float, float, float, float]:
    from av.sidedata.sidedata import Type

    data = frame.side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return Shape().matrix
    a, b, _, c, d, *_ = (value / 65536 for value in np.frombuffer(bytes(data), "<i4").tolist())
    return (a, b, c, d) if a * d - b * c else Shape().matrix


def _container_crop(container: "InputContainer", stream: "VideoStream") -> tuple[int, int, int, int]:
    """Return the crop in the header of a container: left, top, right, bottom, in pixels.

    PyAV does not show it. libav writes it into the header of a Matroska file, where its four elements have fixed names.
    """
    import av

    if not any(name in container.format.name for name in ("matroska", "mp4")):
        return (0, 0, 0, 0)
    header = io.BytesIO()
    try:
        with av.open(header, "w", format="matroska") as target:
            target.add_stream_from_template(stream)
            target.start_encoding()
    except (av.FFmpegError, ValueError):
        return (0, 0, 0, 0)  # a codec that Matroska does not hold
    crop = dict.fromkeys(_CROP_ELEMENTS, 0)
    path, content, position = list(_PATH_TO_CROP), header.getvalue(), 0
    while position < len(content):
        element, header_bytes, length = _ebml_element(content[position : position + 12])
        if path and element == path[0]:
            path.pop(0)
            position += header_bytes  # descend
            continue
        if not path and element in crop:
            begin = position + header_bytes
            crop[element] = int.from_bytes(content[begin : begin + length], "big")
        position += header_bytes + length
    left, top, right, bottom = crop.values()
    return left, top, right, bottom


_PATH_TO_CROP = (0x18538067, 0x1654AE6B, 0xAE, 0xE0)  # Segment, Tracks, TrackEntry, Video
_CROP_ELEMENTS = (0x54CC, 0x54BB, 0x54DD, 0x54AA)  # PixelCropLeft, Top, Right, Bottom


def _ebml_element(head: bytes) -> tuple[int, int, int]:
    """Return (id, header size, content size) in bytes of the EBML element at the start of `head`."""
    id_bytes, length_bytes = 9 - head[0].bit_length(), 9 - head[9 - head[0].bit_length()].bit_length()
    length = int.from_bytes(head[id_bytes : id_bytes + length_bytes], "big") & (1 << 7 * length_bytes) - 1
    return int.from_bytes(head[:id_bytes], "big"), id_bytes + length_bytes, length


def shown_frames(
    container: "InputContainer", timeline: Timeline, packets: TrackPackets | None, *, skips_damage: bool = False
) -> "Iterator[tuple[Fraction, av.VideoFrame]]":
    """Yield the frames of a source, upright and cropped, with their times in seconds from time 0, as they are decoded.

    Args:
        container: A container just opened.
        packets: Packets of the track, from `read_timeline`; needed if the timeline is not continuous.
        skips_damage: Whether packets that cannot be decoded are left out.

    Raises:
        av.FFmpegError: A packet cannot be read or decoded.
    """
    import av

    stream = container.streams[timeline.track]
    unit, upright = stream.time_base or _ONE, _Upright(timeline.shape)
    number = 0
    for packet in container.demux(stream):
        if packet.size and not timeline.is_continuous:
            assert packets is not None, "its packets are needed"
            packet.pts = packet.dts = int(packets.times[number])
            number += 1
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            if not skips_damage:
                raise
            continue
        for frame in frames:
            time = frame.dts if frame.pts is None else frame.pts
            if time is not None:
                yield time * unit - timeline.start, upright.frame(frame)


class _Upright:
    """Crops frames and turns them upright; the graph of filters is built again if their size or format changes."""

    def __init__(self, shape: Shape) -> None:
        filters = [*shape.crop_filters(), *shape.orientation_filters()]
        self._filters = [*filters, ("copy", {})] if filters else []  # flipped frames have lines in descending order
        self._graph: Any = None
        self._made_for: tuple[int, int, str] | None = None

    def frame(self, frame: "av.VideoFrame") -> "av.VideoFrame":
        """Return a frame as it is shown, with its time."""
        if not self._filters:
            return frame
        from av.filter import Graph

        key = (frame.width, frame.height, frame.format.name)
        if self._made_for != key:
            self._graph, self._made_for = Graph(), key
            buffer = self._graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base
            )
            steps = [buffer, *(self._graph.add(name, None, **options) for name, options in self._filters)]
            self._graph.link_nodes(*steps, self._graph.add("buffersink")).configure()
        self._graph.vpush(frame)
        shown: av.VideoFrame = self._graph.vpull()
        return shown


def write_continuous(
    place: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    with_sound: bool,
    on_packet: Callable[[], None] = lambda: None,
) -> Timeline:
    """Copy the packets of a source into a file whose timestamps are its timeline; return the timeline of that file.

    Nothing is encoded again. The first audio stream keeps its distance to the pictures of its part.

    Args:
        on_packet: Called for every packet that is read.

    Raises:
        TimelineError: see `read_timeline`.
        av.FFmpegError: A packet cannot be read or written.
    """
    import av

    with open_container(f"file:{os.fspath(place)}") as container, open(place, "rb") as file:  # noqa: PTH123
        timeline, packets = read_timeline(container, file=file, on_read=on_packet)
    with (
        open_container(f"file:{os.fspath(place)}") as container,
        av.open(os.fspath(target), "w", format=CONTINUOUS_FORMAT) as output,
    ):
        track = container.streams[timeline.track]
        sounds = list(container.streams.audio)[:1] if with_sound else []
        pictures = _VideoWriter(output, track, packets, start=timeline.start)
        writers: dict[int, Any] = {track.index: pictures}
        writers |= {sound.index: _SoundWriter(output, sound, pictures) for sound in sounds}
        for packet in container.demux([track, *sounds]):
            on_packet()
            if packet.size:
                writers[packet.stream_index].write(packet)
    with open_container(f"file:{os.fspath(target)}", formats=CONTINUOUS_FORMAT) as container:
        seek_start = Fraction(container.start_time or 0, _US_PER_S)
    return replace(timeline, track=0, start=pictures.start, seek_start=seek_start, is_continuous=True, is_blind=False)


class _VideoWriter:
    """Writes the packets of the video track with the times of the timeline.

    Attributes:
        start: Timestamp of time 0 in the file that is written, in seconds.
        offsets: Time in seconds that is added to the timestamps of each part.
    """

    def __init__(
        self, output: "OutputContainer", track: "VideoStream", packets: TrackPackets, *, start: Fraction
    ) -> None:
        self._output, self._unit = output, track.time_base or _ONE
        self._stream, self._filter = _add_stream(output, track)
        ordered = np.sort(packets.times)
        # Decoding times ascend, and are never behind the presentation time.
        ordered = np.maximum.accumulate(ordered - np.arange(len(ordered))) + np.arange(len(ordered))
        delay = int((ordered - packets.times).max(initial=0))
        shift = delay + round((1 - start) / self._unit)  # sound may begin a little earlier
        self.start = start + shift * self._unit
        self._times, self._decoding_times = packets.times + shift, ordered + shift - delay
        self._firsts = [first for first, _ in packets.restarts]
        self.offsets = [(shift + offset) * self._unit for _, offset in packets.restarts]
        self._number = 0

    def place(self) -> tuple[int, Fraction]:
        """Return the number of the part that is being written, and the seconds of it that are written."""
        row = max(0, self._number - 1)
        part = bisect_right(self._firsts, row) - 1
        return part, int(self._times[row] - self._times[self._firsts[part]]) * self._unit

    def write(self, packet: "Packet[Any]") -> None:
        """Write the next packet."""
        packet.pts, packet.dts = int(self._times[self._number]), int(self._decoding_times[self._number])
        self._number += 1
        for copy in self._filter(packet):
            copy.stream = self._stream
            self._output.mux(copy)


class _SoundWriter:
    """Writes the packets of a sound track beside those of the video.

    The packets of two tracks are not in step where timestamps start again: a part of the sound begins where its own
    timestamps do, or at the latest a second after the pictures. Sound that overlaps the part before is left out.
    """

    def __init__(self, output: "OutputContainer", sound: "Stream", pictures: _VideoWriter) -> None:
        self._output, self._pictures, self._unit = output, pictures, sound.time_base or _ONE
        self._stream, self._filter = _add_stream(output, sound)
        self._part, self._last, self._end = 0, _NO_TIME, _NO_TIME

    def write(self, packet: "Packet[Any]") -> None:
        """Write the next packet."""
        time = packet.dts if packet.pts is None else packet.pts
        if time is None:
            return
        part, seconds = self._pictures.place()
        step = (time - self._last) * self._unit if self._last != _NO_TIME else 0
        if step < -_RESTART_S or step > _LONGEST_FRAME_S:
            self._part = min(self._part + 1, part + 1, len(self._pictures.offsets) - 1)
        if self._part < part and (seconds > 1 or self._part < part - 1):
            self._part = part
        self._last = time
        shown = time + round(self._pictures.offsets[self._part] / self._unit)
        if shown < max(0, self._end):
            return
        packet.pts = packet.dts = shown
        self._end = shown + max(1, packet.duration or 0)
        for copy in self._filter(packet):
            copy.stream = self._stream
            self._output.mux(copy)


def _add_stream(output: "OutputContainer", stream: Any) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Add a stream like another one to a file; return it and the conversion of its packets.

    Parameter sets travel within the packets: those in a header could not change.
    """
    from av.bitstream import BitStreamFilterContext

    copy = output.add_stream_from_template(stream)
    copy.time_base = stream.time_base
    codec, extradata = stream.codec_context.name, stream.codec_context.extradata or b""
    if codec in ("h264", "hevc") and extradata[:1] == b"\1":
        return copy, BitStreamFilterContext(f"{codec}_mp4toannexb", stream, copy).filter
    return copy, lambda packet: [packet]


def frame_times(
    place: "str | os.PathLike[str]", timeline: Timeline, *, begin: Fraction, end: Fraction
) -> NDArray[np.float64]:
    """Return the times in seconds of the frames of a continuous source that begin from about `begin` to `end`.

    They are the times of its packets, ascending: nothing is decoded. Very small packets are left out: in some codecs
    they say that a frame is skipped, and the decoder shows none.

    Raises:
        av.FFmpegError: A packet cannot be read.
    """
    with open_container(f"file:{os.fspath(place)}", formats=f"{DEMUXERS},{CONTINUOUS_FORMAT}") as container:
        stream = container.streams[timeline.track]
        unit = stream.time_base or _ONE
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
        return np.unique(np.array(times, np.int64)) * float(unit) - float(timeline.start)
