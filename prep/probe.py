"""What a source file says and proves about itself, before anything is encoded.

An MP4's index lists the place of every packet, so that a truncated file is known without reading it. Other
containers are demuxed once from end to end (no decoding). One frame is decoded in every case: it has the true size
and rotation.

A file is only opened as one of `DEMUXERS`, through the file protocol: a playlist or a concat script that poses as a
video is refused, and nothing else is read on its behalf.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import av.error
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from prep.failures import FailureCode, SourceFailure
from shards.containers import CONTAINERS, FILE_PROTOCOLS

DEMUXERS = f"{CONTAINERS},h264,hevc"
PROTOCOLS = FILE_PROTOCOLS
_FINGERPRINT_BYTES = 1 << 20
# Containers round and pad the durations in their headers; a cut that loses less than this cannot be told from that.
_HEADER_SLACK_S = Fraction(1)
# A seek in these lands on any packet, not on a key frame: they list none.
_BLIND_SEEKS = frozenset({"mpegts", "mpeg", "wtv", "rm"})


@dataclass(frozen=True)
class SourceFacts:
    """What the plan and the encoder need to know of a source.

    Attributes:
        fingerprint: SHA-256 (hex) over size, first and last MiB.
        size_bytes: of the file.
        end_s: when the last video frame ends, in seconds from the container's start, as players count.
        fps: frames per second, averaged where they vary.
        width: of the picture as shown, pixels: rotated, with square pixels.
        height: likewise.
        codec: libav's name of it.
        key_gap_s: longest time between two key frames, where a seek may land between them; 0 where it lands on one.
    """

    fingerprint: str
    size_bytes: int
    end_s: float
    fps: float
    width: int
    height: int
    codec: str
    key_gap_s: float


@dataclass(frozen=True)
class _Times:
    """When the video stream ends, and `SourceFacts.key_gap_s`."""

    end_s: Fraction
    key_gap_s: Fraction


def source_fingerprint(path: Path) -> str:
    """SHA-256 (hex) over size, first and last MiB of a file: cheap for hours of video, and blind to its name."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_FINGERPRINT_BYTES))
        if size > _FINGERPRINT_BYTES:
            file.seek(max(_FINGERPRINT_BYTES, size - _FINGERPRINT_BYTES))
            digest.update(file.read(_FINGERPRINT_BYTES))
    return digest.hexdigest()


def probe(path: Path) -> SourceFacts:
    """Reads the facts of one source.

    Raises:
        SourceFailure: source_missing, source_unreadable, no_video, zero_duration, source_truncated or decode_errors.
    """
    try:
        size_bytes = path.stat().st_size
        if not path.is_file():
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "it is not a file")
        fingerprint = source_fingerprint(path)
    except FileNotFoundError:
        raise SourceFailure(FailureCode.SOURCE_MISSING, "there is no such file") from None
    except OSError as error:
        raise SourceFailure(FailureCode.SOURCE_UNREADABLE, error.strerror or str(error)) from None
    if size_bytes == 0:
        raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "the file is empty")
    try:
        container = av.open(
            os.fspath(path),
            options={"format_whitelist": DEMUXERS, "protocol_whitelist": PROTOCOLS},
            metadata_errors="ignore",
        )
    except (av.error.FFmpegError, ValueError) as error:
        raise SourceFailure(FailureCode.SOURCE_UNREADABLE, f"no video container: {_reason(error)}") from None
    with container:
        stream = _video_stream(container)
        width, height = _shown_size(container, stream)
        times = _video_times(container, stream, size_bytes)
        if times.end_s <= 0:
            raise SourceFailure(FailureCode.ZERO_DURATION, "the video stream lasts no time")
        rate = stream.average_rate or stream.guessed_rate or Fraction(0)
        return SourceFacts(
            fingerprint=fingerprint,
            size_bytes=size_bytes,
            end_s=float(times.end_s),
            fps=float(rate),
            width=width,
            height=height,
            codec=stream.codec_context.codec.canonical_name,
            key_gap_s=float(times.key_gap_s) if container.format.name in _BLIND_SEEKS else 0.0,
        )


