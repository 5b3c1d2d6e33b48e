"""When a video begins and ends, and whether it is complete: from the index of an MP4, or by demuxing the whole file."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from clipmill.manifests.quoting import counted
from clipmill.prep.core.failures import FailureCode, SourceFailure

# Containers round and pad the durations in their headers; truncation that loses less than this cannot be detected.
_HEADER_SLACK_S = Fraction(1)
# In other containers, the duration was not read from the header: libav estimates it from the bitrate.
_WITH_HEADER_DURATION = ("matroska", "avi", "mp4", "flv", "asf", "mxf", "ivf")
# In these, the duration is the end time of the last frame, whenever the first frame starts; in all others, it is
# counted from the start time.
_DURATION_IS_END = ("matroska", "asf")
# Packets without a container. The timestamps that libav generates for them change after a seek.
_RAW = frozenset({"h264", "hevc", "mpegvideo"})
# Limits that reject damaged timestamps, which can span centuries. In total: a day, or 600 seconds per frame if that is
# more; for a single frame: an hour.
_LONGEST_S, _LONGEST_MEAN_FRAME_S, _LONGEST_FRAME_S = 24 * 3600, 600, 3600


@dataclass(frozen=True)
class VideoTimes:
    """Times of a video stream in seconds.

    Attributes:
        end_s: end of the last frame, relative to the container's start.
        key_gap_s: longest time between two key frames; 0 if the file has an index of them.
    """

    end_s: Fraction
    key_gap_s: Fraction


def is_indexed(container: InputContainer, stream: VideoStream) -> bool:
    """Return True if the file has an index with the position of each packet.

    The index gives the end time without reading the whole file.
    """
    is_listed = "mp4" in container.format.name and bool(stream.duration) and stream.frames > 0
    return is_listed and stream.frames == len(stream.index_entries)


def indexed_times(container: InputContainer, stream: VideoStream, *, size_bytes: int) -> VideoTimes:
    """Return the times of a stream for which `is_indexed` is True.

    Raises:
        SourceFailure: source_truncated, zero_duration or bad_timestamps.
    """
    entries = stream.index_entries
    held_bytes = max(entries[row].pos + entries[row].size for row in range(max(0, len(entries) - 100), len(entries)))
    if held_bytes > size_bytes:
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"truncated: the index refers to bytes up to {held_bytes}, but the file has {size_bytes} bytes",
        )
    end_s = ((stream.start_time or 0) + (stream.duration or 0)) * (stream.time_base or Fraction(1))
    return _checked(VideoTimes(end_s - _start_s(container), Fraction(0)), num_packets=len(entries))


def demuxed_times(container: InputContainer, *, video_index: int, on_read: Callable[[], None]) -> VideoTimes:
    """Return the times of a video stream by reading the packets of all streams once.

    Args:
        container: a container just opened, from which nothing has been read.
        video_index: index of the stream in the container.
        on_read: called for every packet.

    Raises:
        SourceFailure: source_truncated, zero_duration or bad_timestamps.
        av.error.FFmpegError: a packet cannot be read.
    """
    start_s = _start_s(container)
    video = next(stream for stream in container.streams.video if stream.index == video_index)
    seen = _read_all(container, video, start_s=start_s, on_read=on_read)
    if container.format.name in _RAW or seen.num_untimed == seen.num_packets > 0:
        raise SourceFailure(
            FailureCode.BAD_TIMESTAMPS,
            f"the frames have no timestamps, as in a raw {video.codec_context.name} stream; convert it to a container"
            " with timestamps: ffmpeg -r RATE -i IN OUT.mkv",
        )
    if seen.num_untimed:
        raise SourceFailure(
            FailureCode.BAD_TIMESTAMPS,
            f"the first {seen.num_untimed} of {seen.num_packets} frames have no timestamps",
        )
    if seen.longest_step_s > _LONGEST_FRAME_S:
        message = f"the timestamps jump by {float(seen.longest_step_s / 3600):,.1f} hours"
        raise SourceFailure(FailureCode.BAD_TIMESTAMPS, message)
    header_s = Fraction(container.duration or 0, av.time_base)
    if not any(name in container.format.name for name in _DURATION_IS_END):
        header_s += start_s
    if container.format.name == "avi" and video.average_rate:
        # libav reduces the duration of an AVI to what the file holds, but keeps the frame count of the header.
        header_s = max(header_s, video.frames / video.average_rate)
    has_header_duration = any(name in container.format.name for name in _WITH_HEADER_DURATION)
    if has_header_duration and seen.any_end_s < header_s - _HEADER_SLACK_S:
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"truncated: {float(header_s):.2f} s in the header, but the packets end at {float(seen.any_end_s):.2f} s",
        )
    if seen.is_cut:
        raise SourceFailure(FailureCode.SOURCE_TRUNCATED, f"the last of {seen.num_packets} frames is truncated")
    return _checked(VideoTimes(seen.video_end_s - start_s, seen.key_gap_s), num_packets=seen.num_packets)


@dataclass
class _Seen:
    """Statistics of the video packets; `num_untimed` counts those before the first packet with a timestamp."""

    video_end_s: Fraction
    any_end_s: Fraction
    key_gap_s: Fraction = Fraction(0)
    longest_step_s: Fraction = Fraction(0)
    num_packets: int = 0
    num_untimed: int = 0
    is_cut: bool = False


def _read_all(
    container: InputContainer, video: VideoStream, *, start_s: Fraction, on_read: Callable[[], None]
) -> _Seen:
    frame_s = 1 / (video.average_rate or video.guessed_rate or Fraction(30))
    seen, last_s, last_key_s, last_shown_s = _Seen(start_s, start_s), None, None, start_s
    for packet in container.demux():
        on_read()
        if not packet.size:
            continue
        is_video = packet.stream_index == video.index
        if is_video:
            seen.num_packets, seen.is_cut = seen.num_packets + 1, packet.is_corrupt
        time = packet.pts if packet.pts is not None else packet.dts
        if time is None or not packet.time_base:
            if is_video and seen.num_untimed == seen.num_packets - 1:
                seen.num_untimed += 1
            continue
        begin_s = time * packet.time_base
        length_s = packet.duration * packet.time_base if packet.duration else Fraction(0)
        if is_video:
            length_s = length_s or frame_s
            if last_s is not None:
                seen.longest_step_s = max(seen.longest_step_s, abs(begin_s - last_s))
            last_s = begin_s
            if begin_s >= last_shown_s:
                # Of earlier frames the duration is not used: MP4 measures it in decoding order, and a copy keeps it.
                last_shown_s, seen.video_end_s = begin_s, begin_s + length_s
            if packet.is_keyframe:
                if last_key_s is not None:
                    seen.key_gap_s = max(seen.key_gap_s, begin_s - last_key_s)
                last_key_s = begin_s
        seen.any_end_s = max(seen.any_end_s, begin_s + length_s)
    if last_key_s is not None:
        seen.key_gap_s = max(seen.key_gap_s, seen.video_end_s - last_key_s)
    return seen


def _start_s(container: InputContainer) -> Fraction:
    return Fraction(container.start_time or 0, av.time_base)


def _checked(times: VideoTimes, *, num_packets: int) -> VideoTimes:
    if times.end_s <= 0:
        raise SourceFailure(FailureCode.ZERO_DURATION, "the video stream has zero duration")
    if times.end_s > max(_LONGEST_S, _LONGEST_MEAN_FRAME_S * num_packets):
        raise SourceFailure(
            FailureCode.BAD_TIMESTAMPS,
            f"implausible duration of {float(times.end_s / 3600):,.0f} hours for {counted(num_packets, 'frame')}",
        )
    return times
