"""Read the timeline of a source from its packets, or from the index of an MP4.

Some containers omit times, or contain wrong times. This module repairs them. It decodes only a few keyframes, except in
an AVI with B frames, because only the decoder knows the order of these frames.
"""

import io
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.timeline.model import (
    NO_TIME,
    ONE,
    US_PER_S,
    Timeline,
    TimelineError,
    TrackPackets,
    average_rate,
    container_start,
    pixel_aspect,
    video_tracks,
)

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.stream import VideoStream


# Minimum decrease of decoding times at a restart. Muxers round times, which can cause smaller decreases.
RESTART_S = Fraction(1, 5)
_GAP_S, _GAP_FRAMES = 5.0, 50  # minimum length of a pause that is worth a note, in seconds and in frames
MPEG_VIDEO = frozenset({"mpeg1video", "mpeg2video"})
_MAX_GUESS_FRAMES = 4  # maximum error when libav guesses a missing timestamp, in frames or fields
_ROUNDING = 0.25  # tolerance for rounded times, in frames

LONGEST_FRAME_S = 3600  # maximum step between timestamps; a larger step means damage, or the start of a new part


def times_in_display_order(
    times: NDArray[np.int64], durations: NDArray[np.int64], is_b: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Repair the presentation times of MPEG-1 or MPEG-2 pictures in a program stream.

    Such a stream has timestamps only for some pictures. libav guesses the others, sometimes incorrectly. In display
    order, B pictures come before the reference picture that precedes them in the file, and each picture begins when the
    previous picture ends. A timestamp is accepted in two cases: if it is very close to the expected time, because sums
    of durations are rounded; or if it is more than a few pictures away, because there is a gap, or timestamps restart.

    Args:
        times, durations: Presentation times from libav and durations, in file order, int64 [pictures].
        is_b: True for B pictures, bool [pictures].

    Returns:
        Repaired times in file order, and in display order. At a restart, both decrease at the same index.
    """
    display_order: list[int] = []
    reference = None
    for row, is_bidirectional in enumerate(is_b.tolist()):
        if is_bidirectional:
            display_order.append(row)
        else:
            display_order += [] if reference is None else [reference]
            reference = row
    display_order += [] if reference is None else [reference]
    repaired_times, expected_time = times.copy(), int(times[display_order[0]])
    for row in display_order:
        length, error = int(durations[row]), abs(int(times[row]) - expected_time)
        if error > _MAX_GUESS_FRAMES * length or error < length * _ROUNDING:
            expected_time = int(times[row])
        repaired_times[row] = expected_time
        expected_time += length
    return repaired_times, repaired_times[display_order]


def restart_times(times: NDArray[np.int64], is_key: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return times that decrease only where timestamps restart, for containers without decoding times.

    A keyframe is displayed after all frames that precede it in the file. If one of these frames has a later time than
    the keyframe, timestamps restart.
    """
    latest_times = np.maximum.accumulate(times)
    restarts = np.flatnonzero(is_key[1:] & (times[1:] < latest_times[:-1])) + 1
    for first, end in pairwise([0, *restarts.tolist(), len(times)]):
        latest_times[first:end] = np.maximum.accumulate(times[first:end])
    return latest_times


def find_restarts(
    steps_s: NDArray[np.float64],
    times: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    unit: Fraction,
    may_wrap: bool,
) -> tuple[tuple[int, int], ...]:
    """Find the parts between restarts of the timestamps.

    Args:
        steps_s: Seconds from each packet to the next packet in decoding order.
        times, lengths: Presentation times and durations of the packets, in units of the stream.
        unit: Unit of the stream in seconds.
        may_wrap: True if a part after a restart may seem to begin hours later.

    Returns:
        Parts, as pairs (index of the first packet, offset to add to the timestamps).

    Raises:
        TimelineError: A timestamp is damaged.
    """
    is_jump = steps_s > LONGEST_FRAME_S
    first_packets = (np.flatnonzero((steps_s < -float(RESTART_S)) | is_jump) + 1).tolist()
    restarts, offset = [(0, 0)], 0
    for first, end in pairwise([*first_packets, len(times)]):
        if (is_jump[first - 1] and not may_wrap) or (end - first < 2 and first > 1):
            change = f"jump by {steps_s[first - 1] / 3600:,.1f} hours" if is_jump[first - 1] else "go back"
            location = f"at packet {first} ({float((int(times[first - 1]) - int(times[0])) * unit):.2f} s)"
            raise TimelineError("bad_timestamps", f"the timestamps {change} {location}")
        previous_first = restarts[-1][0]
        last = previous_first + int(np.argmax(times[previous_first:first]))
        offset += int(times[last] + lengths[last]) - int(times[first:end].min())
        restarts.append((first, offset))
    return tuple(restarts)


def gap_notes(times: NDArray[np.int64], *, unit: Fraction, start: Fraction) -> list[str]:
    """Return a note if some pauses between frames are much longer than a frame."""
    sorted_times = np.sort(times)
    steps = np.diff(sorted_times)
    if not len(steps):
        return []
    gaps = np.flatnonzero(steps > max(_GAP_S / float(unit), _GAP_FRAMES * float(np.median(steps))))
    if not len(gaps):
        return []
    begin_s, length_s = float(int(sorted_times[gaps[0]]) * unit - start), float(int(steps[gaps[0]]) * unit)
    more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    return [f"no frames for {length_s:.1f} s from {begin_s:.2f} s{more}: the last frame remains displayed"]


def sequence_header(packet: "Packet[Stream]", *, codec: str) -> bytes:
    """Return the bytes of a keyframe packet that define the resolution of its frames; empty if unknown."""
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


def decode_shape(stream: "VideoStream", content: bytes) -> tuple[int, int, Fraction] | None:
    """Decode a keyframe packet to find its width, height and pixel aspect ratio; None if decoding fails."""
    import av

    decoder: Any = av.VideoCodecContext.create(stream.codec_context.codec.name, "r")
    decoder.thread_count = 1
    try:
        frames = [*decoder.decode(av.Packet(content)), *decoder.decode(None)]
    except av.FFmpegError:
        return None
    if not frames:
        return None
    aspect = decoder.sample_aspect_ratio or ONE
    return frames[0].width, frames[0].height, aspect if aspect > 0 else ONE


def decode_order(container: "InputContainer", stream: "VideoStream", *, num_packets: int) -> NDArray[np.int64] | None:
    """Decode a stream to find the rank of each packet in presentation order, int64 [packets].

    The ranks are needed if a container has only decoding times. The result is None if packets are displayed in file
    order, or if the ranks cannot be determined.
    """
    import av

    context = stream.codec_context
    if context is None or not context.has_b_frames:
        return None
    context.thread_count = 1
    container.seek(0, stream=stream)
    indices, index = [], 0
    for packet in container.demux(stream):
        if packet.size:
            packet.pts = packet.dts = index
            index += 1
        try:
            indices += [frame.pts for frame in packet.decode() if frame.pts is not None]
        except av.error.InvalidDataError:
            continue
    if sorted(indices) != list(range(num_packets)):
        return None  # some packets contain two frames or none, so the times from libav are as good as the ranks
    order = np.empty(num_packets, np.int64)
    order[indices] = np.arange(num_packets)
    return order


def count_avi_frames(file: "IO[bytes]", track: int) -> int:
    """Return the number of frames in the index of an AVI, including empty frames; 0 if there is no index."""
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


def is_truncated_avi(file: "IO[bytes]") -> bool:
    """Return True if a top-level list of an AVI extends beyond the end of the file.

    An AVI of more than 1 GB has several top-level lists.
    """
    position, size_bytes = 0, file.seek(0, io.SEEK_END)
    while position < size_bytes:
        file.seek(position)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] != b"RIFF" or length in (0, 2**32 - 1):  # a list that was never finished
            return False
        position += 8 + length
    return position > size_bytes