def _video_stream(container: InputContainer) -> VideoStream:
    """The first video stream that is not a cover picture: the one that `-map 0:V:0` takes."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            return stream
    kinds: list[str] = sorted({stream.type for stream in container.streams})
    raise SourceFailure(FailureCode.NO_VIDEO, f"the file holds {', '.join(kinds) or 'nothing'} and no video stream")


def _shown_size(container: InputContainer, stream: VideoStream) -> tuple[int, int]:
    try:
        frame = next(container.decode(stream))
    except StopIteration:
        raise SourceFailure(FailureCode.ZERO_DURATION, "the video stream has no frame") from None
    except av.error.FFmpegError as error:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"no frame can be decoded: {_reason(error)}") from None
    aspect = stream.sample_aspect_ratio or Fraction(1)
    width, height = max(1, round(frame.width * aspect)) if aspect > 0 else frame.width, frame.height
    return (height, width) if frame.rotation % 180 else (width, height)


def _video_times(container: InputContainer, stream: VideoStream, size_bytes: int) -> _Times:
    """Times of the video stream, in seconds from the container's start; raises for a truncated file."""
    start_s = Fraction(container.start_time or 0, av.time_base)
    time_base = stream.time_base or Fraction(1)
    entries = stream.index_entries
    indexed = "mp4" in container.format.name and stream.duration and stream.frames == len(entries)
    if indexed:
        held_bytes = max(
            entries[row].pos + entries[row].size for row in range(max(0, len(entries) - 100), len(entries))
        )
        if held_bytes > size_bytes:
            raise SourceFailure(
                FailureCode.SOURCE_TRUNCATED, f"its index names bytes up to {held_bytes}, the file has {size_bytes}"
            )
        first_s = (stream.start_time or 0) * time_base
        return _Times(first_s + (stream.duration or 0) * time_base - start_s, Fraction(0))
    return _demuxed_times(container, stream)


def _demuxed_times(container: InputContainer, stream: VideoStream) -> _Times:
    video_end_s, any_end_s = Fraction(0), Fraction(0)
    last_key_s, key_gap_s = None, Fraction(0)
    for packet, begin_s, end_s in _timed_packets(container, stream):
        any_end_s = max(any_end_s, end_s)
        if packet.stream_index == stream.index:
            video_end_s = max(video_end_s, end_s)
            if packet.is_keyframe:
                key_gap_s = max(key_gap_s, begin_s - last_key_s) if last_key_s is not None else key_gap_s
                last_key_s = begin_s
    if last_key_s is not None:
        key_gap_s = max(key_gap_s, video_end_s - last_key_s)
    start_s = Fraction(container.start_time or 0, av.time_base)
    promised_s = start_s + Fraction(container.duration or 0, av.time_base)
    if container.format.name == "avi" and stream.average_rate:
        # libav shortens an AVI's durations to what the file holds; the frame count in its header stays.
        promised_s = max(promised_s, stream.frames / stream.average_rate)
    # Without a duration in the header, libav estimates one from the bitrate, which promises nothing.
    promises = any(name in container.format.name for name in ("matroska", "avi", "mp4", "flv", "asf"))
    if promises and any_end_s < promised_s - _HEADER_SLACK_S:
        raise SourceFailure(
            FailureCode.SOURCE_TRUNCATED,
            f"its header promises {float(promised_s):.2f} s, the packets end at {float(any_end_s):.2f} s",
        )
    return _Times(video_end_s - start_s, key_gap_s)


def _timed_packets(container: InputContainer, video: VideoStream) -> Iterator[tuple[Packet, Fraction, Fraction]]:
    """Every packet that has a time, with its begin and end in the container's own seconds."""
    frame_s = 1 / (video.average_rate or video.guessed_rate or Fraction(30))
    container.seek(0)
    try:
        for packet in container.demux():
            time = packet.pts if packet.pts is not None else packet.dts
            if packet.size and time is not None and packet.time_base:
                length_s = packet.duration * packet.time_base if packet.duration else Fraction(0)
                if packet.stream_index == video.index:
                    length_s = length_s or frame_s
                begin_s = time * packet.time_base
                yield packet, begin_s, begin_s + length_s
    except av.error.FFmpegError as error:
        raise SourceFailure(FailureCode.SOURCE_TRUNCATED, f"reading stops inside the file: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
