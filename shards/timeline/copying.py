"""Copy irregular sources to files with continuous timestamps."""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from clipmill.shards.timeline.model import (
    CONTINUOUS_FORMAT,
    NO_TIME,
    ONE,
    US_PER_S,
    Timeline,
    TrackPackets,
    find_track,
    open_container,
)
from clipmill.shards.timeline.reading import LONGEST_FRAME_S, RESTART_S, read_timeline

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.stream import VideoStream


def write_continuous(
    source: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    keeps_audio: bool,
    on_packet: Callable[[], None] = lambda: None,
) -> Timeline:
    """Copy the packets of a source to a file, with the timestamps of its timeline; return the timeline of the copy.

    Nothing is re-encoded. If timestamps restart, the source has several parts, and the first audio stream keeps its
    offset from the video of the same part.

    Args:
        keeps_audio: True to copy the first audio stream as well.
        on_packet: Function that is called for every packet that is read.

    Raises:
        TimelineError: See `read_timeline`.
        av.FFmpegError: A packet cannot be read or written.
    """
    import av

    with open_container(f"file:{os.fspath(source)}") as container, open(source, "rb") as file:  # noqa: PTH123
        timeline, packets = read_timeline(container, file=file, on_packet=lambda packet: on_packet())
    with (
        open_container(f"file:{os.fspath(source)}") as container,
        av.open(os.fspath(target), "w", format=CONTINUOUS_FORMAT) as output,
    ):
        track = find_track(container, timeline.track)
        audio_streams = list(container.streams.audio)[:1] if keeps_audio else []
        video = _VideoWriter(output, track, packets, start=timeline.start)
        writers: dict[int, Any] = {track.index: video}
        writers |= {audio.index: _AudioWriter(output, audio, video) for audio in audio_streams}
        for packet in container.demux([track, *audio_streams]):
            on_packet()
            if packet.size:
                writers[packet.stream_index].write(packet)
    with open_container(f"file:{os.fspath(target)}", formats=CONTINUOUS_FORMAT) as container:
        seek_start = Fraction(container.start_time or 0, US_PER_S)
    return replace(timeline, track=0, start=video.start, seek_start=seek_start, is_continuous=True, is_blind=False)


class _VideoWriter:
    """Writer for the packets of the video track.

    Attributes:
        start: Timestamp of time 0 in the written file, in seconds.
        offsets: Time to add to the timestamps of each part, in seconds.
    """

    def __init__(
        self, output: "OutputContainer", track: "VideoStream", packets: TrackPackets, *, start: Fraction
    ) -> None:
        self._output, self._unit = output, track.time_base or ONE
        self._stream, self._filter = _add_stream(output, track)
        sorted_times = np.sort(packets.times)
        # Decoding times must increase, and must not be later than presentation times.
        sorted_times = np.maximum.accumulate(sorted_times - np.arange(len(sorted_times))) + np.arange(len(sorted_times))
        delay = int((sorted_times - packets.times).max(initial=0))
        shift = delay + round((1 - start) / self._unit)  # leave a second, because the audio may begin a little earlier
        self.start = start + shift * self._unit
        self._times, self._decoding_times = packets.times + shift, sorted_times + shift - delay
        self._first_packets = [first for first, _ in packets.restarts]
        self.offsets = [(shift + offset) * self._unit for _, offset in packets.restarts]
        self._num_written, self._last_key = 0, NO_TIME

    def position(self) -> tuple[int, Fraction]:
        """Return the index of the part that is being written, and the length of this part so far, in seconds."""
        row = max(0, self._num_written - 1)
        part = bisect_right(self._first_packets, row) - 1
        return part, int(self._times[row] - self._times[self._first_packets[part]]) * self._unit

    def write(self, packet: "Packet[Any]") -> None:
        """Write the next packet."""
        packet.pts, packet.dts = int(self._times[self._num_written]), int(self._decoding_times[self._num_written])
        self._num_written += 1
        # The muxer aborts the process if the times of keyframes do not increase.
        packet.is_keyframe = packet.is_keyframe and packet.pts > self._last_key
        self._last_key = max(self._last_key, packet.pts if packet.is_keyframe else NO_TIME)
        for copy in self._filter(packet):
            copy.stream = self._stream
            self._output.mux(copy)


class _AudioWriter:
    """Writer for the packets of an audio track.

    The timestamps of audio and video do not restart at the same packet. A part of the audio begins where the audio
    timestamps restart, at most a second after the corresponding part of the video. Audio that overlaps the previous
    part is omitted.
    """

    def __init__(self, output: "OutputContainer", audio: "Stream", video: _VideoWriter) -> None:
        self._output, self._video, self._unit = output, video, audio.time_base or ONE
        self._stream, self._filter = _add_stream(output, audio)
        self._part, self._last, self._end = 0, NO_TIME, NO_TIME

    def write(self, packet: "Packet[Any]") -> None:
        """Write the next packet."""
        time = packet.dts if packet.pts is None else packet.pts
        if time is None:
            return
        part, seconds = self._video.position()
        step = (time - self._last) * self._unit if self._last != NO_TIME else 0
        if step < -RESTART_S or step > LONGEST_FRAME_S:
            self._part = min(self._part + 1, part + 1, len(self._video.offsets) - 1)
        if self._part < part and (seconds > 1 or self._part < part - 1):
            self._part = part
        self._last = time
        new_time = time + round(self._video.offsets[self._part] / self._unit)
        if new_time < max(0, self._end):
            return
        packet.pts = packet.dts = new_time
        self._end = new_time + max(1, packet.duration or 0)
        for copy in self._filter(packet):
            copy.stream = self._stream
            self._output.mux(copy)


def _add_stream(output: "OutputContainer", stream: Any) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Add a stream with the parameters of `stream` to `output`.

    Returns:
        The new stream, and a function that converts packets for it. The function moves parameter sets from the header
        into the packets, because parameter sets may change within the stream.
    """
    from av.bitstream import BitStreamFilterContext

    copy = output.add_stream_from_template(stream)
    copy.time_base = stream.time_base
    codec, extradata = stream.codec_context.name, stream.codec_context.extradata or b""
    if codec in ("h264", "hevc") and extradata[:1] == b"\1":
        return copy, BitStreamFilterContext(f"{codec}_mp4toannexb", stream, copy).filter
    return copy, lambda packet: [packet]
