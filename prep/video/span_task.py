"""The chunks of one span: encoded, read back and compared with the plan; or what can be taken over of an old shard.

A span stands or falls as one. Intact bytes of an encoder pass that the new plan wants as well are kept.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manifests.keys import split_key
from prep.core.failures import TRANSIENT, FailureCode, SourceFailure
from prep.sources.files import current_fingerprint
from prep.video.codecs import codec_named
from prep.video.encode import EncodedSpan, encode_span, output_size
from prep.video.packets import ChunkFacts, check_chunk, read_chunk
from prep.video.plan import SpanPlan
from prep.video.recipe import ResolvedRecipe
from prep.video.spans import start_ms
from shards.commits import Commit
from shards.salvage import readable_rows

_TRIES = 2  # of a span whose failure may pass


@dataclass(frozen=True)
class ReadyChunk:
    """A chunk that was read back and found to be what was planned.

    Attributes:
        path: its file, in scratch space.
        facts: from demuxing it.
        num_source_frames: different source frames that it shows.
    """

    path: Path
    facts: ChunkFacts
    num_source_frames: int


def make_span(
    plan: SpanPlan, *, recipe: ResolvedRecipe, program: str, folder: Path, on_frames: Callable[[int], None]
) -> list[ReadyChunk]:
    """Encodes a span into a new folder below `folder`.

    Args:
        on_frames: called now and then with the number of frames encoded so far.

    Raises:
        SourceFailure: the span cannot be made.
    """
    for tries_left in reversed(range(_TRIES)):
        attempt = Path(tempfile.mkdtemp(dir=folder))
        try:
            _require_source(plan)
            encoded = encode_span(
                Path(plan.path),
                source=plan.source,
                span=plan.span,
                recipe=recipe,
                program=program,
                folder=attempt,
                on_frames=on_frames,
            )
            return _checked(encoded, plan, recipe=recipe)
        except SourceFailure as failure:
            if failure.code not in TRANSIENT or failure.code == FailureCode.DISK_FULL or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def checked_chunk(
    path: Path, *, num_frames: int, num_source_frames: int, plan: SpanPlan, recipe: ResolvedRecipe
) -> ReadyChunk:
    """Reads one chunk back and compares it with the plan.

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
    # Only the last span of a video may be shorter than planned (prep.video.encode): its last chunk is cut, or missing.
    times_s, frames = encoded.source_times_s, []
    for planned in plan.span.chunk_frames:
        if len(times_s):
            frames.append((min(planned, len(times_s)), len(np.unique(times_s[:planned]))))
            times_s = times_s[planned:]
    if len(encoded.segments) != len(frames):
        raise SourceFailure(
            FailureCode.FRAMES_DIFFER, f"the encoder wrote {len(encoded.segments)} chunks, planned {len(frames)}"
        )
    return [
        checked_chunk(path, num_frames=num_frames, num_source_frames=num_source, plan=plan, recipe=recipe)
        for path, (num_frames, num_source) in zip(encoded.segments, frames, strict=True)
    ]


def _require_source(plan: SpanPlan) -> None:
    try:
        found = current_fingerprint(Path(plan.path))
    except SourceFailure as failure:
        raise SourceFailure(failure.code, f"{plan.path}: {failure.message}") from None
    if found != plan.source.fingerprint:
        raise SourceFailure(FailureCode.SOURCE_CHANGED, f"{plan.path}: not the file that was planned with")


@dataclass(frozen=True)
class SpanChunks:
    """Chunks of one span: all that it has, or what is left of them.

    Attributes:
        chunks: by their number in the span, ascending.
        num_chunks: that the span has when it is whole.
    """

    chunks: dict[int, ReadyChunk]
    num_chunks: int

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == self.num_chunks


class OldChunks:
    """The intact chunks of a shard's last commit, unpacked into scratch space."""

    def __init__(self, variant_dir: Path, commit: Commit | None, *, plans: Iterable[SpanPlan], folder: Path) -> None:
        """Unpacks the chunks of those spans of `plans` whose fingerprint has not changed into `folder`."""
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
        """What is left of one span; each chunk of it was read back and compared with the plan."""
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
            except SourceFailure:  # made by something else than this recipe: not ours to take over
                continue
        return SpanChunks(chunks, num_chunks)
