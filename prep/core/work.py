"""`ColumnWork`: the functions that plan, make, show and maintain a column.

For a column with one sample per chunk, these functions are derived from its `ChunkWork` (`prep/core/chunk_work.py`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.plugins import import_late, import_object
from clipmill.manifests.storage.mirrors import is_only_in_bucket
from clipmill.prep.core.column import ColumnSpec, PendingWork, StoredRecipe
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import CommittedShard, Variant

if TYPE_CHECKING:
    from clipmill.prep.core.parts import PartRun
    from clipmill.prep.core.plan import ShardPlan
    from clipmill.prep.core.request import Request
    from clipmill.prep.core.run import Summary


@dataclass(frozen=True)
class Report:
    """Output of a command in two forms: text and JSON values."""

    text: str
    values: dict[str, Any]


@dataclass(frozen=True)
class PageRequest:
    """Request for a page that `prep inspect --html` writes.

    Attributes:
        path: HTML file to write.
        where: Expression that selects samples (clipmill.shards.where); None for all samples.
        num_samples: Number of samples to show; None for the default of the page.
        on_sample: Function (number of samples read, total number) that is called after each sample.
    """

    path: Path
    where: str | None = None
    num_samples: int | None = None
    on_sample: Callable[[int, int], None] = lambda done, total: None


class ColumnPlan(Protocol):
    """Interface of a column's plan."""

    @property
    def variant_dir(self) -> Path: ...
    @property
    def shards(self) -> "Sequence[ShardPlan]": ...
    @property
    def num_videos(self) -> int:
        """Number of videos in the plan; a percentage in `--max-failures` refers to this number."""
        ...


@dataclass(frozen=True)
class ExtraFolder:
    """Folder for intermediate results in the folder of a variant.

    Attributes:
        name: Name of the folder.
        file_names: Pattern of the complete file names. Other files are never removed.
        is_complete: Function that returns True if a file is complete and undamaged.
    """

    name: str
    file_names: re.Pattern[str]
    is_complete: Callable[[Path], bool]


@dataclass(frozen=True)
class ExtraFile:
    """File in the folder of a variant that is derived from the shards. A run rebuilds it if necessary.

    Attributes:
        name: Name of the file.
        problem: Function that returns the reason why the file is unusable (missing, stale or damaged), or None.
        publish: Function that writes the file at the end of a run if there is a problem; None if the driver writes it.
    """

    name: str
    problem: Callable[[Variant], str | None]
    publish: Callable[[Variant], object] | None = None


# Merged index of all shards, which training reads.
MERGED_TABLE = ExtraFile(CHUNKS_FILE, import_late("clipmill.shards.chunk_table:chunk_table_problem"))


@dataclass(frozen=True, kw_only=True)
class ColumnWork:
    """Functions of one column.

    Attributes:
        require: Function (settings) that raises UserError if this machine lacks something that the settings need. The
            function is called before any lock is taken.
        plan: Function (data folder, settings, request) -> plan: the shards to make, with reasons.
        run: Function (plan, settings, request, part or None) -> summary. The function is called while the lock of the
            column is held.
        plan_report: Function plan -> report.
        explain: Function (plan, chunk key or video ID) -> report on the state of the chunk or video. None if the
            command has no `--explain`.
        summary_report: Function (summary, settings, path of the list of failures) -> report.
        pending: Function (data folder, variant) -> remaining work of the variant.
        layout_file: Function stored recipe -> name of the layout file that the variant uses, or None. The name is the
            name of the column with the suffix `.parquet`, except for `video`.
        extra_folders: Folders for intermediate results in each variant.
        extra_files: Files that are derived from the shards, in each variant.
        sample_report: Function (shard, row, data folder) -> report that `prep inspect KEY` prints. None to print the
            index row.
        sample_facts: Function (data folder, key) -> values that `prep inspect KEY` shows besides the index row.
        write_page: Function (variant, request) that writes the page of `prep inspect --html` and returns a report. None
            if the column has no page.
        next_command: Function (data folder as passed by the user) -> arguments of the command that users usually run
            next; empty if there is none.
    """

    require: Callable[[Any], None] = lambda settings: None
    plan: "Callable[[Path, Any, Request], ColumnPlan]"
    run: "Callable[[Any, Any, Request, PartRun | None], Summary]"
    plan_report: "Callable[[Any], Report]"
    explain: "Callable[[Any, str], Report] | None" = None
    summary_report: "Callable[[Any, Any, Path], Report]"
    pending: Callable[[Path, Variant], PendingWork]
    layout_file: Callable[[StoredRecipe], str | None] = lambda stored: None
    extra_folders: tuple[ExtraFolder, ...] = ()
    extra_files: tuple[ExtraFile, ...] = ()
    sample_report: "Callable[[CommittedShard, int, Path], Report] | None" = None
    sample_facts: Callable[[Path, str], dict[str, Any]] = lambda data_dir, key: {}
    write_page: "Callable[[Variant, PageRequest], Report] | None" = None
    next_command: Callable[[Path], list[str]] = lambda data: []

    def file_problems(self, variant: Variant) -> list[str]:
        """Return the problems of a variant's extra files. The next run rebuilds these files."""
        # Do not fetch a merged table that is only in a bucket; `prep verify` fetches and checks it.
        files = (
            file
            for file in self.extra_files
            if file is not MERGED_TABLE or not is_only_in_bucket(variant.directory / file.name)
        )
        return [problem for file in files if (problem := file.problem(variant)) is not None]

    def for_column(self, column: ColumnSpec) -> "ColumnWork":
        """Return this object, which already has the functions of the column (see `ChunkWork.for_column`)."""
        return self


def work_of(column: ColumnSpec) -> ColumnWork:
    """Import and return the functions of a column.

    Raises:
        UserError: The column comes from a different package, and the code of this package cannot be imported.
    """
    try:
        work: ColumnWork = import_object(column.work).for_column(column)
        return work
    except Exception as error:
        if column.work.startswith("clipmill."):
            raise
        message = f"the column {column.name} cannot be used: {column.work}: {type(error).__name__}: {first_line(error)}"
        hint = f"repair or uninstall the package {column.package}"
        raise UserError(message, hint=hint) from error


def usable_works(columns: Iterable[ColumnSpec]) -> Iterator[ColumnWork]:
    """Yield the functions of columns, except columns from packages that cannot be imported."""
    for column in columns:
        with suppress(UserError):
            yield work_of(column)
