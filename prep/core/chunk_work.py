"""`ChunkWork`, which defines how a column makes one sample per chunk, and the code that makes a shard in a worker.

The `ColumnWork` of such a column is derived from its `ColumnSpec` and `ChunkWork` (`prep/core/chunk_column.py`).
Workers and packages that provide a column import this module, so it does not load the planner or the driver.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.plugins import import_object
from clipmill.prep.core.chunk_input import (
    FINGERPRINT_FIELD,
    SHARD_ERRORS,
    Chunk,
    Chunks,
    NextChunks,
    OldSamples,
    chunks_of_shard,
    column_failure,
    seconds_of,
)
from clipmill.prep.core.column import Addition, ColumnSpec
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.shard_result import (
    NewShard,
    ShardResult,
    Stop,
    begin_shard,
    stop_result,
    system_errors_as_results,
)
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, ExtraFile, ExtraFolder, PageRequest, Report
from clipmill.shards.commits import Commit, Failure
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.writer import Sample, require_extension

if TYPE_CHECKING:
    from clipmill.prep.core.chunk_input import ChunkLength
    from clipmill.prep.core.chunk_plan import ChunksPlan
    from clipmill.prep.core.request import Request
    from clipmill.prep.core.run import Summary

_REQUIRED_FIELDS = ("video_id", "start_ms", "chunk_fingerprint")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Resources and options of the workers of a run.

    Attributes:
        request: Request of the run, which contains the number of workers.
        gpus_each: Number of GPUs per worker, such as 1 or 0.5.
        memory_gb: Memory to reserve for each worker on a cluster, in GB.
        options: Options that do not affect the stored bytes, passed to each worker as `Chunks.options`.
    """

    request: "Request"
    gpus_each: float = 0.0
    memory_gb: float = 0.5
    options: Any = None


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """Functions and values that a column uses to make and describe one sample per chunk.

    Attributes:
        fields: Index fields, in order (`clipmill.shards.format.chunk_fields`).
        extension: Extension of the member of each sample, or a function recipe -> extension.
        make: Function (chunks, recipe) -> iterator of outcomes, one for each chunk, in order: a sample, a
            `SourceFailure`, or a `Stop`, which ends the shard without a commit. The function runs in workers. It raises
            UserError if the worker cannot open the model; the error also ends the shard.
        require: Function (settings) that raises UserError if this machine lacks something that the settings need. The
            function is called before any lock is taken.
        resolve: Function settings -> (resolved settings, further values of the recipe, keyed by name). A further value,
            such as the hash of a model, replaces the setting of the same name. The function raises UserError if the
            model does not exist, or does not support the settings.
        name: Function recipe -> readable part of the variant's name: letters, digits, `-`, `_` and dots.
        weights: Function recipe -> path of local weights, which is recorded with the run; None without local weights.
        needs: Import path of a function that checks the machine of a worker, and the name of the recipe value to pass
            to it. The function returns the reason why the machine must not be used, or None. Without `needs`, no check
            is made.
        workers: Function (plan, request) -> `Workers`. None for as many workers as the request sets, without GPUs.
        extra_input: Function plan -> function that takes a shard ID and returns further input for the worker that makes
            the shard, such as files of other shards (`Chunks.extra_input`).
        reads_next: Function recipe -> True if a sample also depends on the next chunk of the video (`Chunk.next`). Such
            a sample is made again if the next chunk is added, changed or removed. Default: False.
        has_sample: Function (recipe, length of a chunk) -> True if the chunk gets a sample. None for all chunks.
        on_plan: Function (plan, request) that is called with each complete plan. It may raise UserError if the plan is
            invalid, and may make a few samples for the estimate (`PlanRequest.trial`).
        memory_gb: Memory to reserve for each worker on a cluster, in GB.
        is_function_of_plan: True if the same plan always produces the same bytes.
        estimate: Function plan -> lines and JSON values about the cost of the plan. None to report the total duration
            of the chunks.
        summary: Function (plan, result of the run, names of the extra files that the run wrote) -> lines and JSON
            values for the report. None to report these files.
        left_out: Function plan -> lines about what the plan omits, for `prep status`. `estimate` and `summary` should
            also return these lines.
        has_cpu_speed: True if the report of a run includes the speed per CPU core.
        extra_folders: See `ColumnWork`, which also describes the attributes below.
    """

    fields: Sequence[pa.Field]
    extension: "str | Callable[[Recipe[Any]], str]"
    make: "Callable[[Chunks, Recipe[Any]], Iterator[Sample | SourceFailure | Stop]]"
    require: Callable[[Any], None] = lambda settings: None
    resolve: Callable[[Any], tuple[Any, dict[str, Any]]] = lambda settings: (settings, {})
    name: "Callable[[Recipe[Any]], str]" = lambda recipe: str(recipe.values["column"])
    weights: "Callable[[Recipe[Any]], str | None]" = lambda recipe: None
    needs: tuple[str, str] | None = None
    workers: "Callable[[ChunksPlan, Any], Workers] | None" = None
    extra_input: "Callable[[ChunksPlan], Callable[[int], Any]]" = lambda plan: lambda shard_id: None
    reads_next: "Callable[[Recipe[Any]], bool]" = lambda recipe: False
    has_sample: "Callable[[Recipe[Any], ChunkLength], bool] | None" = None
    on_plan: "Callable[[ChunksPlan, Any], None]" = lambda plan, request: None
    memory_gb: float = 0.5
    is_function_of_plan: bool = True
    estimate: "Callable[[ChunksPlan], Addition] | None" = None
    summary: "Callable[[ChunksPlan, Summary, Sequence[str]], Addition] | None" = None
    left_out: "Callable[[ChunksPlan], Sequence[str]]" = lambda plan: ()
    has_cpu_speed: bool = True
    extra_folders: tuple[ExtraFolder, ...] = ()
    extra_files: tuple[ExtraFile, ...] = (MERGED_TABLE,)
    sample_facts: Callable[[Path, str], dict[str, Any]] = lambda data_dir, key: {}
    write_page: "Callable[[Variant, PageRequest], Report] | None" = None
    next_command: Callable[[Path], list[str]] = lambda data: []

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if missing := [name for name in _REQUIRED_FIELDS if name not in names]:
            raise ValueError(f"the fields lack {', '.join(missing)}; use clipmill.shards.format.chunk_fields")
        if isinstance(self.extension, str):
            require_extension(self.extension)

    def extension_of(self, recipe: "Recipe[Any]") -> str:
        """Return the extension of the member of each sample of a variant."""
        return self.extension if isinstance(self.extension, str) else self.extension(recipe)

    def for_column(self, column: ColumnSpec) -> ColumnWork:
        """Return the `ColumnWork` of the column."""
        # Import late: chunk_column.py imports this module, and also loads the planner and the driver.
        derived: ColumnWork = import_object("clipmill.prep.core.chunk_column:column_work")(column, self)
        return derived


