"""Detect truncated files, in which the structure of the container extends beyond the end of the file.

A check reads only the headers of elements, and skips their content. For hours of video, it reads a few kilobytes.
"""

import io
from typing import IO

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
_OGG_PAGE = b"OggS\0"  # start of a page: capture pattern and version
_OGG_MAX_PAGE_BYTES = 27 + 255 + 255 * 255
_FLV_TAGS = frozenset({8, 9, 18})  # audio, video, script data
_GIF_CONTROL = b"!\xf9"  # start of an extension that belongs to the image after it
_INDEX_BOXES = frozenset({b"moof", b"moov", b"meta"})  # meta is the index of an image file
_MEDIA_BOXES = frozenset({b"mdat", b"moof", b"moov"})


def find_truncation(file: "IO[bytes]", *, size_bytes: int, format_name: str) -> str | None:
    """Describe the missing end of a truncated file; return "" if the file is complete, or None if this is unknown.

    MPEG-TS, MPEG-PS and raw streams do not contain sizes. Live recordings, Ogg and FLV contain the size of each part,
    but not the number of parts, so the result is None if such a file ends between two parts.

    Args:
        size_bytes: Size of the file.
        format_name: Name of the demuxer in libav.

    Raises:
        OSError: The file cannot be read.
    """
    for name, check in _CHECKS.items():
        if name in format_name:
            return check(file, size_bytes)
    return None


def require_complete(content: bytes, *, format_name: str) -> None:
    """Raise a ValueError if a file in memory is truncated, or if its container does not show whether it is complete.

    libav would decode a truncated file as if it were a complete, shorter video.

    Args:
        format_name: Name of the demuxer in libav.
    """
    problem = find_truncation(io.BytesIO(content), size_bytes=len(content), format_name=format_name)
    if problem is None:
        name = format_name.partition(",")[0]
        problem = f"this {name} file does not contain its size, so it may be truncated: convert it to mp4 or mkv"
    if problem:
        raise ValueError(problem)


def find_missing_index(file: "IO[bytes]", *, size_bytes: int) -> str | None:
    """Describe the truncation of an MP4 file that ends before its index; return None for other files.

    libav cannot open such a file.

    Args:
        size_bytes: Size of the file.

    Raises:
        OSError: The file cannot be read.
    """
    position = 0
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(16)
        if head[4:8] in _INDEX_BOXES or (position == 0 and head[4:8] != b"ftyp"):
            return None
        if (length := _box_bytes(head)) == 0:  # the box extends to the end of the file
            break
        if length < 8:
            return None
        position += length
    return "truncated: its index (box moov) is missing" if position else None


def _check_matroska(file: "IO[bytes]", size_bytes: int) -> str | None:
    position = 0
    while position < size_bytes:
        file.seek(position)
        head = file.read(12)
        header = ebml_header(head)
        if header is None:
            is_truncated = len(head) < 12 and any(head)
            return _describe_truncation("an element header", size_bytes + 1, size_bytes) if is_truncated else None
        element, header_bytes, length = header
        position += header_bytes
        if length is None:  # live stream: continue with the elements inside, as if they followed this element
            if element not in (_SEGMENT, _CLUSTER):
                return None
            continue
        position += length
        if position > size_bytes:
            structure = {_SEGMENT: "the segment", _CLUSTER: "a cluster"}.get(element, "an element")
            return _describe_truncation(structure, position, size_bytes)
        if element == _SEGMENT:
            return ""
    return None


def ebml_header(head: bytes) -> tuple[int, int, int | None] | None:
    """Parse the header of the EBML element at the start of `head` (RFC 8794, sections 4 to 6).

    Returns:
        ID, size of the header, and size of the content (None if unknown) in bytes; None if `head` is too short, or does
        not begin with an element.
    """
    id_bytes = 9 - head[0].bit_length() if head else 9
    if id_bytes > 4 or len(head) <= id_bytes:
        return None
    length_bytes = 9 - head[id_bytes].bit_length()
    if length_bytes > 8 or len(head) < id_bytes + length_bytes:
        return None
    unknown_length = (1 << 7 * length_bytes) - 1
    length = int.from_bytes(head[id_bytes : id_bytes + length_bytes], "big") & unknown_length
    element = int.from_bytes(head[:id_bytes], "big")
    return element, id_bytes + length_bytes, None if length == unknown_length else length


def _check_asf(file: "IO[bytes]", size_bytes: int) -> str | None:
    position = 0
    while position + 24 <= size_bytes:
        file.seek(position)
        head = file.read(24)
        length = int.from_bytes(head[16:], "little")
        if head[:16] == _ASF_DATA:
            # A live stream has the size 0, or 50 bytes, which is the size of the header.
            if position + length > size_bytes:
                return _describe_truncation("the data object", position + length, size_bytes)
            return "" if length > 50 else None
        if length < 24:
            return None
        position += length
    return None


def _check_avi(file: "IO[bytes]", size_bytes: int) -> str | None:
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
                return _describe_truncation("the frame list", position + 8 + length, size_bytes)
            is_listed = True
        position += 8 + length + length % 2
    return "" if is_listed else None


