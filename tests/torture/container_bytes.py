"""Edits of container files that no muxer makes: edit lists, durations, crops, dropped frames, joined files."""

import re
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction

_TS_BYTES, _TS_SYNC, _TS_NULL = 188, 0x47, 0x1FFF
_FLV_HEADER_BYTES = 13
_BOXES_OF_TRACK = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd")
_SAMPLE_ENTRIES = (b"avc1", b"hvc1", b"hev1", b"mp4v", b"vp09", b"jpeg", b"av01")
_ENTRY_BYTES = (
    86  # bytes of a VisualSampleEntry before its boxes, with size and type; an stsd has 16 bytes before its entries
)
# Matroska element IDs (RFC 9559).
_SEGMENT, _TRACKS, _TRACK, _VIDEO, _VOID = b"\x18\x53\x80\x67", b"\x16\x54\xae\x6b", b"\xae", b"\xe0", b"\xec"
_CROPS = (b"\x54\xcc", b"\x54\xbb", b"\x54\xdd", b"\x54\xaa")  # left, top, right, bottom
_DISPLAY = (b"\x54\xb0", b"\x54\xba")  # width, height
_DISPLAY_UNIT = b"\x54\xb2"


def append_files(container: str, first: bytes, second: bytes) -> bytes:
    """Concatenate two files, as recorders and `cat` do; the timestamps of each file start from its own first value."""
    if container == "flv":
        return first + second[_FLV_HEADER_BYTES:]
    if container == "ts":
        return _one_transport_stream(first + second)
    if container == "mpg":
        end = bytes.fromhex("000001b9")
        return first.removesuffix(end) + second
    return first + second


def _one_transport_stream(content: bytes) -> bytes:
    """Renumber the packets of each PID continuously, as in the output of one recorder."""
    numbers: dict[int, int] = {}
    packets = []
    for begin in range(0, len(content), _TS_BYTES):
        packet = bytearray(content[begin : begin + _TS_BYTES])
        assert packet[0] == _TS_SYNC
        pid = (packet[1] & 31) << 8 | packet[2]
        if pid == _TS_NULL:
            continue
        if packet[3] & 0x10:
            numbers[pid] = (numbers.get(pid, -1) + 1) & 15
        packet[3] = packet[3] & 0xF0 | numbers.get(pid, 0)
        packets.append(bytes(packet))
    return b"".join(packets)


def with_edit(content: bytes, *, begin_s: Fraction | None = None, end_s: Fraction | None = None) -> bytes:
    """Hide the start or the end of the first track of an MP4 with its edit list."""
    changed = bytearray(content)
    at = content.index(b"elst")
    (num_edits,) = struct.unpack_from(">I", content, at + 8)
    assert content[at + 4] == 0
    at += 12 * (num_edits - 1)  # an edit before the last one is the delay before the first frame
    (movie_scale,) = struct.unpack_from(">I", content, content.index(b"mvhd") + 16)
    (media_scale,) = struct.unpack_from(">I", content, content.index(b"mdhd") + 16)
    length, media_begin = struct.unpack_from(">Ii", content, at + 12)
    if begin_s is not None:
        media_begin += round(begin_s * media_scale)
        length -= round(begin_s * movie_scale)
    if end_s is not None:
        length = round(end_s * movie_scale)
    (old_length,) = struct.unpack_from(">I", content, at + 12)
    struct.pack_into(">Ii", changed, at + 12, length, media_begin)
    # The headers of the track and of the movie state matching durations: the sum of the edits, and the longest track.
    tracks = [match.start() + 24 for match in re.finditer(b"tkhd\0", content)]
    lengths = [struct.unpack_from(">I", content, place)[0] for place in tracks]
    lengths[0] -= old_length - length
    struct.pack_into(">I", changed, tracks[0], lengths[0])
    struct.pack_into(">I", changed, content.index(b"mvhd") + 20, max(lengths))
    return bytes(changed)


def with_media_length(content: bytes, *, share: Fraction) -> bytes:
    """Let the media header of an MP4's first track state a fraction of its true duration, as after an overflow."""
    changed = bytearray(content)
    at = content.index(b"mdhd")
    assert content[at + 4] == 0
    (length,) = struct.unpack_from(">I", content, at + 20)
    struct.pack_into(">I", changed, at + 20, round(length * share))
    return bytes(changed)


def with_clean_aperture(content: bytes, crop: Sequence[int]) -> bytes:
    """Add a crop (left, top, right, bottom) in pixels to the first track of an MP4 (`clap`, ISO 14496-12, 12.1.4).

    The `moov` is at the end of the file, so that no offset in the file changes.
    """
    left, top, right, bottom = crop
    places = []
    begin, end = 0, len(content)
    for kind in _BOXES_OF_TRACK:
        begin, end = _box(content, kind, begin, end)
        places.append(begin)
        begin += 8 + (8 if kind == b"stsd" else 0)
    places.append(begin)
    assert content[begin + 4 : begin + 8] in _SAMPLE_ENTRIES
    width, height = struct.unpack_from(">HH", content, begin + 32)
    values = (width - left - right, 1, height - top - bottom, 1, left - right, 2, top - bottom, 2)
    clap = struct.pack(">I4s8i", 40, b"clap", *values)
    changed = bytearray(content)
    for place in places:
        struct.pack_into(">I", changed, place, struct.unpack_from(">I", content, place)[0] + len(clap))
    changed[begin + _ENTRY_BYTES : begin + _ENTRY_BYTES] = clap
    return bytes(changed)