_END = object()  # default of next() after the last outcome
_POSITIVE_FIELDS = ("num_frames", "fps_num", "fps_den")


@dataclass(frozen=True)
class ChunkTask:
    """Task of a worker that makes one shard. It contains only paths and small values.

    Attributes:
        column: Name of the column.
        work: Import path of the column's `ChunkWork`.
        recipe: Recipe of the variant.
        variant_dir: Folder of the variant.
        shard_id: ID of the shard.
        plan_fingerprint: Hash (hex) of everything that determines the content of the shard.
        video_dir: Folder of the `video` variant with the chunks.
        video_commits: Planned commits of `video` for the shard and for the shards in `next_chunks`, keyed by shard ID.
        next_chunks: Next chunks, if samples also depend on them (`ChunkWork.reads_next`).
        old_commits: Commits of the column that may contain samples of unchanged chunks.
        rows: Rows of the chunks that get a sample; None for all rows.
        options: Options of all workers (`Workers.options`).
        extra_input: Further input for this shard (`ChunkWork.extra_input`).
    """

    column: str
    work: str
    recipe: Recipe[Any]
    variant_dir: Path
    shard_id: int
    plan_fingerprint: str
    video_dir: Path
    video_commits: Mapping[int, Commit]
    next_chunks: NextChunks
    old_commits: tuple[Commit, ...]
    rows: tuple[int, ...] | None
    options: Any
    extra_input: Any


def make_chunk_shard(task: ChunkTask) -> ShardResult:
    """Make, publish and commit one shard in a worker.

    Samples of unchanged chunks are copied from stored shards, and `ChunkWork.make` makes the other samples. A failed
    chunk is recorded in the commit, and does not affect other chunks.
    """
    return system_errors_as_results(_make, task)


def open_chunks(task: ChunkTask) -> tuple[Chunks, OldSamples]:
    """Return the opened chunks of a shard, and the stored samples to copy.

    Raises:
        Damaged: The chunks cannot be read.
        FileNotFoundError: An index is missing.
    """
    work: ChunkWork = import_object(task.work)
    names = tuple(field.name for field in work.fields)
    shard_chunks = chunks_of_shard(
        task.video_dir, task.shard_id, commits=task.video_commits, next_chunks=task.next_chunks, names=names
    )
    fingerprints = [chunk.fingerprint for chunk in shard_chunks]
    old_samples = OldSamples(task.variant_dir, task.old_commits, fields=work.fields, fingerprints=fingerprints)
    rows = range(len(fingerprints)) if task.rows is None else task.rows
    chunks = Chunks(
        variant_dir=task.variant_dir,
        shard_id=task.shard_id,
        planned_rows=rows,
        rows=[row for row in rows if fingerprints[row] not in old_samples],
        shard_chunks=shard_chunks,
        fingerprints=fingerprints,
        options=task.options,
        extra_input=task.extra_input,
    )
    return chunks, old_samples


