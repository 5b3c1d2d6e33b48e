"""Making the chunks of one span: encode, read back, compare with the plan. A span stands or falls as one."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prep.core.failures import TRANSIENT, FailureCode, SourceFailure
from prep.video.codecs import codec_named
from prep.video.encode import EncodedSpan, encode_span, output_size
from prep.video.packets import ChunkFacts, check_chunk, read_chunk
from prep.video.plan import SpanPlan
from prep.video.recipe import ResolvedRecipe
from prep.video.source_files import current_fingerprint

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
    # Only the last span of a video may be shorter than planned (prep.video.encode): its last chunk is short, or missing.
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
