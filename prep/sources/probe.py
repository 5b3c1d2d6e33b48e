"""Probe a source file: its properties are read and verified before anything is encoded.

The index of an MP4 lists the position of every packet, so that truncation is detected without reading the file. Other
containers are demuxed once from end to end, without decoding. In every case one frame is decoded, to obtain the actual
size and rotation.

Files are opened only with an allowlist of demuxers and through the file protocol: a playlist or concat script
disguised as a video is refused, so that it cannot make libav read other files. Objects are read by ranges
(`clipmill.prep.sources.remote`), with the same result.

`clipmill.prep.sources.probe_processes` runs this in separate processes: a file that hangs or crashes its reader, or
exhausts its memory, affects only that process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, cast

from av.container import InputContainer
from av.video.stream import VideoStream

from clipmill.manifests.storage.urls import Place
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import OpenSource, SourceFacts, as_failure, fingerprint_of, open_source
from clipmill.shards.timeline.model import open_container, track_of, video_tracks
from clipmill.shards.timeline.pictures import Picture, first_picture
from clipmill.shards.timeline.reading import has_index, indexed_timeline, read_timeline

if TYPE_CHECKING:
    from clipmill.prep.sources.access import SourceBytes


def probe(place: Place, *, on_read: Callable[[], None] = lambda: None) -> SourceFacts:
    """Probe one source.

    Args:
        on_read: Function that is called for every packet, as a heartbeat.

    Raises:
        SourceFailure: source_missing, source_unreadable, source_truncated, no_video, zero_duration, bad_timestamps,
            decode_errors, io_error or out_of_memory.
    """
    with open_source(place, on_read=on_read) as source:
        fingerprint, size_bytes = fingerprint_of(source), source.size_bytes
        if size_bytes == 0:
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "the file is empty")
        with open_video(source) as container:
            stream = next(iter(video_tracks(container)), None)
            is_indexed = stream is not None and has_index(container, stream)
            missing = None if is_indexed else truncation(source, format_name=container.format.name)
            if missing:
                raise SourceFailure(FailureCode.SOURCE_TRUNCATED, missing)
            if stream is None:
                kinds: list[str] = sorted({stream.type for stream in container.streams})
                raise SourceFailure(FailureCode.NO_VIDEO, f"no video stream (streams: {', '.join(kinds) or 'none'})")
            look = _look_at(container, stream)
            timeline = None
            if is_indexed:
                with as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"):
                    timeline = indexed_timeline(container, stream, size_bytes=size_bytes)
            num_audio = len(container.streams.audio)
        if timeline is None:
            # Opened again because not every container can be rewound.
            with (
                open_video(source) as container,
                as_failure(FailureCode.SOURCE_TRUNCATED, "reading failed inside the file"),
            ):
                timeline, _ = read_timeline(
                    container, file=cast("IO[bytes]", source.file), on_packet=lambda packet: on_read()
                )
        if timeline.cut:
            raise SourceFailure(FailureCode.SOURCE_TRUNCATED, timeline.cut)
        if timeline.track != look.track:  # the first track has a single frame
            with open_video(source) as container:
                look = _look_at(container, track_of(container, timeline.track))
        picture = look.picture
        timeline = replace(timeline, shape=picture.shape, transfer=picture.transfer, primaries=picture.primaries)
        return SourceFacts(
            fingerprint=fingerprint,
            size_bytes=size_bytes,
            end_s=float(timeline.end),
            fps=float(timeline.rate),
            width=picture.width,
            height=picture.height,
            codec=look.codec,
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
            container = open_container(cast("str | IO[bytes]", source.for_libav))
    except SourceFailure as failure:
        if failure.code != FailureCode.SOURCE_UNREADABLE or (missing := missing_index(source)) is None:
            raise
        raise SourceFailure(FailureCode.SOURCE_TRUNCATED, missing) from None
    with container:
        yield container


@dataclass(frozen=True)
class _Look:
    """Facts from the first frame and the header of one video track."""

    track: int
    picture: Picture
    codec: str


def _look_at(container: InputContainer, stream: VideoStream) -> _Look:
    with as_failure(FailureCode.DECODE_ERRORS, "no frame can be decoded"):
        picture = first_picture(container, stream)
    return _Look(stream.index, picture, stream.codec_context.codec.canonical_name)


_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
_OGG_LONGEST_PAGE = 27 + 255 + 255 * 255
_FLV_TAGS = frozenset({8, 9, 18})  # audio, video, script data
_BOX_TYPES_OF_INDEX = frozenset({b"moof", b"moov", b"meta"})  # meta: index of pictures
_BOX_TYPES_OF_MEDIA = frozenset({b"mdat", b"moof", b"moov"})


def truncation(source: OpenSource, *, format_name: str) -> str | None:
    """Return a description of what a truncated file lacks at its end, or None.

    Return None for a complete file, and if the structure of the file does not tell. Only the sizes in headers are
    followed, from one element to the next, so that hours of video cost a few kilobytes of reading. MPEG-TS, MPEG-PS and
    raw streams contain no sizes: if such a file is truncated, the missing frames are not noticed.

    Args:
        format_name: Libav's name of the demuxer.

    Raises:
        OSError: The file cannot be read.
    """
    for name, check in _CHECKS.items():
        if name in format_name:
            return check(source.file, source.size_bytes)
    return None


def missing_index(source: OpenSource) -> str | None:
    """Return what an MP4 file lacks that libav cannot open because it ends before its index, or None.

    Raises:
        OSError: The file cannot be read.
    """
    position = 0
    while position + 8 <= source.size_bytes:
        source.file.seek(position)
        head = source.file.read(16)
        if head[4:8] in _BOX_TYPES_OF_INDEX or (position == 0 and head[4:8] != b"ftyp"):
            return None
        if (length := _box_bytes(head)) == 0:  # up to the end of the file
            break
        if length < 8:
            return None
        position += length
    return "truncated: its index (box moov) is missing" if position else None


def _matroska(file: "SourceBytes", size_bytes: int) -> str | None:
    position = 0
    while position < size_bytes:
        file.seek(position)
        head = file.read(12)
        header = ebml_header(head)
        if header is None:
            return _cut("an element header", size_bytes + 1, size_bytes) if len(head) < 12 and any(head) else None
        element, header_bytes, length = header
        position += header_bytes
        if length is None:  # live stream: descend into it and treat clusters and blocks as one level
            if element not in (_SEGMENT, _CLUSTER):
                return None
            continue
        position += length
        if position > size_bytes:
            return _cut(
                {_SEGMENT: "the segment", _CLUSTER: "a cluster"}.get(element, "an element"), position, size_bytes
            )
        if element == _SEGMENT:
            return None
    return None


def ebml_header(head: bytes) -> tuple[int, int, int | None] | None:
    """Return (id, header size, content size or None if unknown), in bytes, of the EBML element at the start of `head`.

    Returns None if `head` is too short or does not begin with an element (RFC 8794, sections 4 to 6).
    """
    id_bytes = 9 - head[0].bit_length() if head else 9
    if id_bytes > 4 or len(head) <= id_bytes:
        return None
    length_bytes = 9 - head[id_bytes].bit_length()
    if length_bytes > 8 or len(head) < id_bytes + length_bytes:
        return None
    is_unknown = (1 << 7 * length_bytes) - 1
    length = int.from_bytes(head[id_bytes : id_bytes + length_bytes], "big") & is_unknown
    element = int.from_bytes(head[:id_bytes], "big")
    return element, id_bytes + length_bytes, None if length == is_unknown else length


def _asf(file: "SourceBytes", size_bytes: int) -> str | None:
    position = 0
    while position + 24 <= size_bytes:
        file.seek(position)
        head = file.read(24)
        length = int.from_bytes(head[16:], "little")
        if head[:16] == _ASF_DATA:
            # A size of 0, or of only the header, denotes a live stream.
            return _cut("the data object", position + length, size_bytes) if position + length > size_bytes else None
        if length < 24:
            return None
        position += length
    return None


def _avi(file: "SourceBytes", size_bytes: int) -> str | None:
    position = 0
    while position + 12 <= size_bytes:
        file.seek(position)
        head = file.read(12)
        length, kind = int.from_bytes(head[4:8], "little"), head[8:]
        if head[:4] == b"RIFF" and kind in (b"AVI ", b"AVIX"):
            position += 12
            continue
        if head[:4] == b"LIST" and kind == b"movi" and 0 < length < 0xFFFFFFF0 and position + 8 + length > size_bytes:
            return _cut("the frame list", position + 8 + length, size_bytes)
        position += 8 + length + length % 2
    return None


def _ogg(file: "SourceBytes", size_bytes: int) -> str | None:
    begin = max(0, size_bytes - _OGG_LONGEST_PAGE)
    file.seek(begin)
    tail = file.read()
    page = tail.rfind(b"OggS\0")
    if page < 0:
        return None
    num_segments = tail[page + 26] if page + 26 < len(tail) else 255
    segments = tail[page + 27 : page + 27 + num_segments]
    end = page + 27 + num_segments + sum(segments)
    if len(segments) < num_segments or end > len(tail):
        return _cut("the last page", begin + max(end, len(tail) + 1), size_bytes)
    return None


def _mp4(file: "SourceBytes", size_bytes: int) -> str | None:
    position = 0
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(16)
        length = _box_bytes(head)
        if length < 8:  # 0 means up to the end of the file
            return None
        if position + length > size_bytes and head[4:8] in _BOX_TYPES_OF_MEDIA:
            return _cut(f"box {head[4:8].decode()}", position + length, size_bytes)
        position += length
    return None


def _box_bytes(head: bytes) -> int:
    """Return the size in the first 16 bytes of an MP4 box; 0 means up to the end of the file."""
    length = int.from_bytes(head[:4], "big")
    return int.from_bytes(head[8:], "big") if length == 1 and len(head) == 16 else length


def _flv(file: "SourceBytes", size_bytes: int) -> str | None:
    # In a complete file, the last four bytes hold the size of the tag right before them, as after every tag.
    file.seek(size_bytes - 4)
    tag_bytes = int.from_bytes(file.read(4), "big")
    begin = size_bytes - 4 - tag_bytes
    if begin >= 9 and tag_bytes >= 11:
        file.seek(begin)
        head = file.read(4)
        if head[0] & 31 in _FLV_TAGS and int.from_bytes(head[1:], "big") == tag_bytes - 11:
            return None
    file.seek(5)
    position = int.from_bytes(file.read(4), "big") + 4
    while position < size_bytes:
        file.seek(position)
        head = file.read(4)
        if head[0] & 31 not in _FLV_TAGS:
            return None
        end = position + 11 + int.from_bytes(head[1:], "big")
        if len(head) < 4 or end > size_bytes:
            return _cut("the last tag", max(end, size_bytes + 1), size_bytes)
        position = end + 4
    return None


def _cut(what: str, end: int, size_bytes: int) -> str:
    return f"truncated: {what} ends at byte {end}, but the file has {size_bytes} bytes"


_CHECKS = {"matroska": _matroska, "asf": _asf, "avi": _avi, "ogg": _ogg, "mp4": _mp4, "flv": _flv}
