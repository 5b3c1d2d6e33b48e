"""Samples of a tar, as webdataset groups them (consecutive members with one key), and the clips that they show.

A sample is held in memory whole; its size is limited, and a sample that exceeds a limit is reported and skipped.

Samples of `prep chunk`: the json has the chunk's span in its video and its captions. Each caption is a clip: the part
of its span that lies in the chunk, since a stream cannot access the neighbouring chunk. Samples of video2dataset: the
whole video is one clip, whose caption is the txt member, or `caption` in the json.
"""

import bz2
import gzip
import io
import json
import lzma
import math
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from clipmill.shards.damage import DamagedTar
from clipmill.shards.format import BLOCK_BYTES
from clipmill.shards.index import padded_size
from clipmill.shards.opening import open_regular
from clipmill.train.data.decoders import PlainVideo
from clipmill.train.data.frame_sampling import US_PER_S, Sampling, moments_of, to_us, view_offsets
from clipmill.train.data.outcomes import SampleFailed

MAX_HEADER_BYTES = 1 << 20  # of an extended header: long names, and what PAX records of a file
MAX_NAME_BYTES = 4096
# Of a compressed tar: videos hardly compress, captions a few times, a decompression bomb a thousand times.
MAX_EXPANSION = 64
_FREE_BYTES = 64 << 20  # that a small tar may expand to in any case
_XZ_MEMORY_BYTES = 256 << 20  # four times what `xz -9` needs
_PIECE_BYTES = 1 << 20
_PAX = (b"x", b"X")
_WITHOUT_PAYLOAD = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
# Offsets of the flag that another header follows, in the first and in further headers of a sparse member.
_SPARSE_FIRST, _SPARSE_FURTHER = 482, 504


@dataclass(frozen=True)
class Member:
    """A file of a tar.

    Attributes:
        size_bytes: as its header says.
        offset: of its first byte in the tar; None in a compressed one.
        content: None if it is not needed or cannot be read.
        problem: why it cannot be read, as the end of a sentence that begins with its name.
    """

    name: str
    size_bytes: int
    offset: int | None = None
    content: bytes | None = None
    problem: str | None = None