# Formats of streams without a container. The timestamps that libav generates for these streams change after a seek.
_RAW_FORMATS = frozenset({"h264", "hevc", "mpegvideo"})
# Formats without a list of keyframes, in which a seek may land on any packet.
_IMPRECISE_SEEK_FORMATS = frozenset({"mpegts", "mpeg", "wtv", "rm"})
# Formats with 33-bit timestamps. libav unwraps them, so a part may seem to begin a day after the previous part.
_WRAPPING_FORMATS = frozenset({"mpegts", "mpeg", "wtv"})
# Formats that store decoding times. For other formats, libav derives decoding times from presentation times.
_DECODING_TIME_FORMATS = ("mpegts", "mpeg", "wtv", "mp4", "avi", "flv", "mxf")
# Formats with a duration in the header. For other formats, libav may estimate the duration from the bitrate.
_DURATION_FORMATS = ("matroska", "mp4", "flv", "asf", "mxf")
# Formats whose duration is the end of the last frame, even if the first frame begins later than 0.
_DURATION_IS_END = ("matroska", "asf")
_NO_IVF_LENGTH = (0, 0xFFFFFFFF)  # in the header of a file that was written to a pipe
_HEADER_TOLERANCE_S = Fraction(1)  # containers round and pad the durations in their headers
# Maximum plausible duration: a day, or 600 seconds per frame if that is more. Damaged timestamps may span centuries.
_LONGEST_S, _LONGEST_MEAN_FRAME_S = 24 * 3600, 600
_FLV_HEADER = b"FLV\1"
_MAX_SHAPES = 200  # maximum number of shapes to record per stream; damage may change the shape at every keyframe


