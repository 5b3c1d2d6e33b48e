"""The chunks of one span: encoded, read back and compared with the plan, or copied from an old shard.

If one chunk fails, the whole span fails. Intact chunks of an encoder pass that is part of the new plan too are kept.

A chunk is read back by demuxing the finished file: no value is taken from the arguments given to the encoder.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import split_key
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.prep.core.failures import TRANSIENT, FailureCode, SourceFailure
from clipmill.prep.sources.access import SourceFacts, as_failure, current_fingerprint
from clipmill.prep.video.codecs import codec_named
from clipmill.prep.video.encode import EncodedSpan, SpanPlan, encode_span, output_size, start_ms
from clipmill.prep.video.settings import ResolvedRecipe
from clipmill.shards.commits import Commit
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.timeline.model import CONTINUOUS_FORMAT, Timeline

if TYPE_CHECKING:
    from av.packet import Packet

    from clipmill.manifests.storage.cache import CachedFile
    from clipmill.shards.verify import SalvagedSample

_H264_SLICE_TYPES = frozenset({1, 2, 3, 4, 5})
_HEVC_LAST_SLICE_TYPE = 31
_HEVC_LAST_SUBLAYER_TYPE = 14  # even types up to this one are sub-layer non-reference pictures (H.265 table 7-1)
SPAN_COLUMN = "span_fingerprint"
_TRIES = 2  # attempts at a span with a transient failure
_NOT_AGAIN = frozenset({FailureCode.DISK_FULL, FailureCode.SOURCE_TOO_LARGE})  # transient, but not that soon


class StagedSources:
    """Sources as local files, one at a time: the last one stays in use until another one is asked for.

    Args:
        folder: where copies with other timestamps are written; needed by `continuous`.
        limit_bytes: limit of all copies on this node; None for most of the free space.
        on_wait: called again and again while a source is fetched or waited for, as a heartbeat.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        limit_bytes: int | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._limit_bytes, self._on_wait = folder, limit_bytes, on_wait
        self._continuous: tuple[tuple[str, bool], Path, SourceFacts] | None = None
        self._place = ""
        self._copy: CachedFile | None = None

    def __enter__(self) -> "StagedSources":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def path_of(self, place: str) -> Path:
        """Return the path of a local file, or of a copy of an object, which is valid until the next call.

        Raises:
            SourceFailure: source_missing, source_unreadable, source_changed, source_too_large, disk_full or io_error.
        """
        if not is_remote(place):
            self.release()
            return Path(place)
        if self._copy is None or place != self._place:
            from clipmill.prep.video.staging import copy_of

            self.release()
            self._copy = copy_of(place, limit_bytes=self._limit_bytes, on_wait=self._on_wait)
            self._place = place
        return self._copy.path

    def continuous(self, path: Path, source: SourceFacts, *, with_sound: bool) -> tuple[Path, SourceFacts]:
        """Return a file with the packets of a source and its timeline as timestamps, and the facts of that file.

        It is the source itself if its timestamps are its timeline and a pass can seek in it. Otherwise it is a copy,
        which is valid until one of another source is asked for.

        Args:
            path: local file with the content of the source.
            with_sound: whether sound is kept; it cannot be decoded after a seek that lands inside one of its frames.

        Raises:
            SourceFailure: the packets cannot be copied.
        """
        timeline = Timeline.from_json(source.timeline)
        if timeline.is_continuous and not (timeline.is_blind and with_sound and source.num_audio):
            return path, source
        key = (source.fingerprint, with_sound)
        if self._continuous is None or self._continuous[0] != key:
            from clipmill.prep.sources.remote import as_source_failure
            from clipmill.shards.timeline.copying import write_continuous

            assert self._folder is not None, "copies need a folder"
            target = self._folder / f"continuous.{CONTINUOUS_FORMAT}"
            with as_failure(FailureCode.DECODE_ERRORS, "its packets cannot be copied"), as_source_failure():
                written = write_continuous(path, target, with_sound=with_sound, on_packet=self._on_wait)
            shown = replace(written, shape=timeline.shape, transfer=timeline.transfer, primaries=timeline.primaries)
            self._continuous = (key, target, replace(source, timeline=shown.to_json()))
        return self._continuous[1:]

    def release(self, *, is_damaged: bool = False) -> None:
        """Stop using the source. A damaged copy is removed, so that it is fetched again."""
        if self._copy is not None:
            if is_damaged:
                self._copy.path.unlink(missing_ok=True)
            self._copy.close()
        self._copy = None