def members_of(path: Path, *, limit_of: Callable[[str], int]) -> Iterator[Member]:
    """Yield the files of a tar in its order; links, folders and devices are skipped.

    Args:
        limit_of: maximum size in bytes of a member of this name; 0 if it is not needed.

    Raises:
        DamagedTar: the tar ends early, continues with something that is not a member, or expands too far. What came
            before is intact.
        OSError: it cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        source = _Source(path, file)
        try:
            yield from _members(source, limit_of)
        except (EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise source.broken(str(error)) from error


@dataclass
class _Extended:
    """Facts about a member from the headers before its own."""

    name: bytes | None = None
    size_bytes: int | None = None
    is_sparse: bool = False


class _Source:
    """The bytes of a tar, decompressed if necessary."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._packed_bytes = os.fstat(file.fileno()).st_size
        self._stream, self._is_packed = _unpack(file)
        self.position = 0

    @property
    def offset(self) -> int | None:
        """Offset of the next byte in the file; None if it is compressed."""
        return None if self._is_packed else self.position

    def block(self) -> bytes:
        """Return the next block; fewer bytes at the end."""
        block = self._stream.read(BLOCK_BYTES)
        self._advance(len(block))
        return block

    def read(self, size_bytes: int) -> bytes:
        """Return the payload of a member or header, whose size is within a limit; skips its padding."""
        self._require_there(size_bytes)
        if not self._is_packed:
            content = self._stream.read(size_bytes)
            self._advance(len(content))
        else:
            pieces = io.BytesIO()  # grows with the data, not with what a header claims
            while (missing := size_bytes - pieces.tell()) and (piece := self._stream.read(min(missing, _PIECE_BYTES))):
                self._advance(len(piece))
                pieces.write(piece)
            content = pieces.getvalue()
        if len(content) < size_bytes:
            raise self.broken("it was cut short")
        self.skip(padded_size(size_bytes) - size_bytes)
        return content

    def skip(self, size_bytes: int) -> None:
        """Skip bytes."""
        self._require_there(size_bytes)
        if not self._is_packed:
            self._stream.seek(size_bytes, os.SEEK_CUR)
            self._advance(size_bytes)
            return
        while size_bytes:
            piece = self._stream.read(min(size_bytes, _PIECE_BYTES))
            if not piece:
                raise self.broken("it was cut short")
            self._advance(len(piece))
            size_bytes -= len(piece)

    def skip_sparse_headers(self, block: bytes) -> None:
        """Skip the headers that follow `block`, the first header of a sparse member."""
        another = block[_SPARSE_FIRST]
        while another:
            block = self.read(BLOCK_BYTES)
            another = block[_SPARSE_FURTHER]

    def broken(self, why: str) -> DamagedTar:
        """Return the error at which reading ends."""
        return DamagedTar(self._path, f"the tar cannot be read from here on (byte {self.position:,}): {why}")

    def _require_there(self, size_bytes: int) -> None:
        if not self._is_packed and self.position + size_bytes > self._packed_bytes:
            raise self.broken("it was cut short")

    def _advance(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self._is_packed and self.position > self._packed_bytes * MAX_EXPANSION + _FREE_BYTES:
            raise self.broken(f"it expands to more than {MAX_EXPANSION} times its size")


def _members(source: _Source, limit_of: Callable[[str], int]) -> Iterator[Member]:
    extended = _Extended()
    while (block := source.block()) != bytes(BLOCK_BYTES):
        if len(block) < BLOCK_BYTES:
            raise source.broken("it was cut short" if source.position else "it is empty")
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise source.broken("what follows is not a tar member") from error
        if info.size < 0:
            raise source.broken("a member has a negative size")
        if info.type in (tarfile.GNUTYPE_LONGNAME, *_PAX):
            if info.size > MAX_HEADER_BYTES:
                raise source.broken(f"a header claims {info.size:,} bytes, more than {MAX_HEADER_BYTES:,}")
            _extend(extended, source.read(info.size), is_pax=info.type in _PAX)
            continue
        if info.type in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            source.skip(padded_size(info.size))
            continue
        if info.type not in _WITHOUT_PAYLOAD:
            yield from _member(source, info, extended, block=block, limit_of=limit_of)
        extended = _Extended()


def _member(
    source: _Source, info: tarfile.TarInfo, extended: _Extended, *, block: bytes, limit_of: Callable[[str], int]
) -> Iterator[Member]:
    size_bytes = info.size if extended.size_bytes is None else extended.size_bytes
    name = _printable_name(info.name if extended.name is None else extended.name.decode("utf-8", "surrogateescape"))
    limit_bytes, problem = 0, None
    if info.type == tarfile.GNUTYPE_SPARSE:
        source.skip_sparse_headers(block)
    if extended.is_sparse or info.type == tarfile.GNUTYPE_SPARSE:
        problem = "is a sparse file, which is not read"
    elif len(name) > MAX_NAME_BYTES:
        name, problem = f"{name[:100]}...", f"has a name of {len(name):,} characters"
    elif info.type in _REGULAR:
        limit_bytes = limit_of(name)
        if limit_bytes and size_bytes > limit_bytes:
            problem = f"has {size_bytes:,} bytes, more than the {limit_bytes:,} that are read"
    offset = source.offset
    if limit_bytes and problem is None:
        yield Member(name, size_bytes, offset, content=source.read(size_bytes))
        return
    source.skip(padded_size(size_bytes))
    if info.type in _REGULAR or problem is not None:
        yield Member(name, size_bytes, offset, problem=problem)


def _extend(extended: _Extended, payload: bytes, *, is_pax: bool) -> None:
    """Read the name, the size and sparseness from the payload of an extended header; ValueError if it is damaged."""
    if not is_pax:
        extended.name = payload.partition(b"\0")[0]
        return
    begin = 0
    while begin < len(payload) and payload[begin]:
        space = payload.find(b" ", begin, begin + 20)
        length = int(payload[begin:space]) if space > 0 else 0
        if space < 0 or length <= space - begin or begin + length > len(payload):
            raise ValueError("a PAX header is damaged")
        keyword, _, value = payload[space + 1 : begin + length - 1].partition(b"=")
        if keyword == b"path":
            extended.name = value
        elif keyword == b"size":
            extended.size_bytes = int(value[:20])
            if extended.size_bytes < 0:
                raise ValueError("a member has a negative size")
        elif keyword.startswith(b"GNU.sparse."):
            extended.is_sparse = True
        begin += length


def _printable_name(name: str) -> str:
    """Return a name without control sequences and unprintable characters."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _unpack(file: BinaryIO) -> tuple[BinaryIO, bool]:
    """Return the file or its decompressed content, and whether it is compressed."""
    magic = file.read(6)
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file), True  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file), True  # type: ignore[return-value]
    if magic == b"\xfd7zXZ\0":
        return io.BufferedReader(_Xz(file)), True
    return file, False


class _Xz(io.RawIOBase):
    """The content of an xz file; unlike `lzma.LZMAFile` it limits the dictionary that a header can request."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        while True:
            packed = self._file.read(_PIECE_BYTES) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not packed:
                raise EOFError("the compressed data ends early")
            piece = self._decompressor.decompress(packed, len(buffer))
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)
            if self._decompressor.eof:
                return 0


