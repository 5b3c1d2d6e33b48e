"""The chunks of one span: encoded, read back and compared with the plan, or copied from an old shard.

If one chunk fails, the whole span fails. Intact chunks of an encoder pass that is part of the new plan too are kept.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.manifests.keys import split_key
from clipmill.prep.core.failures import TRANSIENT, FailureCode, SourceFailure
from clipmill.prep.sources.files import current_fingerprint
from clipmill.prep.video.codecs import codec_named
from clipmill.prep.video.encode import EncodedSpan, encode_span, output_size
from clipmill.prep.video.packets import ChunkFacts, check_chunk, read_chunk
from clipmill.prep.video.plan import SpanPlan
from clipmill.prep.video.recipe import ResolvedRecipe
from clipmill.prep.video.spans import start_ms
from clipmill.prep.video.staging import StagedSources
from clipmill.shards.commits import Commit
from clipmill.shards.salvage import readable_rows

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
            encoded = encode_span(
                _checked_source(plan, sources=sources),
                source=plan.source,
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
            FailureCode.FRAMES_DIFFER, f"the encoder wrote {len(encoded.segments)} chunks, expected {len(pieces)}"
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
    """The intact chunks of a shard's last commit, unpacked into scratch space."""

    def __init__(self, variant_dir: Path, commit: Commit | None, *, plans: Iterable[SpanPlan], folder: Path) -> None:
        """Unpack the chunks of those spans in `plans` whose fingerprint has not changed into `folder`."""
        wanted = {(plan.video_id, plan.fingerprint) for plan in plans}
        self._found: dict[tuple[str, str], dict[int, tuple[Path, dict[str, Any]]]] = {}
        for sample in readable_rows(variant_dir, commit) if commit is not None else ():
            description = json.loads(sample.members["json"])
            video_id, begin_ms = split_key(sample.key)
            span = (video_id, description["span_fingerprint"])
            if span in wanted:
                path = folder / f"{sample.key}.mp4"
                path.write_bytes(sample.members["mp4"])
                self._found.setdefault(span, {})[begin_ms] = path, description

    def span(self, plan: SpanPlan, *, recipe: ResolvedRecipe) -> SpanChunks:
        """Return the intact chunks of one span, each read back and compared with the plan."""
        found = self._found.get((plan.video_id, plan.fingerprint), {})
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