def _check_ogg(file: "IO[bytes]", size_bytes: int) -> str | None:
    start = max(0, size_bytes - _OGG_MAX_PAGE_BYTES)
    file.seek(start)
    tail = file.read()
    page = tail.rfind(_OGG_PAGE)
    if page < 0:
        return None
    num_segments = tail[page + 26] if page + 26 < len(tail) else 255
    segments = tail[page + 27 : page + 27 + num_segments]
    end = page + 27 + num_segments + sum(segments)
    if end < len(tail) < end + len(_OGG_PAGE) and _OGG_PAGE.startswith(tail[end:]):  # the start of another page
        end += len(_OGG_PAGE)
    if len(segments) < num_segments or end > len(tail):
        return _describe_truncation("the last page", start + max(end, len(tail) + 1), size_bytes)
    return None


def _check_mp4(file: "IO[bytes]", size_bytes: int) -> str | None:
    position, has_media, has_end, last_fragment, fragments_end = 0, False, False, 0, 0
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(16)
        length, kind = _box_bytes(head), head[4:8]
        if length < 8:  # 0 means that the box extends to the end of the file
            if kind in _MEDIA_BOXES:
                return None
            break  # padding
        if position + length > size_bytes and kind in _MEDIA_BOXES:
            return _describe_truncation(f"box {kind.decode()}", position + length, size_bytes)
        has_media |= kind == b"mdat"
        has_end |= kind == b"mfra"  # index at the end of a fragmented file
        if kind == b"sidx" and not last_fragment:  # this index precedes the first fragment; it lists one or all of them
            file.seek(position)
            fragments_end = position + length + _indexed_bytes(file.read(min(length, size_bytes)))
        elif kind == b"moof":
            last_fragment = position
        position += length
    if last_fragment and not has_end:
        if kind == b"moof":  # a fragment without its data
            return _describe_truncation("the last fragment", position + 8, size_bytes)
        if fragments_end > size_bytes:
            return _describe_truncation("the last fragment", fragments_end, size_bytes)
        return "" if fragments_end > last_fragment else None
    return "" if has_media else None


def _indexed_bytes(box: bytes) -> int:
    """Return the total size of the fragments that a sidx box lists (ISO/IEC 14496-12); 0 if it lists only one."""
    start = 32 if box[8:9] == b"\1" else 24  # depends on the size of the first time and offset: 4 or 8 bytes each
    num_fragments = int.from_bytes(box[start + 6 : start + 8], "big")
    sizes = [int.from_bytes(box[i : i + 4], "big") & 0x7FFFFFFF for i in range(start + 8, len(box) - 3, 12)]
    return sum(sizes[:num_fragments]) if num_fragments > 1 else 0


def _box_bytes(head: bytes) -> int:
    """Return the size of an MP4 box from its first 16 bytes; 0 if the box extends to the end of the file."""
    length = int.from_bytes(head[:4], "big")
    return int.from_bytes(head[8:], "big") if length == 1 and len(head) == 16 else length


def _check_flv(file: "IO[bytes]", size_bytes: int) -> str | None:
    # Every tag is followed by its size, so the last four bytes of a complete file are the size of the last tag.
    file.seek(size_bytes - 4)
    tag_bytes = int.from_bytes(file.read(4), "big")
    start = size_bytes - 4 - tag_bytes
    if start >= 9 and tag_bytes >= 11:
        file.seek(start)
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
            return _describe_truncation("the last tag", max(end, size_bytes + 1), size_bytes)
        position = end + 4
    return None


def _check_gif(file: "IO[bytes]", size_bytes: int) -> str | None:
    file.seek(0)
    position, length, is_control = 13 + _color_table_bytes(file.read(13)[10:11]), 0, False
    while position < size_bytes:
        file.seek(position)
        head = file.read(10)
        if head[:1] == b";":  # trailer
            return ""
        if head[:1] not in (b"!", b","):  # neither an extension nor an image
            return None
        is_control = head[:2] == _GIF_CONTROL
        position += 2 if head[:1] == b"!" else 11 + _color_table_bytes(head[9:10])
        length = 1
        while length and position < size_bytes:  # an empty sub-block ends the block
            file.seek(position)
            length = file.read(1)[0]
            position += 1 + length
    is_truncated = length > 0 or position > size_bytes or is_control
    return _describe_truncation("a block", max(position, size_bytes + 1), size_bytes) if is_truncated else None


def _color_table_bytes(flags: bytes) -> int:
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _describe_truncation(structure: str, end: int, size_bytes: int) -> str:
    return f"truncated: {structure} ends at byte {end}, but the file has {size_bytes} bytes"


# Name of the demuxer in libav -> check with the signature (file, size in bytes), and the result of `find_truncation`.
_CHECKS = {
    "matroska": _check_matroska,
    "asf": _check_asf,
    "avi": _check_avi,
    "ogg": _check_ogg,
    "mp4": _check_mp4,
    "flv": _check_flv,
    "gif": _check_gif,
}
