"""Make the chunks of one span, that is, of one encoder pass, and check each chunk against the plan.

The chunks are encoded, indexed in the source, or copied from stored shards if these contain intact chunks of the same
encoder pass. If one chunk fails, the entire span fails.

An encoded chunk is checked by demuxing the finished file and comparing the properties of the file with the plan.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from clipmill.prep.video.codecs import find_codec, is_reference, slice_reader
from clipmill.prep.video.encode import EncodedSpan, PacketFacts, SpanPlan, encode_span, output_size, start_ms
from clipmill.prep.video.settings import ResolvedRecipe
from clipmill.shards.columns import INDEXED, SOURCE_MEMBER
from clipmill.shards.commits import Commit
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.timeline.model import CONTINUOUS_FORMAT, Timeline

if TYPE_CHECKING:
    from clipmill.manifests.storage.cache import CachedFile
    from clipmill.prep.video.source_span import SourceChunk
    from clipmill.shards.verify import SalvagedSample

SPAN_COLUMN = "span_fingerprint"
_TRIES = 2  # maximum number of attempts to make a span if the failures are transient
# Transient failures that last too long for an immediate retry.
_NO_RETRY = frozenset({FailureCode.DISK_FULL, FailureCode.SOURCE_TOO_LARGE})
_MAX_SHOWN_CHARS = 60  # maximum length of a value in a message


class StagedSources:
    """Access to sources as local files, one source at a time: a call for another source releases the current source.

    Args:
        folder: Folder for copies with rewritten timestamps; required by the method `continuous`.
        limit_bytes: Maximum total size in bytes of the downloaded copies on this node; None to use most of the free
            space.
        on_wait: Heartbeat function to call repeatedly while a source is downloaded, or while this worker waits.
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
        self._url = ""
        self._copy: CachedFile | None = None

    def __enter__(self) -> "StagedSources":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def path_of(self, source: str) -> Path:
        """Return the local path of a source. The copy of a remote source is valid until a call for another source.

        Args:
            source: Local path, or URL of an object.

        Raises:
            SourceFailure: source_missing, source_unreadable, source_changed, source_too_large, disk_full or io_error.
        """
        if not is_remote(source):
            self.release()
            return Path(source)
        if self._copy is None or source != self._url:
            from clipmill.prep.video.staging import copy_of

            self.release()
            self._copy = copy_of(source, limit_bytes=self._limit_bytes, on_wait=self._on_wait)
            self._url = source
        return self._copy.path

    def continuous(self, path: Path, source: SourceFacts, *, keeps_audio: bool) -> tuple[Path, SourceFacts]:
        """Return a file with the packets of a source and the timestamps of its timeline, and the facts of this file.

        The file is the source itself if the source already has these timestamps and an encoder pass can seek in it.
        Otherwise, the file is a copy, which is valid until this method is called for a different source.

        Args:
            path: Local file with the content of the source.
            source: Facts of the source.
            keeps_audio: True to keep the audio, which cannot be decoded after a seek that lands inside an audio frame.

        Raises:
            SourceFailure: The packets cannot be copied.
        """
        timeline = Timeline.from_json(source.timeline)
        if timeline.is_continuous and not (timeline.is_blind and keeps_audio and source.num_audio):
            return path, source
        key = (source.fingerprint, keeps_audio)
        if self._continuous is None or self._continuous[0] != key:
            from clipmill.prep.sources.remote import as_source_failure
            from clipmill.shards.timeline.copying import write_continuous

            assert self._folder is not None, "copies require a folder"
            target = self._folder / f"continuous.{CONTINUOUS_FORMAT}"
            with as_failure(FailureCode.DECODE_ERRORS, "its packets cannot be copied"), as_source_failure():
                new_timeline = write_continuous(path, target, keeps_audio=keeps_audio, on_packet=self._on_wait)
            new_timeline = replace(
                new_timeline, shape=timeline.shape, transfer=timeline.transfer, primaries=timeline.primaries
            )
            self._continuous = (key, target, replace(source, timeline=new_timeline.to_json()))
        return self._continuous[1:]

    def release(self, *, is_damaged: bool = False) -> None:
        """Stop using the current source.

        Args:
            is_damaged: True to also delete the local copy of the source, so that the source is downloaded again.
        """
        if self._copy is not None:
            if is_damaged:
                self._copy.path.unlink(missing_ok=True)
            self._copy.close()
        self._copy = None


