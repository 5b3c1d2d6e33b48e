"""Make the chunks of one span for `prep index`: find the source packets that each chunk requires, and the frame times.

A span consists of consecutive chunks of a video. A chunk contains all packets from the key frame on which its first
frame depends to the last packet that its last frame requires. Therefore a packet near a chunk boundary may belong to
two chunks.
"""

import json
import zlib
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.formatting import duration_text
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import as_failure
from clipmill.prep.video.codecs import is_idr, is_reference, slice_reader
from clipmill.prep.video.encode import PacketFacts, SpanPlan
from clipmill.prep.video.settings import ChunkSettings
from clipmill.shards.columns import SOURCE_MEMBER
from clipmill.shards.decoding import PacketDecoder
from clipmill.shards.format import PACKET_KEY, PACKET_RECOVERY, PACKET_REFERENCE
from clipmill.shards.timeline.model import Timeline, find_track, open_container
from clipmill.shards.timeline.reading import read_timeline

if TYPE_CHECKING:
    from av.packet import Packet

    from clipmill.shards.verify import SalvagedSample

_CONTAINERS = ("mp4", "matroska")  # parts of the names of libav's demuxers
_CODECS = ("h264", "hevc", "vp9", "av1")
_SEARCHED_BYTES = 4096  # number of bytes to search for a packet's content; more than the headers of a Matroska block
_MAX_LEAD_S = 120  # maximum time between the key frame that a chunk requires and the start of the chunk
_MAX_CHUNK_BYTES = 2**32 - 1  # packet offsets have 32 bits
_MAX_COMPARED = 32  # maximum number of packets to compare after a key frame
_NEVER_SHOWN = np.iinfo(np.int64).max  # time of a frame that is never displayed


@dataclass(frozen=True)
class IndexedFacts(PacketFacts):
    """Properties of an indexed chunk, named like the fields of the index."""

    num_frames: int
    source_offset: int
    source_bytes: int
    time_rate: int
    frame_time: list[int]
    timeline: str


@dataclass(frozen=True)
class SourceChunk:
    """A chunk whose packets are in the source file.

    Attributes:
        facts: Properties of the chunk, read by demuxing the source.
        num_source_frames: Number of distinct source frames that the chunk shows.
        source: Content of the tar member SOURCE_MEMBER.
    """

    facts: IndexedFacts
    num_source_frames: int
    source: bytes

    @property
    def content(self) -> tuple[str, bytes]:
        """Extension and content of the tar member that identifies the source of the frames."""
        return SOURCE_MEMBER, self.source

    @classmethod
    def from_sample(cls, sample: "SalvagedSample", *, num_source_frames: int) -> "SourceChunk | None":
        """Return the chunk of a stored sample; None if its index row, which lists the packets, is lost."""
        if sample.fields is None:
            return None
        facts = IndexedFacts(**{field.name: sample.fields[field.name] for field in fields(IndexedFacts)})
        return cls(facts, num_source_frames, sample.members[SOURCE_MEMBER])


@dataclass(frozen=True)
class _Source:
    """All packets of the video track of a source, in decoding order.

    Attributes:
        offset: Byte offset of each packet in the file.
        time: Start of the frame of each packet, in units of 1 / `rate` seconds from time 0.
        order: Presentation index of each packet.
        gop: Index of the key packet from which decoding of each packet's frame starts; -1 if there is none.
        is_usable: True for packets whose frame is displayed and can be decoded.
    """

    codec: str
    extradata: bytes
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    flags: NDArray[np.uint8]
    time: NDArray[np.int64]
    order: NDArray[np.int64]
    gop: NDArray[np.int64]
    is_usable: NDArray[np.bool_]
    rate: int

    @cached_property
    def display_order(self) -> NDArray[np.int64]:
        """Indices of the usable packets in presentation order."""
        usable_packets = np.flatnonzero(self.is_usable)
        return usable_packets[np.argsort(self.order[usable_packets])]

    @cached_property
    def times(self) -> NDArray[np.int64]:
        """Start of the frame of each packet in `display_order`, in units of 1 / `rate` seconds."""
        return self.time[self.display_order]