def _make(task: ChunkTask) -> ShardResult:
    work: ChunkWork = import_object(task.work)
    try:
        chunks, old_samples = open_chunks(task)
    except (Damaged, FileNotFoundError) as error:
        return stop_result(task, FailureCode.CHUNK_DAMAGED, f"the chunks cannot be read: {error}")
    index, extension, made_s = chunks.video.index, work.extension_of(task.recipe), 0.0
    with begin_shard(
        task,
        column=task.column,
        split=task.video_commits[task.shard_id].split,
        extensions=[extension],
        fields=work.fields,
        num_planned=len(chunks.planned_rows),
    ) as shard:
        chunks = replace(chunks, show=shard.show)
        outcomes = _outcomes(work, chunks, task, shard)
        # Write copied and new samples in the order of the chunks, so that the bytes do not depend on earlier runs.
        for row in chunks.planned_rows:
            fingerprint = chunks.fingerprints[row]
            is_old = fingerprint in old_samples
            try:
                outcome = old_samples.sample(fingerprint, index, row) if is_old else next(outcomes)
            except UserError as error:
                return stop_result(task, FailureCode.MODEL_UNAVAILABLE, str(error))
            if isinstance(outcome, Stop):
                return stop_result(task, outcome.code, outcome.message)
            video_id, key = (index[name][row].as_py() for name in ("video_id", "key"))
            if isinstance(outcome, SourceFailure):
                content = f"{' ' if shard.failures else ''}{key}" if work.is_function_of_plan else ""
                shard.fail(Failure(video_id, key, str(outcome.code), outcome.message), content=content)
                continue
            shard.add(outcome, content=b"" if work.is_function_of_plan else outcome.members[extension])
            if not is_old and row not in chunks.known_rows:
                made_s += float(seconds_of(index, row))
        if isinstance(end := next(outcomes, None), Stop):
            return stop_result(task, end.code, end.message)
        return shard.commit(num_reused=len(chunks.planned_rows) - len(chunks.rows), encoded_s=made_s)


def _outcomes(
    work: ChunkWork, chunks: Chunks, task: ChunkTask, shard: NewShard
) -> Iterator[Sample | SourceFailure | Stop]:
    """Yield the outcome of each chunk without a stored sample: a sample, a failure, or the reason to end the shard.

    An invalid sample becomes a failure. The shard ends if the number or the order of the outcomes is wrong.
    """
    code = FailureCode.COLUMN_ERROR
    try:
        outcomes = iter(work.make(chunks, task.recipe)) if chunks.rows else iter(())
        for num_outcomes, chunk in enumerate(chunks):
            outcome = next(outcomes, _END)
            if outcome is _END:
                yield Stop(code, f"{task.work} yielded outcomes for only {num_outcomes} of {len(chunks)} chunks")
                return
            if isinstance(outcome, Sample):
                if outcome.key != chunk.key:
                    yield Stop(code, f"{task.work} yielded the sample {outcome.key} instead of {chunk.key}")
                    return
                try:
                    _check_sample(chunk, outcome, work)
                    shard.check(outcome)
                except (ValueError, TypeError, OverflowError) as error:
                    outcome = SourceFailure(code, first_line(error))
                except SourceFailure as failure:
                    outcome = failure
            elif not isinstance(outcome, SourceFailure | Stop):
                kind = type(outcome).__name__
                message = f"{task.work} yielded an object of type {kind}, which is neither a Sample nor a SourceFailure"
                outcome = SourceFailure(code, message)
            yield outcome
        if next(outcomes, _END) is not _END:
            yield Stop(code, f"{task.work} yielded more outcomes than there are chunks ({len(chunks)})")
    except SHARD_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001 - the code of a column may raise anything
        yield Stop(code, column_failure(error).message)


def _check_sample(chunk: Chunk, sample: Sample, work: ChunkWork) -> None:
    """Check that the values of a sample can be stored and match its chunk.

    Raises:
        ValueError: A value cannot be stored, or differs from the value of the chunk.
        TypeError: A value has the wrong type.
        OverflowError: A value is too large for its type.
        SourceFailure: not_finite, if an array contains NaN or infinity.
    """
    chunk_values = {"video_id": chunk["video_id"], "start_ms": chunk["start_ms"], FINGERPRINT_FIELD: chunk.fingerprint}
    for field in work.fields:
        value = sample.fields.get(field.name)
        if value is None:
            continue
        pa.array([value], field.type)
        # Arrow would silently store 2.5 as 2.
        if pa.types.is_integer(field.type) and value != int(value):
            raise ValueError(f"{field.name} is {value!r}, which is not an integer")
        if field.name in _POSITIVE_FIELDS and value < 1:
            raise ValueError(f"{field.name} is {value!r}, but must be 1 or more")
        if value != chunk_values.get(field.name, value):
            raise ValueError(f"{field.name} is {value!r}, but the chunk has {chunk_values[field.name]!r}")
    for extension, member in sample.members.items():
        if extension.endswith("npy"):
            from clipmill.shards.npy import load_npy

            array = load_npy(member)
            if array is None:
                raise ValueError(f"the member {extension} is not a NumPy array")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise SourceFailure(FailureCode.NOT_FINITE, f"{extension} contains non-finite values")
