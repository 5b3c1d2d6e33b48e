"""Making one shard of a column with one sample for each chunk, in a worker.

Samples of unchanged chunks are copied from stored shards; the column's `ChunkWork.make` makes all others. A failed
chunk is recorded in the commit and does not affect the others. This module loads neither plan nor driver.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.plugins import import_object
from clipmill.prep.core.chunk_input import (
    FINGERPRINT_FIELD,
    NOT_OF_COLUMN,
    Chunk,
    Chunks,
    Following,
    OldSamples,
    chunks_of_shard,
    column_failure,
    seconds_of,
)
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.shard_result import NewShard, ShardResult, Stop, begin_shard, stopped, system_errors_as_results
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.opening import Damaged
from clipmill.shards.writer import Sample

_END = object()  # after the last outcome
_AT_LEAST_1 = ("num_frames", "fps_num", "fps_den")


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
        made = _outcomes(work, chunks, task, shard)
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
            shard.add(outcome, content=b"" if work.is_function_of_plan else outcome.members[extension])
            if not is_old and row not in chunks.known:
                made_s += float(seconds_of(index, row))
        if isinstance(end := next(made, None), Stop):
            return stopped(task, end.code, end.message)
        return shard.commit(num_reused=len(chunks.wanted) - len(chunks.rows), encoded_s=made_s)


def _outcomes(
    work: ChunkWork, chunks: Chunks, task: ChunkTask, shard: NewShard
) -> Iterator[Sample | SourceFailure | Stop]:
    """Yield what the column makes of each chunk without a sample: its sample, its failure, or why the shard ends.

    An outcome that is no sample of its chunk becomes a failure. The shard ends if an outcome belongs to no chunk.
    """
    broken = FailureCode.COLUMN_ERROR
    try:
        made = iter(work.make(chunks, task.recipe)) if chunks.rows else iter(())
        for number, chunk in enumerate(chunks):
            outcome = next(made, _END)
            if outcome is _END:
                yield Stop(broken, f"{task.work} has yielded {number} outcomes for {len(chunks)} chunks")
                return
            if isinstance(outcome, Sample):
                if outcome.key != chunk.key:
                    yield Stop(broken, f"{task.work} has made {outcome.key} in place of {chunk.key}")
                    return
                try:
                    _require_sample_of(chunk, outcome, work)
                    shard.check(outcome)
                except (ValueError, TypeError, OverflowError) as error:
                    outcome = SourceFailure(broken, first_line(error))
                except SourceFailure as failure:
                    outcome = failure
            elif not isinstance(outcome, SourceFailure | Stop):
                kind = type(outcome).__name__
                outcome = SourceFailure(broken, f"{task.work} has yielded an object of type {kind}, which is no Sample")
            yield outcome
        if next(made, _END) is not _END:
            yield Stop(broken, f"{task.work} has yielded more outcomes than the {len(chunks)} chunks")
    except NOT_OF_COLUMN:
        raise
    except Exception as error:  # noqa: BLE001 - of any kind, as it is the code of others
        yield Stop(broken, column_failure(error).message)


def _require_sample_of(chunk: Chunk, sample: Sample, work: ChunkWork) -> None:
    """Check the values of a sample, and that it is the sample of a chunk.

    Raises:
        ValueError: A value cannot be stored, or differs from the value of the chunk.
        TypeError: likewise.
        OverflowError: likewise.
        SourceFailure: not_finite, if its array has a number that is not finite.
    """
    of_chunk = {"video_id": chunk["video_id"], "start_ms": chunk["start_ms"], FINGERPRINT_FIELD: chunk.fingerprint}
    for field in work.fields:
        value = sample.fields.get(field.name)
        if value is None:
            continue
        pa.array([value], field.type)
        # Arrow stores 2.5 as 2.
        if pa.types.is_integer(field.type) and value != int(value):
            raise ValueError(f"{field.name} is {value!r}, which is no integer")
        if field.name in _AT_LEAST_1 and value < 1:
            raise ValueError(f"{field.name} is {value!r}, and must be 1 or more")
        if value != of_chunk.get(field.name, value):
            raise ValueError(f"{field.name} is {value!r}, and that of the chunk is {of_chunk[field.name]!r}")
    for extension, member in sample.members.items():
        if extension.endswith("npy"):
            from clipmill.shards.npy import load_npy

            array = load_npy(member)
            if array is None:
                raise ValueError(f"the member {extension} is not an array of NumPy")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise SourceFailure(FailureCode.NOT_FINITE, f"{extension}: not all numbers are finite")
