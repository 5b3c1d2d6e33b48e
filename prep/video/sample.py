"""Building a sample (its members and its index row) from a finished chunk and its captions."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction

from clipmill.manifests.keys import chunk_key
from clipmill.prep.video.captions import Caption
from clipmill.prep.video.plan import SpanPlan
from clipmill.prep.video.settings import ChunkSettings
from clipmill.prep.video.span_task import ReadyChunk
from clipmill.prep.video.spans import start_ms
from clipmill.shards.writer import Sample


def video_sample(
    chunk: ReadyChunk,
    *,
    plan: SpanPlan,
    number: int,
    span_chunks: int,
    split: str,
    settings: ChunkSettings,
    captions: Sequence[Caption] | None,
) -> Sample:
    """Return the sample of chunk `number` of a span.

    Args:
        span_chunks: number of chunks that the span actually has.
        captions: captions of the whole video; None if the dataset has no captions, and then the sample has no txt
            member.
    """
    fps, first_frame = settings.fps_exact, plan.span.chunk_starts()[number]
    begin_s, end_s = first_frame / fps, (first_frame + chunk.facts.num_frames) / fps
    key = chunk_key(plan.video_id, start_ms(first_frame, fps=fps))
    full_frames = settings.chunk_frames if settings.cut == "even" else plan.span.chunk_frames[number]
    mine = [caption for caption in captions or () if caption.overlaps(begin_s, end_s)]
    description = {
        "key": key,
        "video_id": plan.video_id,
        "source_id": plan.source_id,
        "source_fingerprint": plan.source.fingerprint,
        "dataset": plan.dataset,
        "split": split,
        "begin_s": _ratio(begin_s),
        "end_s": _ratio(end_s),
        "fps": _ratio(fps),
        "num_frames": chunk.facts.num_frames,
        "num_source_frames": chunk.num_source_frames,
        "is_tail": chunk.facts.num_frames != full_frames,
        "width": chunk.facts.width,
        "height": chunk.facts.height,
        "codec": chunk.facts.codec,
        "span_fingerprint": plan.fingerprint,
        "span_chunks": span_chunks,
        "captions": [asdict(caption) for caption in mine],
    }
    members = {"mp4": chunk.path.read_bytes(), "json": _json_bytes(description)}
    if captions is not None:
        members["txt"] = "\n".join(caption.text for caption in mine).encode("utf-8", "replace")
    fields = {
        "video_id": plan.video_id,
        "start_ms": start_ms(first_frame, fps=fps),
        "num_frames": chunk.facts.num_frames,
        "fps_num": fps.numerator,
        "fps_den": fps.denominator,
        "span_fingerprint": plan.fingerprint,
        **vars(chunk.facts),
    }
    return Sample(key=key, members=members, fields=fields)


def _ratio(value: Fraction) -> list[int]:
    """Return an exact fraction for JSON: [numerator, denominator]."""
    return [value.numerator, value.denominator]


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