def _box(content: bytes, kind: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return the start and the end of the first box of a kind between two offsets."""
    while begin < end:
        size, name = struct.unpack_from(">I4s", content, begin)
        if size == 1:
            (size,) = struct.unpack_from(">Q", content, begin + 8)
        if name == kind:
            return begin, begin + size
        begin += size
    raise ValueError(f"no box {kind!r}")


def with_display(content: bytes, *, crop: Sequence[int], size: Sequence[int]) -> bytes:
    """Set the crop (left, top, right, bottom) and the display size (width, height) of a Matroska file's first video.

    The bytes are taken from the void element before the tracks. Offsets in the file do not change, except the offset
    of the tracks, which players find by reading.
    """
    values = zip((*_CROPS, *_DISPLAY), (*crop, *size), strict=True)
    added = b"".join(_element(name, value.to_bytes(2, "big")) for name, value in values)
    _, segment, _ = _child(content, _SEGMENT, 0, len(content))
    tracks, tracks_data, tracks_end = _child(content, _TRACKS, segment, len(content))
    track, track_data, track_end = _child(content, _TRACK, tracks_data, tracks_end)
    video, video_data, video_end = _child(content, _VIDEO, track_data, track_end)
    kept = b"".join(
        content[begin:end]
        for name, begin, _, end in _children(content, video_data, video_end)
        if name not in (*_CROPS, *_DISPLAY, _DISPLAY_UNIT)
    )
    new_video = _element(_VIDEO, kept + added)
    new_track = _element(_TRACK, content[track_data:video] + new_video + content[video_end:track_end])
    new_tracks = _element(_TRACKS, content[tracks_data:track] + new_track + content[track_end:tracks_end])
    grown = len(new_tracks) - (tracks_end - tracks)
    void, _, void_end = _child(content, _VOID, segment, tracks)
    rest = void_end - void - grown - 9
    new_void = _VOID + (1 << 56 | rest).to_bytes(8, "big") + bytes(rest)
    return content[:void] + new_void + content[void_end:tracks] + new_tracks + content[tracks_end:]


def _element(name: bytes, data: bytes) -> bytes:
    return name + (1 << 28 | len(data)).to_bytes(4, "big") + data


def _child(content: bytes, name: bytes, begin: int, end: int) -> tuple[int, int, int]:
    """Return the start of a Matroska element, the start of its data, and its end."""
    return next(place for child, *place in _children(content, begin, end) if child == name)  # type: ignore[return-value]


def _children(content: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield the elements between two offsets: ID, start, start of the data, and end."""
    while begin < end:
        id_bytes = 9 - content[begin].bit_length()
        at = begin + id_bytes
        size_bytes = 9 - content[at].bit_length()
        unknown = (1 << 7 * size_bytes) - 1
        size = int.from_bytes(content[at : at + size_bytes], "big") & unknown
        data = at + size_bytes
        last = end if size == unknown else data + size
        yield content[begin:at], begin, data, last
        begin = last


def with_dropped_frames(content: bytes, num_dropped: int) -> bytes:
    """Append frames without data to an AVI, as a capture that ends with dropped frames does."""
    changed = bytearray(content)
    movie = content.index(b"movi") - 8
    (movie_bytes,) = struct.unpack_from("<I", content, movie + 4)
    end = movie + 8 + movie_bytes
    assert content[end : end + 4] == b"idx1"
    chunk = b"00dc" + struct.pack("<I", 0)
    (index_bytes,) = struct.unpack_from("<I", content, end + 4)
    entries = b"".join(
        b"00dc" + struct.pack("<III", 0, end - movie - 8 + 8 * number, 0) for number in range(num_dropped)
    )
    changed[end + 8 + index_bytes : end + 8 + index_bytes] = entries
    struct.pack_into("<I", changed, end + 4, index_bytes + len(entries))
    changed[end:end] = chunk * num_dropped
    struct.pack_into("<I", changed, movie + 4, movie_bytes + len(chunk) * num_dropped)
    struct.pack_into(
        "<I", changed, 4, struct.unpack_from("<I", content, 4)[0] + len(entries) + len(chunk) * num_dropped
    )
    for word, offset in ((b"avih", 8 + 16), (b"strh", 8 + 32)):
        at = content.index(word) + offset
        (num_frames,) = struct.unpack_from("<I", content, at)
        struct.pack_into("<I", changed, at, num_frames + num_dropped)
    return bytes(changed)
