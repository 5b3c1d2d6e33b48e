"""Probe a source file: read and verify its properties before anything is encoded.

The index of an MP4 file lists the position of every packet, so truncation is detected without reading the file. Other
containers are demuxed completely, without decoding, because a plan needs information that only the packets contain: the
exact end of the last frame, timestamps that restart, changes of shape, and damage. The duration in a header may be
rounded, missing or taken from a different track. A plan based on this duration could omit chunks or contain nonexistent
chunks. For all containers, one frame is decoded to get the actual resolution and rotation.

Files are opened only with an allowlist of demuxers and through the file protocol. A playlist or concat script that is
disguised as a video is rejected, so it cannot make libav read other files. Objects are read in ranges
(`clipmill.prep.sources.remote`), with the same result.

`clipmill.prep.sources.probe_processes` runs probes in separate processes, so a file that makes its reader hang, crash
or run out of memory affects only this reader.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, cast

from av.container import InputContainer
from av.video.stream import VideoStream

from clipmill.manifests.storage.urls import Location
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import OpenSource, SourceFacts, as_failure, fingerprint_of, open_source
from clipmill.shards.timeline.model import find_track, open_container, video_tracks
from clipmill.shards.timeline.pictures import Picture, first_picture
from clipmill.shards.timeline.reading import has_index, indexed_timeline, read_timeline
from clipmill.shards.timeline.truncation import find_missing_index, find_truncation


def probe(location: Location, *, on_read: Callable[[], None] = lambda: None) -> SourceFacts:
    """Probe one source.

    Args:
        on_read: Function to call as a heartbeat while the source is read.

    Raises:
        SourceFailure: source_unreadable, source_truncated, no_video, zero_duration, bad_timestamps, decode_errors or
            out_of_memory; also the failures of `open_source`.
    """
    with open_source(location, on_read=on_read) as source:
        fingerprint, size_bytes, file = fingerprint_of(source), source.size_bytes, cast("IO[bytes]", source.file)
        if size_bytes == 0:
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "the file is empty")
        with open_video(source) as container:
            stream = next(iter(video_tracks(container)), None)
            is_indexed = stream is not None and has_index(container, stream)
            truncation = (
                None if is_indexed else find_truncation(file, size_bytes=size_bytes, format_name=container.format.name)
            )
            if truncation:
                raise SourceFailure(FailureCode.SOURCE_TRUNCATED, truncation)
            if stream is None:
                types: list[str] = sorted({stream.type for stream in container.streams})
                raise SourceFailure(FailureCode.NO_VIDEO, f"no video stream (streams: {', '.join(types) or 'none'})")
            track = _read_track(container, stream)
            timeline = None
            if is_indexed:
                with as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"):
                    timeline = indexed_timeline(container, stream, size_bytes=size_bytes)
            num_audio = len(container.streams.audio)
        if timeline is None:
            # Open the source again, because not every container can be rewound.
            with (
                open_video(source) as container,
                as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"),
            ):
                timeline, _ = read_timeline(container, file=file, on_packet=lambda packet: on_read())
        if timeline.truncation:
            raise SourceFailure(FailureCode.SOURCE_TRUNCATED, timeline.truncation)
        if timeline.track != track.index:  # the first track contains only one frame
            with open_video(source) as container:
                track = _read_track(container, find_track(container, timeline.track))
        picture = track.picture
        timeline = replace(timeline, shape=picture.shape, transfer=picture.transfer, primaries=picture.primaries)
        timeline = replace(timeline, is_indexed=is_indexed)
        return SourceFacts(
            fingerprint=fingerprint,
            size_bytes=size_bytes,
            end_s=float(timeline.end),
            fps=float(timeline.rate),
            width=picture.width,
            height=picture.height,
            codec=track.codec,
            key_gap_s=float(timeline.key_gap),
            num_audio=num_audio,
            timeline=timeline.to_json(),
            notes="\n".join((*timeline.notes, *picture.notes)),
        )


@contextmanager
def open_video(source: OpenSource) -> Iterator[InputContainer]:
    """Open a source with an allowlist of demuxers and protocols.

    Raises:
        SourceFailure: source_unreadable, source_truncated (an MP4 file without its index), or out_of_memory.
    """
    try:
        with as_failure(FailureCode.SOURCE_UNREADABLE, "not a supported video container"):
            source.file.seek(0)
            container = open_container(cast("str | IO[bytes]", source.libav_input))
    except SourceFailure as failure:
        if failure.code != FailureCode.SOURCE_UNREADABLE:
            raise
        truncation = find_missing_index(cast("IO[bytes]", source.file), size_bytes=source.size_bytes)
        if truncation is None:
            raise
        raise SourceFailure(FailureCode.SOURCE_TRUNCATED, truncation) from None
    with container:
        yield container


@dataclass(frozen=True)
class _Track:
    """Properties of a video track, read from its first frame and its header."""

    index: int
    picture: Picture
    codec: str


def _read_track(container: InputContainer, stream: VideoStream) -> _Track:
    with as_failure(FailureCode.DECODE_ERRORS, "no frame can be decoded"):
        picture = first_picture(container, stream)
    return _Track(stream.index, picture, stream.codec_context.codec.canonical_name)
