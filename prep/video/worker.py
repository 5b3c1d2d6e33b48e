"""Making one shard of the `video` column in a worker, independent of machine and engine.

Spans whose encoder pass is unchanged are copied from stored tars; all others are encoded. Every chunk, new or copied,
is read back and compared with the plan before it is written to the tar. A failed span is recorded in the commit and
does not affect the others.
"""

import hashlib
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.keys import chunk_key
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.heartbeat import Heartbeat
from clipmill.prep.core.shard_result import ShardResult, cpu_s, stopped, system_errors_as_results
from clipmill.prep.video.captions import captions_of
from clipmill.prep.video.ffmpeg import Ffmpeg, find_ffmpeg
from clipmill.prep.video.plan import SpanPlan
from clipmill.prep.video.recipe import ResolvedRecipe
from clipmill.prep.video.sample import video_sample
from clipmill.prep.video.scratch import scratch_folder
from clipmill.prep.video.span_task import OldChunks, SpanChunks, make_span
from clipmill.prep.video.spans import start_ms
from clipmill.prep.video.staging import StagedSources
from clipmill.prep.video.stored_spans import StoredTar
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.format import VIDEO_FIELDS
from clipmill.shards.writer import ShardWriter


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
        return stopped(task, FailureCode.WORKER_LOST, str(error))
    if version != task.recipe.ffmpeg:
        message = f"this node has ffmpeg {version}, but the plan requires {task.recipe.ffmpeg}"
        return stopped(task, FailureCode.FFMPEG_DIFFERS, message)
    return system_errors_as_results(_make, task)


def _make(task: ShardTask) -> ShardResult:
    with scratch_folder(f"shard {task.shard_id:06d} of {task.variant_dir}") as scratch:
        return _make_in(scratch, task, ffmpeg=find_ffmpeg())


def _make_in(scratch: Path, task: ShardTask, *, ffmpeg: Ffmpeg) -> ShardResult:
    begin_cpu_s = cpu_s()
    settings = task.recipe.settings
    captions = None
    if task.captions_file is not None:
        video_ids = [plan.video_id for plan in task.spans]
        captions = captions_of(task.captions_file, video_ids, row_groups=task.caption_groups)
    extensions = ["mp4", "json", *(["txt"] if captions is not None else [])]
    old = OldChunks(task.variant_dir, task.old_commit, others=task.others, plans=task.spans, folder=scratch)
    content = hashlib.sha256(task.plan_fingerprint.encode())
    failures: list[Failure] = []
    num_reused, encoded_s, files = 0, 0.0, None
    writer = ShardWriter(task.variant_dir, shard_id=task.shard_id, extensions=extensions, fields=VIDEO_FIELDS)
    beat = Heartbeat(
        task.variant_dir, task.shard_id, num_chunks=sum(len(plan.span.chunk_frames) for plan in task.spans)
    )
    sources = StagedSources(
        folder=scratch, limit_bytes=task.scratch_bytes, on_wait=lambda: beat.show(writer.num_samples)
    )
    with beat, writer, sources:
        for plan in task.spans:
            done, starts = writer.num_samples, plan.span.chunk_starts()

            def show(frames: int, done: int = done, starts: list[int] = starts) -> None:
                beat.show(done + max(0, bisect_right(starts, starts[0] + frames) - 1))

            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                span = old.span(plan, recipe=task.recipe)
                is_new = not span.is_whole
                if is_new:
                    try:
                        made = make_span(
                            plan,
                            sources=sources,
                            recipe=task.recipe,
                            program=ffmpeg.path,
                            folder=Path(folder),
                            on_frames=show,
                        )
                        span = SpanChunks(dict(enumerate(made)), len(made))
                        encoded_s += float(sum(chunk.facts.num_frames for chunk in made) / settings.fps_exact)
                    except SourceFailure as failure:
                        # Intact chunks are kept even if their source can no longer be read.
                        is_new = False
                        key = chunk_key(plan.video_id, start_ms(plan.span.first_frame, fps=settings.fps_exact))
                        failures.append(Failure(plan.video_id, key, str(failure.code), failure.message))
                        content.update(f" {key} failed, kept {list(span.chunks)}".encode())
                num_reused += 0 if is_new else len(span.chunks)
                for number, chunk in span.chunks.items():
                    sample = video_sample(
                        chunk,
                        plan=plan,
                        number=number,
                        span_chunks=span.num_chunks,
                        split=task.split,
                        settings=settings,
                        captions=None if captions is None else captions.get(plan.video_id, []),
                    )
                    writer.add(sample)
        num_chunks = writer.num_samples
        if num_chunks:
            files = writer.publish(content.hexdigest())
    commit = Commit(
        column=VIDEO,
        shard_id=task.shard_id,
        split=task.split,
        plan_fingerprint=task.plan_fingerprint,
        files=files,
        failures=tuple(failures),
    )
    write_commit(task.variant_dir, commit)
    return ShardResult(
        task.shard_id,
        num_chunks=num_chunks,
        num_reused=num_reused,
        num_bytes=files.tar_bytes if files else 0,
        failures=commit.failures,
        encoded_s=encoded_s,
        cpu_s=cpu_s() - begin_cpu_s,
    )