MAX_SAMPLE_BYTES = 1 << 30
MAX_TEXT_BYTES = 8 << 20  # of a json or txt, which takes twenty times as much once it is parsed
NO_CAPTION_ID = -1

VIDEO_EXTENSIONS = ("mp4", "webm", "mkv", "mov", "avi")
_LIMITS = dict.fromkeys(VIDEO_EXTENSIONS, MAX_SAMPLE_BYTES) | dict.fromkeys(("json", "txt"), MAX_TEXT_BYTES)
_MAX_MEMBERS = 1000  # of a sample
_MAX_SHOWN = 20
_FAILED_STATUS = "failed_to_"  # video2dataset: failed_to_download, failed_to_subsample


@dataclass(frozen=True)
class Unreadable:
    """Substitute for a sample, or for the rest of a tar, that cannot be read."""

    key: str
    detail: str


@dataclass(frozen=True)
class WithoutVideo:
    """Substitute for a sample whose video video2dataset could not download: the tar is not damaged."""

    key: str


@dataclass
class TarSample:
    """A sample, as far as it has been read.

    Attributes:
        members: by extension in lower case; empty if they are not needed.
        places: offset in the tar (None if it is compressed) and size in bytes of each member.
        problem: why it must be skipped.
    """

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class StreamedClip:
    """A clip that has not been decoded yet.

    Attributes:
        key: of the sample in its tar.
        content: the video file.
        caption_id: from the manifest; NO_CAPTION_ID in tars of other tools.
        text: the caption.
        begin_us, end_us: the clip's span, relative to the first frame of the file; None for the end of the file. It is
            empty if the caption's is.
        is_shortened: True if the caption extends beyond the file.
    """

    key: str
    content: bytes
    caption_id: int
    text: str
    begin_us: int
    end_us: int | None
    is_shortened: bool = False


def samples_of(tar: str, path: Path, *, limits: Mapping[str, int] = _LIMITS) -> Iterator[TarSample | Unreadable]:
    """Yield the samples of the tar at `path`, in its order, and what cannot be read of it.

    Args:
        tar: its name for messages.
        limits: maximum size of the members that are read, by extension.

    Raises:
        OSError: the tar cannot be opened or read.
    """
    sample: TarSample | None = None
    begun: str | None = None  # key of the member that is being read

    def limit_of(name: str) -> int:
        nonlocal begun
        parts = _key_and_extension(name)
        begun = None if parts is None else parts[0]
        if parts is None:
            return 0
        key, extension = parts
        is_same = sample is not None and sample.key == key
        if sample is not None and is_same and (sample.problem or extension in sample.members):
            return 0  # it is skipped: nothing more is kept of it
        held_bytes = sum(map(len, sample.members.values())) if sample is not None and is_same else 0
        # At least one byte: 0 would say that it is not needed.
        return min(limits.get(extension, 0), max(MAX_SAMPLE_BYTES - held_bytes, 1))

    try:
        for member in members_of(path, limit_of=limit_of):
            parts, begun = _key_and_extension(member.name), None
            if parts is None and member.problem is None:
                continue
            key, extension = parts or (member.name, "")
            if sample is None or key != sample.key:
                if sample is not None:
                    yield _finish_sample(sample)
                sample = TarSample(key)
            _add(sample, extension, member)
    except DamagedTar as error:
        # A sample is complete only if the next one has begun.
        if sample is not None and begun not in (None, sample.key):
            yield _finish_sample(sample)
        yield Unreadable(tar, error.why)
        return
    if sample is not None:
        yield _finish_sample(sample)


def _add(sample: TarSample, extension: str, member: Member) -> None:
    problem = member.problem
    if extension in sample.members:
        problem = "is there twice"
    elif len(sample.members) >= _MAX_MEMBERS:
        problem = f"is one of more than {_MAX_MEMBERS:,} members of its sample"
    if problem is not None and sample.problem is None:
        sample.problem = f"{member.name} {problem}"
        sample.members.clear()
    if sample.problem is None:
        sample.members[extension] = member.content or b""
        sample.places[extension] = member.offset, member.size_bytes


def _finish_sample(sample: TarSample) -> TarSample | Unreadable:
    return sample if sample.problem is None else Unreadable(sample.key, sample.problem)


