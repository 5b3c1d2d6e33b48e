"""Making one shard of the `video` column in a worker, independent of machine and engine.

Spans whose encoder pass is unchanged are copied from stored tars; all others are encoded. Every chunk, new or copied,
is read back and compared with the plan before it is written to the tar. A failed span is recorded in the commit and
does not affect the others.
"""

import json
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.keys import chunk_key
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import ShardResult, begin_shard, stop_result, system_errors_as_results
from clipmill.prep.video.encode import SpanPlan, start_ms
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.scratch import scratch_folder
from clipmill.prep.video.settings import ChunkSettings, ResolvedRecipe
from clipmill.prep.video.span_task import OldChunks, ReadyChunk, SpanChunks, StagedSources, StoredTar, make_span
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.format import VIDEO_FIELDS
from clipmill.shards.writer import Sample

_CAPTION_COLUMNS = ["caption_id", "begin_s", "end_s", "text", "source"]


@dataclass(frozen=True)
class Caption:
    """One caption; `end_s` is None if it lasts to the end of the video."""

    caption_id: int
    begin_s: float
    end_s: float | None
    text: str
    source: str

    def overlaps(self, begin_s: Fraction, end_s: Fraction) -> bool:
        """Return True if the caption overlaps [begin_s, end_s)."""
        return self.begin_s < end_s and (self.end_s is None or self.end_s > begin_s)


@dataclass(frozen=True)
class ShardTask:
    """Input of a worker: paths and small values only.

    Attributes:
        old_commit: previous commit of the shard, for its unchanged chunks.
        others: further tars with chunks of these spans.
        captions_file: the manifest's table of captions, or None if no video has captions.
        caption_groups: row groups of that table with captions of the shard's videos.
        scratch_bytes: limit of the copies of remote sources on a node; None for most of the free space.
    """

    variant_dir: Path
    shard_id: int
    split: str
    plan_fingerprint: str
    recipe: ResolvedRecipe
    spans: tuple[SpanPlan, ...]
    old_commit: Commit | None
    others: tuple[StoredTar, ...]
    captions_file: Path | None
    caption_groups: tuple[int, ...] = ()
    scratch_bytes: int | None = None


def make_shard(task: ShardTask) -> ShardResult:
    """Make, publish and commit one shard. Idempotent: a second run writes the same bytes under the same names."""
    try:
        version = find_ffmpeg().version
    except FailedWork as error:
        return stop_result(task, FailureCode.WORKER_LOST, str(error))
    if version != (planned := task.recipe.values["ffmpeg"]):
        message = f"this node has ffmpeg {version}, but the plan requires {planned}"
        return stop_result(task, FailureCode.FFMPEG_DIFFERS, message)
    return system_errors_as_results(_make, task)


def _make(task: ShardTask) -> ShardResult:
    program, captions, fps = find_ffmpeg().path, None, task.recipe.settings.fps_exact
    if task.captions_file is not None:
        video_ids = [plan.video_id for plan in task.spans]
        captions = captions_of(task.captions_file, video_ids, row_groups=task.caption_groups)
    num_reused, encoded_s = 0, 0.0
    with (
        scratch_folder(f"shard {task.shard_id:06d} of {task.variant_dir}") as scratch,
        begin_shard(
            task,
            column=VIDEO,
            split=task.split,
            extensions=["mp4", "json", *(["txt"] if captions is not None else [])],
            fields=VIDEO_FIELDS,
            num_planned=sum(len(plan.span.chunk_frames) for plan in task.spans),
        ) as shard,
        StagedSources(
            folder=scratch, limit_bytes=task.scratch_bytes, on_wait=lambda: shard.show(shard.num_samples)
        ) as sources,
    ):
        old = OldChunks(task.variant_dir, task.old_commit, others=task.others, plans=task.spans, folder=scratch)
        for plan in task.spans:
            done, starts = shard.num_samples, plan.span.chunk_starts()

            def show(frames: int, done: int = done, starts: list[int] = starts) -> None:
                shard.show(done + max(0, bisect_right(starts, starts[0] + frames) - 1))

            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                span = old.span(plan, recipe=task.recipe)
                is_new = not span.is_whole
                if is_new:
                    try:
                        made = make_span(
                            plan,
                            sources=sources,
                            recipe=task.recipe,
                            program=program,
                            folder=Path(folder),
                            on_frames=show,
                        )
                        span = SpanChunks(dict(enumerate(made)), len(made))
                        encoded_s += float(sum(chunk.facts.num_frames for chunk in made) / fps)
                    except SourceFailure as failure:
                        # Intact chunks are kept even if their source can no longer be read.
                        is_new = False
                        key = chunk_key(plan.video_id, start_ms(plan.span.first_frame, fps=fps))
                        content = f" {key} failed, kept {list(span.chunks)}"
                        shard.fail(Failure(plan.video_id, key, str(failure.code), failure.message), content=content)
                num_reused += 0 if is_new else len(span.chunks)
                for number, chunk in span.chunks.items():
                    sample = video_sample(
                        chunk,
                        plan=plan,
                        number=number,
                        span_chunks=span.num_chunks,
                        split=task.split,
                        settings=task.recipe.settings,
                        captions=None if captions is None else captions.get(plan.video_id, []),
                    )
                    shard.add(sample)
        return shard.commit(num_reused=num_reused, encoded_s=encoded_s)


def captions_of(
    captions_file: Path, video_ids: Sequence[str], *, row_groups: Sequence[int]
) -> dict[str, list[Caption]]:
    """Return the captions of some videos, sorted by time.

    Args:
        row_groups: row groups of the table that hold them; one is in memory at a time.
    """
    import pyarrow.parquet as pq

    wanted = pa.array(sorted(set(video_ids)), pa.string())
    found: dict[str, list[Caption]] = {}
    with pq.ParquetFile(captions_file, read_dictionary=["video_id"], pre_buffer=False) as file:
        for group in row_groups:
            ids = file.read_row_group(group, columns=["video_id"], use_threads=False)["video_id"].unify_dictionaries()
            rows = pa.array(np.flatnonzero(pc.is_in(ids.cast(pa.string()), value_set=wanted).to_numpy()))
            table = file.read_row_group(group, columns=_CAPTION_COLUMNS, use_threads=False).take(rows)
            for video_id, row in zip(ids.take(rows).to_pylist(), table.to_pylist(), strict=True):
                end_s = row["end_s"] if row["end_s"] != float("inf") else None
                caption = Caption(row["caption_id"], row["begin_s"], end_s, row["text"], row["source"])
                found.setdefault(video_id, []).append(caption)
    for captions in found.values():
        captions.sort(key=lambda caption: (caption.begin_s, caption.caption_id))
    return found


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