def has_index(container: "InputContainer", stream: "VideoStream") -> bool:
    """Return True if the file (MP4) has an index with the time and position of each packet of a stream."""
    is_listed = "mp4" in container.format.name and bool(stream.duration) and stream.frames > 0
    return is_listed and stream.frames == len(stream.index_entries)


def indexed_timeline(container: "InputContainer", stream: "VideoStream", *, size_bytes: int) -> Timeline:
    """Return the timeline of a stream for which `has_index` is true.

    Packets are read only if the index and the duration in the header disagree, and only from the end of the file.

    Args:
        size_bytes: Size of the file.

    Raises:
        TimelineError: The file is shorter than its index states, or its times are impossible.
        av.FFmpegError: A packet cannot be read.
    """
    entries, unit = stream.index_entries, stream.time_base or ONE
    end_byte = max(entries[row].pos + entries[row].size for row in range(max(0, len(entries) - 100), len(entries)))
    if end_byte > size_bytes:
        raise TimelineError(
            "source_truncated",
            f"truncated: the index refers to bytes up to {end_byte}, but the file has {size_bytes} bytes",
        )
    last = len(entries) - 1
    while last > 0 and entries[last].is_discard:
        last -= 1
    first = next((row for row in range(last) if not entries[row].is_discard), 0)
    step = (entries[last].timestamp - entries[max(first, last - 20)].timestamp) / max(1, min(20, last - first))
    begin = stream.start_time or 0
    index_end = begin + entries[last].timestamp - entries[first].timestamp + step
    end = begin + (stream.duration or 0)
    if last != len(entries) - 1 or abs(index_end - end) > 2 * step + 1:
        # Find the start and end of the last frame among the packets after the last keyframe.
        container.seek(entries[last].timestamp, stream=stream)
        begin = end = 0
        for packet in container.demux(stream):
            if packet.size and packet.pts is not None and not packet.is_discard and packet.pts >= begin:
                begin, end = packet.pts, packet.pts + (packet.duration or 0)
        if last != len(entries) - 1:
            end = _apply_edit_list(stream, last=begin, end=end)
    start = container_start(container)
    timeline = Timeline(
        track=stream.index,
        start=start,
        end=end * unit - start,
        rate=average_rate(stream),
        aspects=((Fraction(0), pixel_aspect(stream)),),
    )
    return _check_timeline(timeline, num_packets=len(entries))


def _apply_edit_list(stream: "VideoStream", *, last: int, end: int) -> int:
    """Return the end of the last frame that an edit list displays. The edit may end within the frame.

    Args:
        last, end: Start and end of the frame without the edit list.
    """
    edit_end = (stream.start_time or 0) + (stream.duration or 0)
    return min(end, edit_end) if edit_end > last else end


