"""Probing a source file: reading and verifying its properties before anything is encoded.

The index of an MP4 lists the position of every packet, so that truncation is detected without reading the file. Other
containers are demuxed once from end to end, without decoding. In every case one frame is decoded, to obtain the actual
size and rotation.

Files are opened only with the demuxers in `DEMUXERS` and through the file protocol: a playlist or concat script
disguised as a video is refused, so that it cannot make libav read other files. Objects are read by ranges
(`clipmill.prep.sources.remote`), with the same result.

`clipmill.prep.sources.probe_processes` runs this in separate processes: a file that hangs or crashes its reader, or
exhausts its memory, affects only that process.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import av
import av.error
from av.container import InputContainer
from av.video.stream import VideoStream

from clipmill.manifests.storage.urls import Place
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import OpenSource, fingerprint_of, open_source
from clipmill.prep.sources.packet_times import demuxed_times, indexed_times, is_indexed
from clipmill.prep.sources.truncation import missing_index, truncation
from clipmill.shards.containers import CONTAINERS, FILE_PROTOCOLS

DEMUXERS = f"{CONTAINERS},h264,hevc"
PROTOCOLS = FILE_PROTOCOLS
# In these formats a seek lands on any packet instead of a key frame, because they have no list of key frames.
_BLIND_SEEKS = frozenset({"mpegts", "mpeg", "wtv", "rm"})
_MAX_PIXEL_ASPECT = 64  # beyond it, a few rows in a damaged header would become a picture of gigabytes
# Errors of the machine rather than of the file; they may be gone at the next probe.
_MACHINE_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENODEV}
    | {errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
)


@dataclass(frozen=True)
class SourceFacts:
    """Properties of a source that the plan and the encoder need.

    Attributes:
        fingerprint: SHA-256 (hex) over size, first and last MiB.
        size_bytes: size of the file.
        end_s: end of the last video frame in seconds from the container's start, as players count.
        fps: frame rate in frames per second; the average if it varies.
        width: display width in pixels, after rotation and with square pixels.
        height: display height in pixels, likewise.
        codec: libav's name of the codec.
        key_gap_s: longest time in seconds between two key frames if a seek may land between them; 0 if a seek lands on
            a key frame.
        num_audio: number of audio streams.
    """

    fingerprint: str
    size_bytes: int
    end_s: float
    fps: float
    width: int
    height: int
    codec: str
    key_gap_s: float
    num_audio: int = 0


def probe(place: Place, *, on_read: Callable[[], None] = lambda: None) -> SourceFacts:
    """Probe one source.

    Args:
        on_read: called for every packet read, as a heartbeat.

    Raises:
        SourceFailure: source_missing, source_unreadable, source_truncated, no_video, zero_duration, bad_timestamps,
            decode_errors, io_error or out_of_memory.
    """
    with open_source(place, on_read=on_read) as source:
        return _probe(source, on_read=on_read)


def _probe(source: OpenSource, *, on_read: Callable[[], None]) -> SourceFacts:
    fingerprint, size_bytes = fingerprint_of(source), source.size_bytes
    if size_bytes == 0:
        raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "the file is empty")
    with opened(source) as container:
        stream = first_video(container)
        indexed = stream is not None and is_indexed(container, stream)
        missing = None if indexed else truncation(source, format_name=container.format.name)
        if missing:
            raise SourceFailure(FailureCode.SOURCE_TRUNCATED, missing)
        if stream is None:
            kinds: list[str] = sorted({stream.type for stream in container.streams})
            raise SourceFailure(FailureCode.NO_VIDEO, f"no video stream (streams: {', '.join(kinds) or 'none'})")
        width, height = _shown_size(container, stream)
        times = indexed_times(container, stream, size_bytes=size_bytes) if indexed else None
        rate = stream.average_rate or stream.guessed_rate or Fraction(0)
        codec, index = stream.codec_context.codec.canonical_name, stream.index
        num_audio = len(container.streams.audio)
        is_blind = container.format.name in _BLIND_SEEKS
    if times is None:
        # Opened again because not every container can be rewound.
        with opened(source) as container, as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"):
            times = demuxed_times(container, video_index=index, on_read=on_read)
    return SourceFacts(
        fingerprint=fingerprint,
        size_bytes=size_bytes,
        end_s=float(times.end_s),
        fps=float(rate),
        width=width,
        height=height,
        codec=codec,
        key_gap_s=float(times.key_gap_s) if is_blind else 0.0,
        num_audio=num_audio,
    )


@contextmanager
def opened(source: OpenSource) -> Iterator[InputContainer]:
    """Open a source with an allowlist of demuxers and protocols.

    Raises:
        SourceFailure: source_unreadable, source_truncated (an MP4 file without its index), or out_of_memory.
    """
    try:
        with as_failure(FailureCode.SOURCE_UNREADABLE, "not a supported video container"):
            source.file.seek(0)
            container: InputContainer = av.open(
                source.for_libav,
                "r",
                options={"format_whitelist": DEMUXERS, "protocol_whitelist": PROTOCOLS},
                metadata_errors="ignore",
            )
    except SourceFailure as failure:
        if failure.code != FailureCode.SOURCE_UNREADABLE or (missing := missing_index(source)) is None:
            raise
        raise SourceFailure(FailureCode.SOURCE_TRUNCATED, missing) from None
    with container:
        yield container


def first_video(container: InputContainer) -> VideoStream | None:
    """Return the first video stream that is not an attached picture: the one selected by `-map 0:V:0`."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            return stream
    return None


def _shown_size(container: InputContainer, stream: VideoStream) -> tuple[int, int]:
    if stream.codec_context is None:
        raise SourceFailure(FailureCode.DECODE_ERRORS, "no decoder for the video stream")
    stream.codec_context.thread_count = 1  # only one frame is decoded; more threads would use more memory
    with as_failure(FailureCode.DECODE_ERRORS, "no frame can be decoded"):
        frame = next(container.decode(stream), None)
    if frame is None:
        raise SourceFailure(FailureCode.ZERO_DURATION, "the video stream has no frames")
    aspect = stream.sample_aspect_ratio or Fraction(1)
    if aspect > _MAX_PIXEL_ASPECT or 0 < aspect * _MAX_PIXEL_ASPECT < 1:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"implausible pixel aspect ratio in the header: {aspect}")
    width, height = max(1, round(frame.width * aspect)) if aspect > 0 else frame.width, frame.height
    return (height, width) if frame.rotation % 180 else (width, height)


@contextmanager
def as_failure(code: FailureCode, what: str) -> Iterator[None]:
    """Convert the errors that libav raises inside the block, whatever the file contains, to failure `code`."""
    try:
        yield
    except MemoryError:
        message = f"{what}: memory limit exceeded"
        raise SourceFailure(FailureCode.OUT_OF_MEMORY, message, is_lasting=False) from None
    except (av.error.FFmpegError, OSError) as error:
        is_lasting = error.errno not in _MACHINE_ERRORS
        message = f"{what}: {error.strerror or error}"
        raise SourceFailure(code, message, is_lasting=is_lasting) from None
    except (ValueError, ArithmeticError) as error:  # times or sizes that PyAV cannot represent
        raise SourceFailure(code, f"{what}: {type(error).__name__}: {error}") from None