class ChunkFacts(PacketFacts):
    """Properties of a chunk, read by demuxing its file."""

    @property
    def num_frames(self) -> int:
        return len(self.packet_frame)


@dataclass(frozen=True)
class ReadyChunk:
    """Encoded chunk whose file has been demuxed and matches the plan.

    Attributes:
        path: MP4 file of the chunk in scratch space.
        facts: Properties of the chunk, read by demuxing the file.
        num_source_frames: Number of distinct source frames that the chunk shows.
    """

    path: Path
    facts: ChunkFacts
    num_source_frames: int

    @property
    def content(self) -> tuple[str, bytes]:
        """Extension and content of the tar member for the chunk's frames."""
        return "mp4", self.path.read_bytes()


def make_span(
    plan: SpanPlan,
    *,
    sources: StagedSources,
    recipe: ResolvedRecipe,
    program: str,
    folder: Path,
    on_frames: Callable[[int], None],
) -> "Sequence[ReadyChunk | SourceChunk]":
    """Make the chunks of a span: encode them into new folders under `folder`, or index the packets of the source.

    Args:
        plan: Plan of the span.
        sources: Access to the sources; remote sources are copied to this node.
        recipe: Recipe of the variant.
        program: Name or path of the ffmpeg program.
        folder: Folder in scratch space.
        on_frames: Function to call periodically with the number of frames encoded so far.

    Raises:
        SourceFailure: The span cannot be made.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            # If the source has changed since the run was planned, its chunks would not match the planned fingerprint.
            try:
                source_path = sources.path_of(plan.path)
                fingerprint = current_fingerprint(source_path)
            except SourceFailure as failure:
                raise SourceFailure(failure.code, f"{plan.path}: {failure.message}") from None
            if fingerprint != plan.source.fingerprint:
                sources.release(is_damaged=True)
                message = f"{plan.path}: the file has changed since the run was planned"
                raise SourceFailure(FailureCode.SOURCE_CHANGED, message)
            if recipe.settings.codec == INDEXED:
                from clipmill.prep.video.source_span import index_span

                return index_span(source_path, plan, settings=recipe.settings)
            keeps_audio = recipe.settings.audio == "keep"
            path, source = sources.continuous(source_path, plan.source, keeps_audio=keeps_audio)
            encoded = encode_span(
                path,
                source=source,
                span=plan.span,
                recipe=recipe,
                program=program,
                folder=folder,
                on_frames=on_frames,
            )
            return _read_segments(encoded, plan, recipe=recipe)
        except SourceFailure as failure:
            if failure.code not in TRANSIENT - _NO_RETRY or not tries_left:
                raise
    raise AssertionError("the last attempt returns or raises")


def verify_chunk(
    path: Path, *, num_frames: int, num_source_frames: int, plan: SpanPlan, recipe: ResolvedRecipe
) -> ReadyChunk:
    """Demux one chunk and check it against the plan.

    Args:
        path: MP4 file of the chunk.
        num_frames: Planned number of frames in the chunk.
        num_source_frames: Number of distinct source frames that the chunk shows.
        plan: Plan of the span.
        recipe: Recipe of the variant.

    Raises:
        SourceFailure: frames_differ, if the chunk does not match the plan.
    """
    content = path.read_bytes()
    facts = read_chunk(content, fps=recipe.settings.fps_exact)
    check_chunk(
        facts,
        num_frames=num_frames,
        size=output_size(plan.source, short_side=recipe.settings.short_side),
        codec=find_codec(recipe.settings.codec).decoder,
        size_bytes=len(content),
    )
    return ReadyChunk(path, facts, num_source_frames)


def _read_segments(encoded: EncodedSpan, plan: SpanPlan, *, recipe: ResolvedRecipe) -> list[ReadyChunk]:
    """Demux the chunks of an encoder pass, and check each chunk against the plan."""
    # If the pass produced fewer frames than planned, the last chunk is shorter than planned or missing.
    times_s, segments = encoded.source_times_s, []
    for num_planned, is_chunk in plan.span.segment_lengths():
        if len(times_s):
            segments.append((min(num_planned, len(times_s)), len(np.unique(times_s[:num_planned])), is_chunk))
            times_s = times_s[num_planned:]
    if len(encoded.segments) != len(segments):
        raise SourceFailure(
            FailureCode.FRAMES_DIFFER,
            f"the encoder wrote {count_noun(len(encoded.segments), 'segment')} instead of {len(segments)}",
        )
    return [
        verify_chunk(path, num_frames=num_frames, num_source_frames=num_source, plan=plan, recipe=recipe)
        for path, (num_frames, num_source, is_chunk) in zip(encoded.segments, segments, strict=True)
        if is_chunk
    ]


@dataclass(frozen=True)
class SpanChunks:
    """Chunks of one span: all chunks of a new span, or only the intact chunks of a stored span.

    Attributes:
        chunks: Chunks by their index in the span, in ascending order.
        num_chunks: Number of chunks in the complete span.
    """

    chunks: "Mapping[int, ReadyChunk | SourceChunk]"
    num_chunks: int


@dataclass(frozen=True)
class StoredTar:
    """Tar in the folder of a variant.

    An uncommitted tar, which no commit lists, stays until `prep gc` removes it. If a video returns to the manifest,
    even under a different name, its chunks are copied from such a tar instead of being encoded again. A chunk is copied
    only if its checksums and content show that it is intact.

    Attributes:
        tar: Path of the tar, relative to the folder of the variant; not used if there is a commit.
        commit: Commit that lists the tar; None for an uncommitted tar.
    """

    tar: str
    commit: Commit | None

    def rows(self, variant_dir: Path, fingerprints: Collection[str]) -> "Iterator[SalvagedSample]":
        """Yield the intact chunks in the tar that belong to the spans with these fingerprints."""
        from clipmill.shards.verify import readable_rows, uncommitted_samples

        selection = (SPAN_COLUMN, fingerprints)
        if self.commit is not None:
            return readable_rows(variant_dir, self.commit, rows=selection)
        return uncommitted_samples(variant_dir / self.tar, rows=selection)


class OldChunks:
    """Intact chunks from stored tars that a shard can reuse, unpacked into scratch space.

    The chunks come from the last commit of the shard, and from other tars: tars of shards from which videos were moved,
    or tars of earlier commits. Spans are identified by their fingerprint, which covers everything that determines the
    bytes of the chunks, but neither the name nor the split of the video.
    """

    def __init__(
        self,
        variant_dir: Path,
        commit: Commit | None,
        *,
        other_tars: Iterable[StoredTar],
        plans: Iterable[SpanPlan],
        folder: Path,
    ) -> None:
        """Unpack the stored chunks of the planned spans into `folder`.

        Args:
            commit: Last commit of the shard; None if the shard has no commit.
            other_tars: Other tars to search for spans that are still incomplete.
            plans: Plans of the spans.
        """
        self._folder = folder
        # Span fingerprint -> start of the chunk in ms -> (MP4 file or source packets, JSON content).
        self._stored: dict[str, dict[int, tuple[Path | SourceChunk, dict[str, Any]]]] = {}
        fingerprints = {plan.fingerprint for plan in plans}
        if commit is not None:
            self._unpack(StoredTar("", commit).rows(variant_dir, fingerprints), fingerprints)
        for tar in other_tars:
            complete_spans = {
                fingerprint
                for fingerprint, chunks in self._stored.items()
                if any(len(chunks) == description["span_chunks"] for _, description in chunks.values())
            }
            if incomplete_spans := fingerprints - complete_spans:
                self._unpack(tar.rows(variant_dir, incomplete_spans), incomplete_spans)

    def _unpack(self, samples: "Iterable[SalvagedSample]", fingerprints: Collection[str]) -> None:
        for sample in samples:
            description = json.loads(sample.members["json"])
            fingerprint = description["span_fingerprint"]
            chunks = self._stored.setdefault(fingerprint, {})
            if fingerprint in fingerprints and (begin_ms := split_key(description["key"])[1]) not in chunks:
                if SOURCE_MEMBER in sample.members:
                    from clipmill.prep.video.source_span import SourceChunk

                    source = SourceChunk.from_sample(sample, num_source_frames=description["num_source_frames"])
                    if source is not None:
                        chunks[begin_ms] = source, description
                    continue
                path = self._folder / f"{description['key']}.mp4"
                path.write_bytes(sample.members["mp4"])
                chunks[begin_ms] = path, description

    def span(self, plan: SpanPlan, *, recipe: ResolvedRecipe) -> SpanChunks:
        """Return the intact chunks of one span. Encoded chunks are demuxed and checked against the plan."""
        stored = self._stored.get(plan.fingerprint, {})
        chunks: dict[int, ReadyChunk | SourceChunk] = {}
        num_chunks = len(plan.span.chunk_frames)
        for index, first_frame in enumerate(plan.span.chunk_starts()):
            content, description = stored.get(start_ms(first_frame, fps=recipe.settings.fps_exact), (None, {}))
            if content is None:
                continue
            num_chunks = description["span_chunks"]
            if not isinstance(content, Path):  # indexed packets in a committed row need no check
                chunks[index] = content
                continue
            try:
                chunks[index] = verify_chunk(
                    content,
                    num_frames=description["num_frames"],
                    num_source_frames=description["num_source_frames"],
                    plan=plan,
                    recipe=recipe,
                )
            except SourceFailure:  # the chunk does not match the plan, so it cannot be copied
                continue
        return SpanChunks(chunks, num_chunks)


def read_chunk(content: bytes, *, fps: Fraction) -> ChunkFacts:
    """Demux an MP4 chunk, and return its properties.

    Args:
        content: Bytes of the complete MP4 file.
        fps: Frame rate that converts presentation timestamps into frame indices.

    Raises:
        SourceFailure: frames_differ, if the file cannot be demuxed, a frame is hidden or not on the frame grid, or a
            packet is not at the position that the container states.
    """
    import av
    import av.error

    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            stream = container.streams.video[0]
            codec = stream.codec_context.codec.canonical_name
            extradata = bytes(stream.codec_context.extradata or b"")
            first_slice = slice_reader(codec, extradata)
            # Use integer arithmetic: computing a Fraction for each packet would take longer than reading the packet.
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
                # Readers rely on the byte ranges in the index, so each packet must be at the position in the container.
                crc32 = zlib.crc32(memoryview(packet))
                if zlib.crc32(memoryview(content)[packet.pos : packet.pos + packet.size]) != crc32:
                    raise SourceFailure(
                        FailureCode.FRAMES_DIFFER,
                        f"the packet is not at byte {packet.pos}, the position that the container states",
                    )
                offsets.append(packet.pos)
                sizes.append(packet.size)
                frames.append(frame)
                is_needed = is_reference(codec, first_slice(packet))
                flags.append(packet.is_keyframe * PACKET_KEY | is_needed * PACKET_REFERENCE)
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
    """Compare the properties of a chunk with the planned properties.

    Args:
        num_frames: Planned number of frames.
        size: Planned width and height in pixels.
        codec: Planned codec.
        size_bytes: Size of the file, which must contain all packets.

    Raises:
        SourceFailure: frames_differ; the message states the first difference.
    """
    ends = (offset + size for offset, size in zip(facts.packet_offset, facts.packet_size, strict=True))
    is_inside = min(facts.packet_offset, default=0) > 0 and max(ends, default=0) <= size_bytes
    comparisons = [
        (facts.num_frames, num_frames, "frames"),
        ((facts.width, facts.height), size, "pixels"),
        (facts.codec, codec, "codec"),
        (sorted(facts.packet_frame), list(range(num_frames)), "presentation order"),
        (facts.packet_flags[:1], [PACKET_KEY | PACKET_REFERENCE], "first packet's flags"),
        (facts.packet_frame[:1], [0], "first packet's frame"),
        (is_inside, True, "all packets within the file"),
    ]
    for actual_value, planned_value, what in comparisons:
        if actual_value != planned_value:
            actual_text, planned_text = (
                text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."
                for text in (str(actual_value), str(planned_value))
            )
            raise SourceFailure(FailureCode.FRAMES_DIFFER, f"{what}: found {actual_text}, planned {planned_text}")