def read_timeline(
    container: "InputContainer",
    *,
    file: "IO[bytes] | None" = None,
    on_packet: "Callable[[Packet[Stream]], None]" = lambda packet: None,
) -> tuple[Timeline, TrackPackets]:
    """Read all packets of a source once; return the timeline and the packets of its main video stream.

    Args:
        container: Newly opened container.
        file: File object of the source, to read facts about an AVI or FLV that libav does not report.
        on_packet: Function that is called with every non-empty packet, in file order.

    Raises:
        TimelineError: There is no video stream, or its times are impossible.
        av.FFmpegError: A packet cannot be read.
    """
    start = container_start(container)
    tracks = video_tracks(container)
    if not tracks:
        kinds = sorted({str(stream.type) for stream in container.streams})
        raise TimelineError("no_video", f"no video stream (streams: {', '.join(kinds) or 'none'})")
    lists = {stream.index: _PacketList(stream) for stream in tracks}
    end_byte = 0
    ends: dict[int, int] = {}  # end of each stream in its unit; computing a Fraction per packet would double the time
    units: dict[int, Fraction] = {}
    for packet in container.demux():
        if not packet.size:
            continue
        on_packet(packet)
        end_byte = max(end_byte, (packet.pos or 0) + packet.size)
        if packet.stream_index in lists:
            lists[packet.stream_index].add(packet)
        time, index = packet.dts if packet.pts is None else packet.pts, packet.stream_index
        if time is not None:
            if index not in units:
                ends[index], units[index] = time, packet.time_base or Fraction(0)
            ends[index] = max(ends[index], time + (packet.duration or 0))
    last_end = max([start, *(ends[index] * unit for index, unit in units.items() if unit)])
    nonempty_tracks = [stream for stream in tracks if len(lists[stream.index].times) > 1]
    track = lists[(nonempty_tracks or tracks)[0].index]
    timeline, packets = track.build_timeline(container, file=file, start=start)
    if container.format.name == "flv" and file is not None:
        file.seek(end_byte)
        if _FLV_HEADER in file.read(1024):
            raise TimelineError(
                "bad_timestamps",
                f"a second FLV file begins after byte {end_byte}, at {float(timeline.end):.2f} s, but libav does not"
                " read it: split the file at that byte",
            )
    missing, truncation = _find_missing_end(container, track, timeline, last_end=last_end, file=file)
    return _check_timeline(
        replace(timeline, missing=missing, truncation=truncation), num_packets=len(track.times)
    ), packets


