"""Detection of truncated files, in which the structure of the container extends beyond the end of the file.

Only the sizes in headers are read, jumping from one element to the next, so that a check of hours of video reads only a
few kilobytes.
"""

import io
from typing import IO

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
_OGG_LONGEST_PAGE = 27 + 255 + 255 * 255
_FLV_TAGS = frozenset({8, 9, 18})  # audio, video, script data
_INDEX_BOXES = frozenset({b"moof", b"moov", b"meta"})  # meta is the index of images
_MEDIA_BOXES = frozenset({b"mdat", b"moof", b"moov"})


def truncation(file: "IO[bytes]", *, size_bytes: int, format_name: str) -> str | None:
    """Describe the missing part of a truncated file; return an empty string if it is complete, None if unknown.

    MPEG-TS, MPEG-PS and raw streams do not contain sizes. Live recordings, Ogg and FLV contain the size of each part,
    but not the number of parts: if such a file ends between two parts, the result is None.

    Args:
        format_name: Name of the demuxer in libav.

    Raises:
        OSError: The file cannot be read.
    """
    for name, check in _CHECKS.items():
        if name in format_name:
            return check(file, size_bytes)
    return None


def require_complete(content: bytes, *, format_name: str) -> None:
    """Raise ValueError for a truncated file in memory, and for a file that does not contain its size.

    libav would decode the rest as if it were a complete, shorter video.
    """
    problem = truncation(io.BytesIO(content), size_bytes=len(content), format_name=format_name)
    if problem is None:
        name = format_name.partition(",")[0]
        problem = f"this {name} file does not contain its size, so it may be truncated: convert it to mp4 or mkv"
    if problem:
        raise ValueError(problem)


def missing_index(file: "IO[bytes]", *, size_bytes: int) -> str | None:
    """Return a message for an MP4 file that ends before its index, so libav cannot open it; None for other files.

    Raises:
        OSError: The file cannot be read.
    """
    position = 0
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(16)
        if head[4:8] in _INDEX_BOXES or (position == 0 and head[4:8] != b"ftyp"):
            return None
        if (length := _box_bytes(head)) == 0:  # up to the end of the file
            break
        if length < 8:
            return None
        position += length
    return "truncated: its index (box moov) is missing" if position else None


def _matroska(file: "IO[bytes]", size_bytes: int) -> str | None:
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
            return ""
    return None


def ebml_header(head: bytes) -> tuple[int, int, int | None] | None:
    """Return the ID, header size and content size (None if unknown), in bytes, of the EBML element at `head`'s start.

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


def _asf(file: "IO[bytes]", size_bytes: int) -> str | None:
    position = 0
    while position + 24 <= size_bytes:
        file.seek(position)
        head = file.read(24)
        length = int.from_bytes(head[16:], "little")
        if head[:16] == _ASF_DATA:
            # A size of 0, or of 50 bytes, which is only the header, denotes a live stream.
            if position + length > size_bytes:
                return _cut("the data object", position + length, size_bytes)
            return "" if length > 50 else None
        if length < 24:
            return None
        position += length
    return None


def _avi(file: "IO[bytes]", size_bytes: int) -> str | None:
    position, is_listed = 0, False
    while position + 12 <= size_bytes:
        file.seek(position)
        head = file.read(12)
        length, kind = int.from_bytes(head[4:8], "little"), head[8:]
        if head[:4] == b"RIFF" and kind in (b"AVI ", b"AVIX"):
            position += 12
            continue
        if head[:4] == b"LIST" and kind == b"movi" and 0 < length < 0xFFFFFFF0:
            if position + 8 + length > size_bytes:
                return _cut("the frame list", position + 8 + length, size_bytes)
            is_listed = True
        position += 8 + length + length % 2
    return "" if is_listed else None


def _ogg(file: "IO[bytes]", size_bytes: int) -> str | None:
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


def _mp4(file: "IO[bytes]", size_bytes: int) -> str | None:
    position, has_media, has_end, last_fragment, fragments_end = 0, False, False, 0, 0
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(16)
        length, kind = _box_bytes(head), head[4:8]
        if length < 8:  # 0 means up to the end of the file
            if kind in _MEDIA_BOXES:
                return None
            break  # padding
        if position + length > size_bytes and kind in _MEDIA_BOXES:
            return _cut(f"box {kind.decode()}", position + length, size_bytes)
        has_media |= kind == b"mdat"
        has_end |= kind == b"mfra"  # the index at the end of a fragmented file
        if kind == b"sidx" and not last_fragment:  # an index before all fragments, or before the first fragment
            file.seek(position)
            fragments_end = position + length + _indexed_bytes(file.read(min(length, size_bytes)))
        elif kind == b"moof":
            last_fragment = position
        position += length
    if last_fragment and not has_end:
        if fragments_end > size_bytes:
            return _cut("the last fragment", fragments_end, size_bytes)
        return "" if fragments_end > last_fragment else None
    return "" if has_media else None


def _indexed_bytes(box: bytes) -> int:
    """Return the total size of the fragments that a sidx box lists (ISO/IEC 14496-12); 0 if it lists only one."""
    begin = 32 if box[8:9] == b"\1" else 24  # the box has two times of 4 or 8 bytes, and a reserved half-word
    num_fragments = int.from_bytes(box[begin + 6 : begin + 8], "big")
    sizes = [int.from_bytes(box[i : i + 4], "big") & 0x7FFFFFFF for i in range(begin + 8, len(box) - 3, 12)]
    return sum(sizes[:num_fragments]) if num_fragments > 1 else 0


def _box_bytes(head: bytes) -> int:
    """Return the size in the first 16 bytes of an MP4 box; 0 means up to the end of the file."""
    length = int.from_bytes(head[:4], "big")
    return int.from_bytes(head[8:], "big") if length == 1 and len(head) == 16 else length


def _flv(file: "IO[bytes]", size_bytes: int) -> str | None:
    # In a complete file, the last four bytes contain the size of the preceding tag, as after every tag.
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


def _gif(file: "IO[bytes]", size_bytes: int) -> str | None:
    file.seek(0)
    position, length = 13 + _color_table_bytes(file.read(13)[10:11]), 0
    while position < size_bytes:
        file.seek(position)
        head = file.read(10)
        if head[:1] == b";":  # trailer
            return ""
        if head[:1] not in (b"!", b","):  # an extension, an image
            return None
        position += 2 if head[:1] == b"!" else 11 + _color_table_bytes(head[9:10])
        length = 1
        while length and position < size_bytes:  # an empty sub-block ends the block
            file.seek(position)
            length = file.read(1)[0]
            position += 1 + length
    is_cut = length > 0 or position > size_bytes
    return _cut("a block", max(position, size_bytes + 1), size_bytes) if is_cut else None


def _color_table_bytes(flags: bytes) -> int:
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _cut(part: str, end: int, size_bytes: int) -> str:
    return f"truncated: {part} ends at byte {end}, but the file has {size_bytes} bytes"


_CHECKS = {"matroska": _matroska, "asf": _asf, "avi": _avi, "ogg": _ogg, "mp4": _mp4, "flv": _flv, "gif": _gif}
