"""The chunks of one span: encoded, read back and compared with the plan, or copied from an old shard.

If one chunk fails, the whole span fails. Intact chunks of an encoder pass that is part of the new plan too are kept.
"""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.manifests.keys import split_key
from clipmill.manifests.quoting import counted
from clipmill.prep.core.failures import TRANSIENT, FailureCode, SourceFailure
from clipmill.prep.sources.files import current_fingerprint
from clipmill.prep.video.codecs import codec_named
from clipmill.prep.video.encode import EncodedSpan, encode_span, output_size
from clipmill.prep.video.packets import ChunkFacts, check_chunk, read_chunk
from clipmill.prep.video.plan import SpanPlan
from clipmill.prep.video.recipe import ResolvedRecipe
from clipmill.prep.video.spans import start_ms
from clipmill.prep.video.staging import StagedSources
from clipmill.prep.video.stored_spans import SPAN_COLUMN, StoredTar
from clipmill.shards.commits import Commit
from clipmill.shards.salvage import SalvagedSample, readable_rows

_TRIES = 2  # attempts at a span with a transient failure
_NOT_AGAIN = frozenset({FailureCode.DISK_FULL, FailureCode.SOURCE_TOO_LARGE})  # transient, but not that soon


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
            f"the encoder wrote {counted(len(encoded.segments), 'chunk')}, expected {len(pieces)}",
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
            self._unpack(readable_rows(variant_dir, commit, wanted=(SPAN_COLUMN, wanted)), wanted)
        for other in others:
            if lacking := {fingerprint for fingerprint in wanted if not self._is_whole(fingerprint)}:
                self._unpack(other.rows(variant_dir, lacking), lacking)

    def _unpack(self, samples: Iterable[SalvagedSample], wanted: Collection[str]) -> None:
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
