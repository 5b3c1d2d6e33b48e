"""Making one shard of a column with one sample for each chunk, in a worker.

Samples of unchanged chunks are copied from stored shards; the column's `ChunkWork.make` makes all others. A failed
chunk is recorded in the commit and does not affect the others. This module loads neither plan nor driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.imported import import_object
from clipmill.prep.core.chunk_input import Chunks, Following, OldSamples, chunks_of_shard, seconds_of
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.shard_result import ShardResult, Stop, begin_shard, stopped, system_errors_as_results
from clipmill.prep.core.work import ChunkWork
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.damage import Damaged


@dataclass(frozen=True)
class ChunkTask:
    """Input of a worker: paths and small values only.

    Attributes:
        column: Name of the column.
        work: Import path of the column's `ChunkWork`.
        video_dir: Folder of the `video` variant with the chunks.
        video_commits: Commit of the shard with the chunks, as planned, and of the shards in `following`.
        following: The next chunks, if samples depend on them too (`ChunkWork.reads_next`).
        old_commits: Commits of the column with samples of unchanged chunks.
        rows: Chunks that get a sample, as rows of the shard; None for all.
        use: What the column hands to its workers (`Workers.use`).
        more: What the column hands to the worker of this shard (`ChunkWork.more`).
    """

    column: str
    work: str
    recipe: Recipe[Any]
    variant_dir: Path
    shard_id: int
    plan_fingerprint: str
    video_dir: Path
    video_commits: Mapping[int, Commit]
    following: Following
    old_commits: tuple[Commit, ...]
    rows: tuple[int, ...] | None
    use: Any
    more: Any


def make_chunk_shard(task: ChunkTask) -> ShardResult:
    """Make, publish and commit one shard."""
    return system_errors_as_results(_make, task)


def open_chunks(task: ChunkTask) -> tuple[Chunks, OldSamples]:
    """Open a shard: return its chunks, and the samples that are copied.

    Raises:
        Damaged: the chunks cannot be read.
        FileNotFoundError: likewise.
    """
    work: ChunkWork = import_object(task.work)
    names = tuple(field.name for field in work.fields)
    of_shard = chunks_of_shard(
        task.video_dir, task.shard_id, commits=task.video_commits, following=task.following, names=names
    )
    fingerprints = [chunk.fingerprint for chunk in of_shard]
    old = OldSamples(task.variant_dir, task.old_commits, fields=work.fields, wanted=fingerprints)
    wanted = range(len(fingerprints)) if task.rows is None else task.rows
    chunks = Chunks(
        variant_dir=task.variant_dir,
        shard_id=task.shard_id,
        wanted=wanted,
        rows=[row for row in wanted if fingerprints[row] not in old],
        of_shard=of_shard,
        fingerprints=fingerprints,
        use=task.use,
        more=task.more,
    )
    return chunks, old


def _make(task: ChunkTask) -> ShardResult:
    work: ChunkWork = import_object(task.work)
    try:
        chunks, old = open_chunks(task)
    except (Damaged, FileNotFoundError) as error:
        return stopped(task, FailureCode.CHUNK_DAMAGED, f"the chunks cannot be read: {error}")
    index, extension, made_s = chunks.video.index, work.extension_of(task.recipe), 0.0
    with begin_shard(
        task,
        column=task.column,
        split=task.video_commits[task.shard_id].split,
        extensions=[extension],
        fields=work.fields,
        num_planned=len(chunks.wanted),
    ) as shard:
        chunks = replace(chunks, show=shard.show)
        made = work.make(chunks, task.recipe) if chunks.rows else iter(())
        for row in chunks.wanted:
            is_old = chunks.fingerprints[row] in old
            try:
                outcome = old.sample(chunks.fingerprints[row], index, row) if is_old else next(made)
            except UserError as error:
                return stopped(task, FailureCode.MODEL_UNAVAILABLE, str(error))
            if isinstance(outcome, Stop):
                return stopped(task, outcome.code, outcome.message)
            video_id, key = (index[name][row].as_py() for name in ("video_id", "key"))
            if isinstance(outcome, SourceFailure):
                content = f"{' ' if shard.failures else ''}{key}" if work.is_function_of_plan else ""
                shard.fail(Failure(video_id, key, str(outcome.code), outcome.message), content=content)
                continue
            if outcome.key != key:
                raise ValueError(f"{task.work} has made {outcome.key} in place of {key}")
            shard.add(outcome, content=b"" if work.is_function_of_plan else outcome.members[extension])
            if not is_old and row not in chunks.known:
                made_s += float(seconds_of(index, row))
        return shard.commit(num_reused=len(chunks.wanted) - len(chunks.rows), encoded_s=made_s)