class _PacketList:
    """The packets of a video stream that have been read so far, in file order."""

    def __init__(self, stream: "VideoStream") -> None:
        self.stream = stream
        self.num_indexed = len(stream.index_entries)  # number of index entries when the file was opened
        self.times: list[int] = []  # presentation times; decoding times where presentation times are missing
        self.decoding_times: list[int] = []
        self.durations: list[int] = []
        self.flags: list[int] = []  # 1: keyframe, 2: hidden by an edit list
        self.num_untimed = 0  # number of packets before the first packet with a timestamp
        self.is_truncated = False  # True if the last packet is truncated
        self.is_bidirectional: list[bool] = []  # True for B pictures; only for MPEG-1 and MPEG-2
        self.key_packets: list[tuple[int, bytes]] = []  # index and bytes of keyframe packets with a new sequence header
        self._header = b""

    def add(self, packet: "Packet[Stream]") -> None:
        """Append a packet."""
        pts, dts = packet.pts, packet.dts
        self.is_truncated = packet.is_corrupt
        time = dts if pts is None else pts
        if time is None:
            self.num_untimed += self.times[-1:] in ([], [NO_TIME])
            time = NO_TIME
        self.times.append(time)
        self.decoding_times.append(time if dts is None else dts)
        self.durations.append(packet.duration or 0)
        self.flags.append(packet.is_keyframe + 2 * packet.is_discard)
        codec = self.stream.codec_context.name if self.stream.codec_context else ""
        if codec in MPEG_VIDEO:  # read the type of the picture (ISO/IEC 13818-2, 6.2.3)
            head = bytes(memoryview(packet)[:2048])
            begin = head.find(b"\0\0\1\0")
            self.is_bidirectional.append(0 <= begin < len(head) - 5 and head[begin + 5] >> 3 & 7 == 3)
        if packet.is_keyframe and len(self.key_packets) < _MAX_SHAPES:
            header = sequence_header(packet, codec=codec)
            if header and header != self._header:
                self._header = header
                self.key_packets.append((len(self.times) - 1, bytes(packet)))

    def build_timeline(
        self, container: "InputContainer", *, file: "IO[bytes] | None", start: Fraction
    ) -> "tuple[Timeline, TrackPackets]":
        """Return the timeline of the stream, and its packets with corrected times.

        Raises:
            TimelineError: The first frames have no timestamps, or a timestamp is damaged.
        """
        stream, name, num_packets = self.stream, container.format.name, len(self.times)
        if name in _RAW_FORMATS or self.num_untimed == num_packets > 0:
            codec = stream.codec_context.name if stream.codec_context else "unknown"
            raise TimelineError(
                "bad_timestamps",
                f"the frames have no timestamps, as in a raw {codec} stream; convert it to a container with timestamps:"
                " ffmpeg -r RATE -i IN OUT.mkv",
            )
        if self.num_untimed:
            message = f"the first {self.num_untimed} of {num_packets} frames have no timestamps"
            raise TimelineError("bad_timestamps", message)
        unit = stream.time_base or ONE
        times, dts = np.array(self.times, np.int64), np.array(self.decoding_times, np.int64)
        durations, flags = np.array(self.durations, np.int64), np.array(self.flags, np.int64)
        if (is_missing := times == NO_TIME).any():  # replace missing times with the latest time before them
            times[is_missing] = np.maximum.accumulate(times)[is_missing]
            dts[is_missing] = times[is_missing]
        is_shown, is_key = flags & 2 == 0, flags & 1 == 1
        order = decode_order(container, stream, num_packets=num_packets) if name == "avi" else None
        is_retimed = order is not None
        if order is not None:
            times = np.sort(dts)[order]
        elif name == "mpeg" and self.is_bidirectional:
            # libav also guesses the decoding times. The guessed times restart one picture too late.
            file_times = times
            times, dts = times_in_display_order(times, durations, np.array(self.is_bidirectional))
            is_retimed = bool((times != file_times).any())
        elif name in _WRAPPING_FORMATS:
            # If decoding times are missing, libav guesses them from the previous frame, which may be in another part.
            is_guess = (dts > times) | (times - dts > LONGEST_FRAME_S / float(unit))
            dts = np.where(is_guess, times, dts)
        steps = np.diff(np.unique(times))  # a frame without a duration lasts as long as the last step
        default_length = (
            int(steps[-1]) if len(steps) else max(1, round(1 / (average_rate(stream) or Fraction(30)) / unit))
        )
        lengths = np.where(durations > 0, durations, default_length)
        has_dts = any(format_name in name for format_name in _DECODING_TIME_FORMATS)
        steps_s = np.diff(dts if has_dts else restart_times(times, is_key)) * float(unit)
        restarts = find_restarts(steps_s, times, lengths, unit=unit, may_wrap=name in _WRAPPING_FORMATS)
        notes = []
        if order is not None:
            notes.append("the container has no presentation times: frames are displayed in the order of the decoder")
        for (first, offset), (next_first, _) in zip(restarts, [*restarts[1:], (num_packets, 0)], strict=True):
            times[first:next_first] += offset
        if len(restarts) > 1:
            first, times_text = restarts[1][0], "" if len(restarts) == 2 else f" {len(restarts) - 1} times, first"
            location = f"at packet {first} ({float(int(times[first:].min()) * unit - start):.2f} s)"
            notes.append(f"timestamps restart{times_text} {location}: the parts follow one another")
        last = int(np.argmax(np.where(is_shown, times, NO_TIME))) if num_packets else 0
        end = int(times[last] + lengths[last]) if num_packets else 0
        # Of the packets that an edit list hides, libav returns only those needed to decode other packets.
        has_hidden = bool(num_packets) and (num_packets < stream.frames or not is_shown[int(np.argmax(times))])
        if "mp4" in name and has_hidden:
            end = _apply_edit_list(stream, last=int(times[last]), end=end)
        if name == "avi" and file is not None and stream.average_rate == 1 / unit:
            end = max(end, count_avi_frames(file, stream.index))  # empty frames at the end repeat the last frame
        aspects, shape_notes = self._find_shapes(times, unit=unit, start=start)
        is_blind = name in _IMPRECISE_SEEK_FORMATS
        keys = np.concatenate([np.sort(times[is_key & is_shown]), [end]])
        timeline = Timeline(
            track=stream.index,
            start=start,
            end=end * unit - start,
            last=int(times[last]) * unit - start if num_packets else Fraction(0),
            rate=average_rate(stream),
            is_continuous=len(restarts) == 1 and not is_retimed,
            is_blind=is_blind,
            key_gap=int(np.diff(keys).max(initial=0)) * unit if is_blind else Fraction(0),
            aspects=aspects,
            notes=(*notes, *gap_notes(times[is_shown], unit=unit, start=start), *shape_notes),
        )
        return timeline, TrackPackets(times, durations, is_shown, restarts)

    def _find_shapes(
        self, times: NDArray[np.int64], *, unit: Fraction, start: Fraction
    ) -> tuple[tuple[tuple[Fraction, Fraction], ...], list[str]]:
        """Return the pixel aspect ratios (`Timeline.aspects`), and a note if the resolution or aspect ratio changes."""
        stream = self.stream
        aspects = [(Fraction(0), pixel_aspect(stream))]
        sizes: list[tuple[Fraction, str]] = []
        for row, packet in self.key_packets if len(self.key_packets) > 1 else []:
            if (shape := decode_shape(stream, packet)) is None:
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


