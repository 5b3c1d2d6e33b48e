"""`ColumnWork`: the functions that plan, make, show and maintain a column.

For a column with one sample for each chunk, they are derived from its `ChunkWork` (`prep/core/chunk_work.py`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.plugins import import_late, import_object
from clipmill.manifests.storage.mirrors import is_away
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
    """Output of a command in two forms: text lines and JSON values."""

    text: str
    values: dict[str, Any]


@dataclass(frozen=True)
class PageRequest:
    """Request for a page that `prep inspect --html` writes.

    Attributes:
        path: HTML file to write.
        where: Expression that selects samples (clipmill.shards.where); None for all.
        num_samples: Number of samples to show; None for the default of the page.
        on_sample: Function that is called with (number of samples read, number to read) after each sample.
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
        """Number of videos in the plan; a percentage in `--max-failures` refers to it."""
        ...


@dataclass(frozen=True)
class ExtraFolder:
    """A folder for intermediate results inside a variant's folder.

    Attributes:
        file_names: Pattern that must match the complete name of a file; other files are never removed.
        is_complete: Function that returns True if a file is complete and undamaged.
    """

    name: str
    file_names: re.Pattern[str]
    is_complete: Callable[[Path], bool]


@dataclass(frozen=True)
class ExtraFile:
    """A file in a variant's folder that is derived from the shards, and that a run rebuilds.

    Attributes:
        problem: Function that returns the reason why the file cannot be used (missing, stale or damaged), or None.
        publish: Function that writes the file at the end of a run if there is a problem; None if the driver writes it.
    """

    name: str
    problem: Callable[[Variant], str | None]
    publish: Callable[[Variant], object] | None = None


# Merged index of all shards, which training reads.
MERGED_TABLE = ExtraFile(CHUNKS_FILE, import_late("clipmill.shards.chunk_table:chunk_table_problem"))


@dataclass(frozen=True, kw_only=True)
class ColumnWork:
    """The functions of one column.

    Attributes:
        require: Function that raises UserError if this machine lacks something that the settings need; called before
            any lock is taken.
        plan: Function (data folder, settings, request) -> plan: the shards to make, and why.
        run: Function (plan, settings, request, running part or None) -> summary; called while the column's lock is
            held.
        plan_report: Function plan -> report.
        explain: Function (plan, chunk key or video ID) -> report on its state. None if the command has no `--explain`.
        summary_report: Function (summary, settings, path of the list of failures) -> report.
        pending: Function (data folder, variant) -> remaining work of the variant.
        layout_file: Function stored recipe -> name of the layout file that the variant uses, or None. The name of the
            file begins with the name of the column.
        extra_folders: Folders for intermediate results in each variant.
        extra_files: Files derived from the shards in each variant.
        sample_report: Function (shard, row, data folder) -> report printed by `prep inspect KEY`. None: the index row.
        sample_facts: Function (data folder, key) -> facts that `prep inspect KEY` shows besides the index row.
        write_page: Function (variant, request) that writes the page of `prep inspect --html` and returns a report.
            None if the column has no page.
        next_command: Function data folder as passed by the user -> arguments of the usual command after `prep NAME`;
            empty if there is none.
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
        """Return the problems of files that are derived from a variant's shards; the next run rebuilds these files."""
        # A merged table that is only in a bucket is not fetched here; `prep verify` fetches and checks it.
        files = (
            file for file in self.extra_files if file is not MERGED_TABLE or not is_away(variant.directory / file.name)
        )
        return [why for file in files if (why := file.problem(variant)) is not None]

    def for_column(self, column: ColumnSpec) -> "ColumnWork":
        """Return the object itself, which already has the functions of the column."""
        return self


def work_of(column: ColumnSpec) -> ColumnWork:
    """Return the functions of a column.

    Raises:
        UserError: A different package provides the column, and the `work` of its spec cannot be imported.
    """
    try:
        work: ColumnWork = import_object(column.work).for_column(column)
        return work
    except Exception as error:
        if column.work.startswith("clipmill."):
            raise
        message = f"the column {column.name} cannot be used: {column.work}: {type(error).__name__}: {first_line(error)}"
        hint = f"repair the package {column.package}, or uninstall it"
        raise UserError(message, hint=hint) from error


def usable_works(columns: Iterable[ColumnSpec]) -> Iterator[ColumnWork]:
    """Yield the functions of columns; omit columns from packages that cannot be imported."""
    for column in columns:
        with suppress(UserError):
            yield work_of(column)