def index_span(path: Path, plan: SpanPlan, *, settings: ChunkSettings) -> list[SourceChunk]:
    """Return the chunks of one span of a video in a local file.

    Raises:
        SourceFailure: not_indexable, with the reason; decode_errors or source_truncated if a packet cannot be read.
    """
    source = _read_source(path, plan.source.fingerprint, plan.source.timeline)
    fps = settings.fps_exact
    _check_recovery(path, source)
    chunks = [
        _index_chunk(source, plan, begin_s=first / fps, end_s=(first + length) / fps, num_frames=length)
        for first, length in zip(plan.span.chunk_starts(), plan.span.chunk_frames, strict=True)
    ]
    # Some streams store parameters only at their start, so check that the first packet of a chunk can be decoded by
    # itself.
    facts = chunks[len(chunks) // 2].facts
    with path.open("rb") as file:
        file.seek(facts.source_offset + facts.packet_offset[0])
        content = file.read(facts.packet_size[0])
    try:
        packets = [(0, content)]
        pictures = [*PacketDecoder().decode(codec=source.codec, extradata=source.extradata, packets=packets)]
    except (av.error.FFmpegError, ValueError) as error:
        raise SourceFailure(FailureCode.NOT_INDEXABLE, f"a key frame cannot be decoded by itself: {error}") from None
    if not pictures:
        raise SourceFailure(FailureCode.NOT_INDEXABLE, "a key frame cannot be decoded by itself")
    return chunks


@lru_cache(maxsize=1)  # a worker makes all spans of a video one after another
def _read_source(path: Path, _fingerprint: str, timeline_json: str) -> _Source:
    """Read all packets of a source once, and find the offset of each packet in the file."""
    probed_timeline = Timeline.from_json(timeline_json)
    if len(probed_timeline.aspects) > 1:
        raise SourceFailure(FailureCode.NOT_INDEXABLE, "the pixel aspect ratio changes within the video")
    rows: list[tuple[int, int, int, int]] = []
    with (
        as_failure(FailureCode.DECODE_ERRORS, "its packets cannot be read"),
        open_container(f"file:{path}") as container,
        path.open("rb") as file,
    ):
        name = container.format.name
        track = find_track(container, probed_timeline.track)
        codec = track.codec_context.codec.canonical_name if track.codec_context else "unknown"
        if not any(part in name for part in _CONTAINERS) or codec not in _CODECS:
            raise SourceFailure(
                FailureCode.NOT_INDEXABLE,
                f"{codec} in {name} is not supported; use {', '.join(_CODECS)} in MP4, MOV, MKV or WebM",
            )
        extradata = bytes(track.codec_context.extradata or b"")
        first_slice = slice_reader(codec, extradata)

        def add(packet: "Packet[Any]") -> None:
            if packet.stream_index == probed_timeline.track:
                content = bytes(packet)
                header = first_slice(content)
                flags = packet.is_keyframe * PACKET_KEY | is_reference(codec, header) * PACKET_REFERENCE
                if packet.is_keyframe and not is_idr(codec, header):
                    flags |= PACKET_RECOVERY
                offset = packet.pos if packet.pos is not None else -1
                rows.append((_find_offset(file, offset, content), len(content), zlib.crc32(content), flags))

        timeline, packets = read_timeline(container, file=file, on_packet=add)
        if timeline.truncation:
            raise SourceFailure(FailureCode.SOURCE_TRUNCATED, timeline.truncation)
        if timeline.track != probed_timeline.track:
            raise SourceFailure(FailureCode.NOT_INDEXABLE, "the first of several video tracks contains only one frame")
        unit, start = track.time_base or Fraction(1), timeline.start
        if changes := [note for note in timeline.notes if note.startswith("the picture changes")]:
            raise SourceFailure(FailureCode.NOT_INDEXABLE, changes[0])
    offset, size, crc32, flags = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    if (offset < 0).any():
        first_index = int(np.argmax(offset < 0))
        raise SourceFailure(
            FailureCode.NOT_INDEXABLE,
            f"packet {first_index} is not stored in the form that the decoder requires",
        )
    rate = lcm(unit.denominator, start.denominator)
    time = packets.times * (unit.numerator * (rate // unit.denominator)) - start.numerator * (rate // start.denominator)
    order = np.empty(len(time), np.int64)
    order[np.lexsort((packets.is_shown, time))] = np.arange(len(time))
    gop = _find_key_packets(order, flags)
    return _Source(
        codec=codec,
        extradata=extradata,
        offset=offset,
        size=size,
        crc32=crc32.astype(np.uint32),
        flags=flags.astype(np.uint8),
        time=time,
        order=order,
        gop=gop,
        is_usable=packets.is_shown & (gop >= 0),
        rate=rate,
    )


def _find_offset(file: Any, position: int, content: bytes) -> int:
    """Return the byte offset of a packet's content in a file, at or shortly after `position`; -1 if it is not found."""
    if position < 0:
        return -1
    file.seek(position)
    if (start := file.read(len(content))) == content:
        return position
    distance = (start + file.read(_SEARCHED_BYTES)).find(content)
    return position + distance if distance >= 0 else -1


def _find_key_packets(order: NDArray[np.int64], flags: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the key packet from which decoding of each packet's frame starts; -1 if there is none.

    A frame that follows a key frame in decoding order, but is displayed before it, may depend on the previous key
    frame.
    """
    keys = np.flatnonzero(flags & PACKET_KEY)
    gop = np.searchsorted(keys, np.arange(len(order)), side="right") - 1
    is_leading = (gop >= 0) & (order < order[keys[np.maximum(gop, 0)]])
    gop -= is_leading
    return np.where(gop >= 0, keys[np.maximum(gop, 0)], -1)


def _index_chunk(
    source: _Source, plan: SpanPlan, *, begin_s: Fraction, end_s: Fraction, num_frames: int
) -> SourceChunk:
    """Return the chunk that shows [begin_s, end_s) of the video."""
    begin, end = (moment * source.rate for moment in (begin_s, end_s))
    first = max(0, int(np.searchsorted(source.times, int(begin), side="right")) - 1)
    stop = max(first + 1, int(np.searchsorted(source.times, -(-end.numerator // end.denominator), side="left")))
    frame_packets = source.display_order[first:stop]
    first_packet, last_packet = int(source.gop[frame_packets].min()), int(frame_packets.max())
    lead_s = float((source.time[frame_packets[0]] - source.time[first_packet]) / source.rate)
    if lead_s > _MAX_LEAD_S:
        where = f"at {float(begin_s):.1f} s"
        raise SourceFailure(
            FailureCode.NOT_INDEXABLE, f"no key frame in the {duration_text(lead_s)} before a chunk {where}"
        )
    packets = np.arange(first_packet, last_packet + 1)
    # Omit the leading frames of the first key frame, because they depend on packets outside the chunk.
    packets = packets[(packets == first_packet) | (source.order[packets] > source.order[first_packet])]
    offset = int(source.offset[packets].min())
    if int((source.offset[packets] + source.size[packets]).max()) - offset > _MAX_CHUNK_BYTES:
        where = f"at {float(begin_s):.1f} s"
        raise SourceFailure(FailureCode.NOT_INDEXABLE, f"the packets of a chunk {where} extend over 4 GB or more")
    order = np.argsort(source.order[packets])
    sorted_packets, frame = packets[order], np.empty(len(packets), np.int64)
    frame[order] = np.arange(len(packets))
    frame_time = np.where(source.is_usable[sorted_packets], source.time[sorted_packets], _NEVER_SHOWN)
    frame_time = np.minimum.accumulate(frame_time[::-1])[::-1]
    # Store only the crop, orientation and pixel aspect of the timeline, because the index contains the frame times.
    probed_timeline = Timeline.from_json(plan.source.timeline)
    shape = Timeline(shape=probed_timeline.shape, aspects=probed_timeline.aspects).to_json()
    facts = IndexedFacts(
        num_frames=num_frames,
        codec=source.codec,
        width=plan.source.width,
        height=plan.source.height,
        extradata=source.extradata,
        packet_offset=(source.offset[packets] - offset).tolist(),
        packet_size=source.size[packets].tolist(),
        packet_frame=frame.tolist(),
        packet_flags=source.flags[packets].tolist(),
        packet_crc32=source.crc32[packets].tolist(),
        source_offset=offset,
        source_bytes=plan.source.size_bytes,
        time_rate=source.rate,
        frame_time=frame_time.tolist(),
        timeline=shape,
    )
    content = {
        "source_fingerprint": plan.source.fingerprint,
        "source_bytes": plan.source.size_bytes,
        "packets_crc32": zlib.crc32(source.crc32[packets].tobytes()),
    }
    return SourceChunk(facts, len(frame_packets), json.dumps(content, separators=(",", ":")).encode())


def _check_recovery(path: Path, source: _Source) -> None:
    """Check that the second GOP of an H.264 stream does not depend on the first GOP.

    No check is needed if the second GOP starts with an IDR frame. H.264 does not guarantee that frames after any other
    key frame are independent of the frames before it. Therefore the second GOP is decoded twice: after the first GOP,
    and by itself.

    Raises:
        SourceFailure: not_indexable, if the decoded frames differ.
    """
    keys = np.flatnonzero(source.flags & PACKET_KEY)
    if source.codec != "h264" or len(keys) < 2 or not source.flags[keys[1]] & PACKET_RECOVERY:
        return
    end = keys[2] if len(keys) > 2 else len(source.flags)
    packets = []
    with path.open("rb") as file:
        for row in range(min(end, keys[1] + _MAX_COMPARED)):
            file.seek(source.offset[row])
            packets.append((int(source.order[row]), file.read(source.size[row])))
    key_frame, second_gop = source.order[keys[1]], packets[keys[1] :]
    pictures = []
    for run in (packets, [packet for packet in second_gop if packet[0] >= key_frame]):
        decoded = PacketDecoder().decode(codec=source.codec, extradata=source.extradata, packets=run, is_strict=False)
        pictures.append(
            {number: zlib.crc32(frame.to_ndarray().tobytes()) for number, frame in decoded if number >= key_frame}
        )
    if pictures[0] != pictures[1]:
        raise SourceFailure(FailureCode.NOT_INDEXABLE, "frames depend on frames before their key frame")