def _find_missing_end(
    container: "InputContainer",
    track: _PacketList,
    timeline: Timeline,
    *,
    last_end: Fraction,
    file: "IO[bytes] | None",
) -> tuple[Fraction, str]:
    """Return the seconds of video that a truncated file lacks at its end (0 if unknown), and a description.

    Args:
        last_end: End of the last packet of any stream in seconds.
    """
    header = Fraction(container.duration or 0, US_PER_S)
    if not any(name in container.format.name for name in _DURATION_IS_END):
        header += timeline.start
    has_header = any(name in container.format.name for name in _DURATION_FORMATS)
    if container.format.name == "avi" and timeline.rate and file is not None and is_truncated_avi(file):
        # A truncated AVI has lost the index at its end, so libav estimates the duration from the size of the file.
        header, has_header = timeline.start + track.stream.frames / timeline.rate, True
    if "mp4" in container.format.name and 0 < len(track.times) == track.num_indexed <= track.stream.frames:
        has_header = False  # all packets in the index were read; libav may omit packets that an edit list hides
    if container.format.name == "ivf" and (length := track.stream.duration or 0) not in _NO_IVF_LENGTH:
        # The header contains the number of frames. Old versions of ffmpeg write their total duration instead.
        num_frames = len(track.times)
        duration = num_frames * (max(track.times) - min(track.times)) // max(1, num_frames - 1)
        if max(num_frames, duration) < length:
            missing = (length - max(num_frames, duration)) * Fraction(track.stream.time_base or 0)
            return missing, f"truncated: {length:,} frames in the header, but the file contains {num_frames:,}"
    if has_header and last_end < header - _HEADER_TOLERANCE_S:
        truncation = f"truncated: {float(header):.2f} s in the header, but the packets end at {float(last_end):.2f} s"
        return header - last_end, truncation
    return Fraction(0), f"the last of {len(track.times)} frames is truncated" if track.is_truncated else ""


def _check_timeline(timeline: Timeline, *, num_packets: int) -> Timeline:
    if timeline.end <= 0:
        raise TimelineError("zero_duration", "the video stream has zero duration")
    if timeline.end > max(_LONGEST_S, _LONGEST_MEAN_FRAME_S * num_packets):
        frames = "1 frame" if num_packets == 1 else f"{num_packets:,} frames"
        message = f"implausible duration of {float(timeline.end / 3600):,.0f} hours for {frames}"
        raise TimelineError("bad_timestamps", message)
    return timeline