@dataclass(frozen=True)
class ChunkFacts:
    """Properties of a demuxed chunk. The packet lists are in decoding order.

    Attributes:
        packet_offset: byte offset of each packet in the file.
        packet_size: size of each packet in bytes.
        packet_frame: presentation index of each packet; 0 is the first frame shown.
        packet_flags: PACKET_KEY and PACKET_REFERENCE of clipmill.shards.format.
        packet_crc32: CRC-32 of each packet's bytes.
    """

    codec: str
    width: int
    height: int
    extradata: bytes
    packet_offset: list[int]
    packet_size: list[int]
    packet_frame: list[int]
    packet_flags: list[int]
    packet_crc32: list[int]

    @property
    def num_frames(self) -> int:
        return len(self.packet_frame)


@dataclass(frozen=True)
class ReadyChunk:
    """A chunk that was read back and matches its plan.

    Attributes:
        path: its file in scratch space.
        facts: its properties, from demuxing it.
        num_source_frames: number of distinct source frames that it shows.
    """

    path: Path
    facts: ChunkFacts
    num_source_frames: int


def make_span(
    plan: SpanPlan,
    *,
    sources: StagedSources,
    recipe: ResolvedRecipe,
    program: str,
    folder: Path,
    on_frames: Callable[[int], None],
) -> list[ReadyChunk]:
    """Encode a span into new folders below `folder`.

    Args:
        sources: local copies of remote sources.
        on_frames: called periodically with the number of frames encoded so far.

    Raises:
        SourceFailure: the span cannot be made.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            path, source = sources.continuous(
                _checked_source(plan, sources=sources), plan.source, with_sound=recipe.settings.audio == "keep"
            )
            encoded = encode_span(
                path,
                source=source,
                span=plan.span,
                recipe=recipe,
                program=program,
                folder=folder,
                on_frames=on_frames,
            )
            return _checked(encoded, plan, recipe=recipe)
        except SourceFailure as failure:
            if failure.code not in TRANSIENT - _NOT_AGAIN or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def checked_chunk(
    path: Path, *, num_frames: int, num_source_frames: int, plan: SpanPlan, recipe: ResolvedRecipe
) -> ReadyChunk:
    """Read one chunk back and compare it with the plan.

    Raises:
        SourceFailure: frames_differ.
    """
    content = path.read_bytes()
    facts = read_chunk(content, fps=recipe.settings.fps_exact)
    check_chunk(
        facts,
        num_frames=num_frames,
        size=output_size(plan.source, short_side=recipe.settings.short_side),
        codec=codec_named(recipe.settings.codec).decoder,
        size_bytes=len(content),
    )
    return ReadyChunk(path, facts, num_source_frames)


def _checked(encoded: EncodedSpan, plan: SpanPlan, *, recipe: ResolvedRecipe) -> list[ReadyChunk]:
    # Only the last span of a video may be shorter than planned (clipmill.prep.video.encode): its last chunk is shorter
    # or missing.
    times_s, pieces = encoded.source_times_s, []
    for planned, is_chunk in plan.span.pieces():
        if len(times_s):
            pieces.append((min(planned, len(times_s)), len(np.unique(times_s[:planned])), is_chunk))
            times_s = times_s[planned:]
    if len(encoded.segments) != len(pieces):
        raise SourceFailure(
            FailureCode.FRAMES_DIFFER,
            f"the encoder wrote {count_noun(len(encoded.segments), 'chunk')}, expected {len(pieces)}",
        )
    return [
        checked_chunk(path, num_frames=num_frames, num_source_frames=num_source, plan=plan, recipe=recipe)
        for path, (num_frames, num_source, is_chunk) in zip(encoded.segments, pieces, strict=True)
        if is_chunk
    ]


def _checked_source(plan: SpanPlan, *, sources: StagedSources) -> Path:
    """Return the path of the source, or of its copy, after comparing it with the plan."""
    try:
        path = sources.path_of(plan.path)
        found = current_fingerprint(path)
    except SourceFailure as failure:
        raise SourceFailure(failure.code, f"{plan.path}: {failure.message}") from None
    if found != plan.source.fingerprint:
        sources.release(is_damaged=True)
        raise SourceFailure(FailureCode.SOURCE_CHANGED, f"{plan.path}: the file has changed since the run was planned")
    return path


@dataclass(frozen=True)
class SpanChunks:
    """Chunks of one span: all of them, or those that are still intact.

    Attributes:
        chunks: chunks by their number in the span, ascending.
        num_chunks: number of chunks of the complete span.
    """

    chunks: dict[int, ReadyChunk]
    num_chunks: int

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == self.num_chunks


@dataclass(frozen=True)
class StoredTar:
    """A tar of a variant, by its path in the variant's folder, and its commit if one names it.

    A tar that no commit names any more keeps its chunks until `prep gc`: videos that return, or come back under another
    name, find them there. Nothing is taken from such a tar but what its checksums and its content prove to be right.
    """

    tar: str
    commit: Commit | None

    def rows(self, variant_dir: Path, fingerprints: Collection[str]) -> "Iterator[SalvagedSample]":
        """Yield the intact chunks of some spans."""
        from clipmill.shards.verify import readable_rows, uncommitted_samples

        wanted = (SPAN_COLUMN, fingerprints)
        if self.commit is not None:
            return readable_rows(variant_dir, self.commit, rows=wanted)
        return uncommitted_samples(variant_dir / self.tar, rows=wanted)


class OldChunks:
    """The intact chunks that stored tars have of a shard's spans, unpacked into scratch space.

    They are those of the shard's last commit and of further tars: of shards that the videos leave, or of earlier
    commits. The fingerprint of a span covers all that its bytes depend on, and neither the name nor the split of its
    video.
    """

    def __init__(
        self,
        variant_dir: Path,
        commit: Commit | None,
        *,
        others: Iterable[StoredTar],
        plans: Iterable[SpanPlan],
        folder: Path,
    ) -> None:
        """Unpack the chunks of those spans in `plans` whose fingerprint is that of stored ones into `folder`."""
        self._folder = folder
        self._found: dict[str, dict[int, tuple[Path, dict[str, Any]]]] = {}
        wanted = {plan.fingerprint for plan in plans}
        if commit is not None:
            self._unpack(StoredTar("", commit).rows(variant_dir, wanted), wanted)
        for other in others:
            if lacking := {fingerprint for fingerprint in wanted if not self._is_whole(fingerprint)}:
                self._unpack(other.rows(variant_dir, lacking), lacking)

    def _unpack(self, samples: "Iterable[SalvagedSample]", wanted: Collection[str]) -> None:
        for sample in samples:
            description = json.loads(sample.members["json"])
            fingerprint = description["span_fingerprint"]
            chunks = self._found.setdefault(fingerprint, {})
            if fingerprint in wanted and (begin_ms := split_key(description["key"])[1]) not in chunks:
                path = self._folder / f"{description['key']}.mp4"
                path.write_bytes(sample.members["mp4"])
                chunks[begin_ms] = path, description

    def _is_whole(self, fingerprint: str) -> bool:
        chunks = self._found.get(fingerprint, {})
        return any(len(chunks) == description["span_chunks"] for _, description in chunks.values())

    def span(self, plan: SpanPlan, *, recipe: ResolvedRecipe) -> SpanChunks:
        """Return the intact chunks of one span, each read back and compared with the plan."""
        found = self._found.get(plan.fingerprint, {})
        chunks, num_chunks = {}, len(plan.span.chunk_frames)
        for number, first_frame in enumerate(plan.span.chunk_starts()):
            path, description = found.get(start_ms(first_frame, fps=recipe.settings.fps_exact), (None, {}))
            if path is None:
                continue
            num_chunks = description["span_chunks"]
            try:
                chunks[number] = checked_chunk(
                    path,
                    num_frames=description["num_frames"],
                    num_source_frames=description["num_source_frames"],
                    plan=plan,
                    recipe=recipe,
                )
            except SourceFailure:  # not made with this recipe, so it cannot be reused
                continue
        return SpanChunks(chunks, num_chunks)


def read_chunk(content: bytes, *, fps: Fraction) -> ChunkFacts:
    """Demux an MP4 chunk.

    Args:
        content: bytes of the whole file.
        fps: frame rate, used to convert presentation timestamps into indices.

    Raises:
        SourceFailure: frames_differ, if the file is not an MP4 chunk or a packet is not where the container says.
    """
    import av
    import av.error

    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            stream = container.streams.video[0]
            codec = stream.codec_context.codec.canonical_name
            extradata = bytes(stream.codec_context.extradata or b"")
            is_reference = _reference_test(codec, extradata)
            # Integer arithmetic per packet: a Fraction would cost more than reading the packet.
            frames_per_tick = (stream.time_base or Fraction(0)) * fps
            offsets: list[int] = []
            sizes: list[int] = []
            frames: list[int] = []
            flags: list[int] = []
            crc32s: list[int] = []
            for packet in container.demux(stream):
                if not packet.size:
                    continue
                if packet.pts is None or packet.pos is None:
                    raise SourceFailure(FailureCode.FRAMES_DIFFER, "a packet has no timestamp or no byte position")
                if packet.is_discard:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER, f"the edit list hides the frame at pts {packet.pts} from players"
                    )
                frame, rest = divmod(packet.pts * frames_per_tick.numerator, frames_per_tick.denominator)
                if rest:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER, f"a frame is not on the {fps} fps grid: pts {packet.pts}"
                    )
                crc32 = zlib.crc32(memoryview(packet))
                if zlib.crc32(memoryview(content)[packet.pos : packet.pos + packet.size]) != crc32:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER, f"no packet at byte {packet.pos}, contrary to the container"
                    )
                offsets.append(packet.pos)
                sizes.append(packet.size)
                frames.append(frame)
                flags.append(packet.is_keyframe * PACKET_KEY | is_reference(packet) * PACKET_REFERENCE)
                crc32s.append(crc32)
            return ChunkFacts(
                codec=codec,
                width=stream.width,
                height=stream.height,
                extradata=extradata,
                packet_offset=offsets,
                packet_size=sizes,
                packet_frame=frames,
                packet_flags=flags,
                packet_crc32=crc32s,
            )
    except (av.error.FFmpegError, IndexError, TypeError) as error:
        raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the chunk cannot be read back: {error}") from None


def check_chunk(facts: ChunkFacts, *, num_frames: int, size: tuple[int, int], codec: str, size_bytes: int) -> None:
    """Compare a chunk with its plan.

    Raises:
        SourceFailure: frames_differ, with the first difference.
    """
    differences = [
        (facts.num_frames, num_frames, "frames"),
        ((facts.width, facts.height), size, "pixels"),
        (facts.codec, codec, "codec"),
        (sorted(facts.packet_frame), list(range(num_frames)), "presentation order"),
        (facts.packet_flags[:1], [PACKET_KEY | PACKET_REFERENCE], "first packet's flags"),
        (facts.packet_frame[:1], [0], "first packet's frame"),
        (_inside(facts, size_bytes), True, "packet ranges within the file"),
    ]
    for found, planned, what in differences:
        if found != planned:
            raise SourceFailure(FailureCode.FRAMES_DIFFER, f"{what}: found {_short(found)}, planned {_short(planned)}")


def _inside(facts: ChunkFacts, size_bytes: int) -> bool:
    ends = (offset + size for offset, size in zip(facts.packet_offset, facts.packet_size, strict=True))
    return min(facts.packet_offset, default=0) > 0 and max(ends, default=0) <= size_bytes


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reference_test(codec: str, extradata: bytes) -> "Callable[[Packet], bool]":
    """Return a function that tells whether other frames may need a packet; always True if the codec does not say."""
    if codec == "h264" and len(extradata) > 4 and extradata[0] == 1:
        length_bytes = (extradata[4] & 3) + 1
        return lambda packet: _h264_is_reference(memoryview(packet), length_bytes)
    if codec == "hevc" and len(extradata) > 21:
        length_bytes = (extradata[21] & 3) + 1
        return lambda packet: _hevc_is_reference(memoryview(packet), length_bytes)
    return lambda packet: True


def _h264_is_reference(payload: memoryview, length_bytes: int) -> bool:
    """Return True if nal_ref_idc of the packet's first slice is not 0 (H.264 7.3.1)."""
    header = _first_slice(payload, length_bytes, lambda byte: byte & 31 in _H264_SLICE_TYPES)
    return header is None or header >> 5 & 3 != 0


def _hevc_is_reference(payload: memoryview, length_bytes: int) -> bool:
    header = _first_slice(payload, length_bytes, lambda byte: byte >> 1 & 63 <= _HEVC_LAST_SLICE_TYPE)
    unit_type = None if header is None else header >> 1 & 63
    return unit_type is None or unit_type > _HEVC_LAST_SUBLAYER_TYPE or unit_type % 2 == 1


def _first_slice(payload: memoryview, length_bytes: int, is_slice: Callable[[int], bool]) -> int | None:
    position = 0
    while position + length_bytes < len(payload):
        header = payload[position + length_bytes]
        if is_slice(header):
            return header
        position += length_bytes + int.from_bytes(payload[position : position + length_bytes], "big")
    return None
