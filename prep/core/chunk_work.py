"""`ChunkWork`: what a column with one sample for each chunk adds to its `ColumnSpec`.

All functions of its `ColumnWork` are derived from the two (`prep/core/chunk_column.py`). This module loads little,
since workers and packages with a column import it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from clipmill.manifests.plugins import import_object
from clipmill.prep.core.column import Addition, ColumnSpec
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, ExtraFile, ExtraFolder
from clipmill.shards.reader import Variant
from clipmill.shards.writer import require_extension

if TYPE_CHECKING:
    from clipmill.prep.core.chunk_columns import ChunksPlan
    from clipmill.prep.core.chunk_input import ChunkLength, Chunks
    from clipmill.prep.core.failures import SourceFailure
    from clipmill.prep.core.pages import PageRequest
    from clipmill.prep.core.recipe import Recipe
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.request import Request
    from clipmill.prep.core.run import Summary
    from clipmill.prep.core.shard_result import Stop
    from clipmill.shards.writer import Sample

_NAMES = ("video_id", "start_ms", "chunk_fingerprint")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What a run needs to know of its workers.

    Attributes:
        request: request of the run, with their number.
        gpus_each: GPUs of each worker, such as 1 or 0.5.
        memory_gb: memory that a worker takes on a cluster.
        use: `Chunks.use` of each worker: how it uses its machine, without effect on what is stored.
    """

    request: "Request"
    gpus_each: float = 0.0
    memory_gb: float = 0.5
    use: Any = None


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """What a column with one sample for each chunk adds to its `ColumnSpec`.

    Attributes:
        fields: index fields, in order (`clipmill.shards.format.chunk_fields`).
        extension: extension of the member of each sample, or a function recipe -> extension.
        make: (chunks, recipe) -> one outcome for each chunk, in order: a sample, a `SourceFailure`, or a `Stop`, which
            ends the shard without a commit. It runs in workers. A UserError that it raises is a model that cannot be
            opened there, and also ends the shard.
        require: raise UserError if this machine lacks something that the settings need; called before any lock is
            taken.
        resolve: settings -> the settings to use, and further values of the recipe by name, such as the hash of a
            model; a value with the name of a setting replaces it. It raises UserError if there is no such model.
        name: recipe -> readable part of the variant's name: letters, digits, `-`, `_` and dots.
        weights: recipe -> path of local weights, which the records of a run keep; None if there are none.
        needs: import path of a function that returns why a machine must not work, or None, and the name of the value
            of the recipe that is its argument. None if there are no such requirements.
        workers: (plan, request) -> workers of a run. None: as many as the request says, without GPUs.
        more: plan -> function of a shard id that returns what the worker of this shard needs besides its chunks
            (`Chunks.more`), such as files of other shards.
        reads_next: recipe -> True if a sample also depends on the chunk that follows in the video (`Chunk.next`); it is
            made again when that one comes, changes or leaves. By default, a sample depends on its chunk only.
        has_sample: (recipe, length of a chunk) -> True if the chunk gets a sample. None: all chunks do.
        on_plan: (plan, request) -> None; called once a plan is complete: raise UserError if the plan makes no sense, or
            make a few samples for its estimate (`PlanRequest.trial`).
        memory_gb: memory that a worker takes on a cluster.
        is_function_of_plan: True if the same plan always gives the same bytes.
        estimate: plan with work -> lines about its cost, and JSON values. None: the duration of the chunks.
        summary: (plan, result of the run, names of the extra files that it has written) -> what to add to its report.
            None: the files.
        left_out: plan -> what it leaves out, in lines, for `prep status`; its estimate and summary say the same.
        has_cpu_speed: whether the report of a run has the speed per CPU core.
        extra_folders, extra_files, sample_facts, write_page, next_command: see `ColumnWork`.
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
    more: "Callable[[ChunksPlan], Callable[[int], Any]]" = lambda plan: lambda shard_id: None
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
        if missing := [name for name in _NAMES if name not in names]:
            raise ValueError(f"the fields lack {', '.join(missing)}; use clipmill.shards.format.chunk_fields")
        if isinstance(self.extension, str):
            require_extension(self.extension)

    def extension_of(self, recipe: "Recipe[Any]") -> str:
        """Return the extension of the member of each sample of a variant."""
        return self.extension if isinstance(self.extension, str) else self.extension(recipe)

    def for_column(self, column: ColumnSpec) -> ColumnWork:
        """Return the functions of a column."""
        # The module with these functions, which imports this one, loads plan and driver.
        derived: ColumnWork = import_object("clipmill.prep.core.chunk_column:column_work")(column, self)
        return derived