def _key_and_extension(name: str) -> tuple[str, str] | None:
    """Return key and extension in a member's name; None for a member that belongs to no sample.

    Those are names without an extension, hidden files, and webdataset's own files (`__name__`).
    """
    folder, slash, file_name = name.rpartition("/")
    stem, dot, extension = file_name.partition(".")
    first = name.partition("/")[0]
    if not stem or not dot or (len(first) > 4 and first.startswith("__") and first.endswith("__")):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def clips_of(sample: TarSample) -> Sequence[StreamedClip | WithoutVideo]:
    """Return the clips of a sample.

    Raises:
        ValueError: it has no video, no caption, or members that cannot be read.
    """
    key, members = sample.key, sample.members
    description = description_of(sample)
    content = next((members[extension] for extension in VIDEO_EXTENSIONS if extension in members), None)
    if content is None:
        if str(description.get("status")).startswith(_FAILED_STATUS):
            return [WithoutVideo(key)]
        found = ", ".join(sorted(members)[:_MAX_SHOWN]) or "nothing"
        raise ValueError(f"no video among its members: {found}")
    if "span_fingerprint" in description:
        return _clips_of_chunk(key, content, description)
    text = caption_of(sample)
    if text is None:
        raise ValueError("it has no caption: no text in a txt member, and no caption in its json")
    return [StreamedClip(key, content, NO_CAPTION_ID, text, 0, None)]


def caption_of(sample: TarSample) -> str | None:
    """Return the text of a sample's txt member, or else the caption in its json; ValueError if it cannot be read."""
    # video2dataset and img2dataset write an empty txt if there was no caption.
    try:
        text = sample.members.get("txt", b"").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its txt is not UTF-8: {error}") from error
    found = text if text.strip() else description_of(sample).get("caption")
    return found if isinstance(found, str) and found.strip() else None


def description_of(sample: TarSample) -> dict[str, Any]:
    """Return the json of a sample, {} without one; raises ValueError if it cannot be read."""
    try:
        description = json.loads(sample.members.get("json") or b"{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json cannot be read: {error}") from error
    if not isinstance(description, dict):
        raise ValueError("its json is not an object")
    return description


def _clips_of_chunk(key: str, content: bytes, description: dict[str, Any]) -> list[StreamedClip]:
    try:
        begin_us, end_us = (Fraction(*description[name]) * US_PER_S for name in ("begin_s", "end_s"))
        chunk = int(begin_us), int(end_us)
        return [_clip_of_caption(key, content, caption, chunk=chunk) for caption in description["captions"]]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"its json is not as prep writes it: {type(error).__name__}: {error}") from error


def _clip_of_caption(key: str, content: bytes, caption: dict[str, Any], *, chunk: tuple[int, int]) -> StreamedClip:
    begin_us, end_us = to_us(caption["begin_s"]), chunk[1]
    # An open end is stored as null.
    if caption["end_s"] is not None and math.isfinite(caption["end_s"]):
        end_us = to_us(caption["end_s"])
    first, last = max(begin_us, chunk[0]), min(end_us, chunk[1])
    return StreamedClip(
        key=key,
        content=content,
        caption_id=int(caption["caption_id"]),
        text=str(caption["text"]),
        begin_us=first - chunk[0],
        end_us=last - chunk[0],
        is_shortened=(first, last) != (begin_us, end_us),
    )


def frames_on_screen(
    video: PlainVideo, clip: StreamedClip, sampling: Sampling, *, rng: np.random.Generator | None, num_views: int = 1
) -> list[int]:
    """Return the numbers of the frames of `video` on screen at the clip's moments; its frame rate need not be constant.

    Moments are random with `rng`, as in training (clipmill.train.data.frame_sampling). Without it, as in evaluation,
    they are of `num_views` views, one view after another.

    Raises:
        SampleFailed: no moment of the clip lies in the file.
    """
    tick_us = video.time_base * US_PER_S
    length_us = (video.end_pts - video.pts[0]) * tick_us
    # Rounded up: a stride of whole frames would not fit into a span that is shorter than the file's frames.
    end_of_file_us = math.ceil(length_us)
    end_us = end_of_file_us if clip.end_us is None else min(clip.end_us, end_of_file_us)
    if end_us <= clip.begin_us:
        detail = f"its span from {clip.begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
        raise SampleFailed(clip.key, reason="empty_span", detail=detail)
    fps = Fraction(len(video.pts) * US_PER_S) / length_us
    rate = {"fps_num": fps.numerator, "fps_den": fps.denominator}
    ticks: list[int] = []
    for at in view_offsets(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(clip.begin_us, end_us, sampling, **rate, rng=rng, at=at)
        divisor = moments.denominator * tick_us.numerator
        ticks += [numerator * tick_us.denominator // divisor for numerator in moments.numerators]
    frames = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in frames]
