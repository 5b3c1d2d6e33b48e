"""`ColumnWork`: the functions that plan, make, show and maintain a column.

A column with one sample for each chunk has a `ChunkWork` (`prep/core/chunk_work.py`), from which they are derived.
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
from clipmill.prep.core.column import ColumnSpec, Pending, Stored
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import CommittedShard, Variant

if TYPE_CHECKING:
    from clipmill.prep.core.pages import PageRequest
    from clipmill.prep.core.parts import PartRun
    from clipmill.prep.core.plan import ShardPlan
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.request import Request
    from clipmill.prep.core.run import Summary


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
        file_names: pattern that must match a file's full name; no other file is ever removed.
        is_whole: return True if a file is complete and undamaged.
    """

    name: str
    file_names: re.Pattern[str]
    is_whole: Callable[[Path], bool]


@dataclass(frozen=True)
class ExtraFile:
    """A file in a variant's folder that is derived from its shards, and that a run writes again.

    Attributes:
        problem: return why the file of a variant cannot be used (missing, stale or damaged), or None.
        publish: write the file of a variant at the end of a run if there is a problem; None if the driver does.
    """

    name: str
    problem: Callable[[Variant], str | None]
    publish: Callable[[Variant], object] | None = None


# Of columns that training reads.
MERGED_TABLE = ExtraFile(CHUNKS_FILE, import_late("clipmill.shards.chunk_table:chunk_table_problem"))


def _no_report(plan: Any, asked: str) -> "Report":
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ColumnWork:
    """The functions of one column.

    Attributes:
        require: raise UserError if this machine lacks something that the settings need; called before any lock is
            taken.
        plan: (data folder, settings, request) -> plan: which shards have to be made, and why.
        run: (plan, settings, request, part that runs or None) -> summary; called while the column's lock is held.
        plan_report: plan -> report.
        explain: (plan, chunk key or video ID) -> report on its state; of columns whose command has `--explain`.
        summary_report: (summary, settings, path of the list of failures) -> report.
        pending: (data folder, variant) -> work that remains for the variant.
        layout_file: stored recipe -> name of the layout file that the variant uses, or None; named after the column.
        extra_folders: folders for intermediate results in each variant.
        extra_files: files derived from the shards in each variant.
        sample_report: (shard, row, data folder) -> report printed by `prep inspect KEY`; the index row by default.
        sample_facts: (data folder, key) -> what `prep inspect KEY` shows of a sample besides its index row.
        write_page: (variant, request) -> report; writes the page of `prep inspect --html`. None if the column has none.
        next_command: data folder as the user gave it -> words of the command that comes after `prep NAME`; empty if
            nothing in particular.
    """

    require: Callable[[Any], None] = lambda settings: None
    plan: "Callable[[Path, Any, Request], ColumnPlan]"
    run: "Callable[[Any, Any, Request, PartRun | None], Summary]"
    plan_report: "Callable[[Any], Report]"
    explain: "Callable[[Any, str], Report]" = _no_report
    summary_report: "Callable[[Any, Any, Path], Report]"
    pending: Callable[[Path, Variant], Pending]
    layout_file: Callable[[Stored], str | None] = lambda stored: None
    extra_folders: tuple[ExtraFolder, ...] = ()
    extra_files: tuple[ExtraFile, ...] = ()
    sample_report: "Callable[[CommittedShard, int, Path], Report] | None" = None
    sample_facts: Callable[[Path, str], dict[str, Any]] = lambda data_dir, key: {}
    write_page: "Callable[[Variant, PageRequest], Report] | None" = None
    next_command: Callable[[Path], list[str]] = lambda data: []

    def file_problems(self, variant: Variant) -> list[str]:
        """Return why files of a variant that are derived from its shards cannot be used; the next run writes them."""
        # A merged table that is only in a bucket would have to be fetched; `prep verify` does.
        files = (
            file for file in self.extra_files if file is not MERGED_TABLE or not is_away(variant.directory / file.name)
        )
        return [why for file in files if (why := file.problem(variant)) is not None]

    def for_column(self, column: ColumnSpec) -> "ColumnWork":
        """Return the functions of a column."""
        return self


def work_of(column: ColumnSpec) -> ColumnWork:
    """Return the functions of a column.

    Raises:
        UserError: another package has the column, and what its spec names as `work` cannot be used.
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
    """Yield the functions of columns; omit columns of packages that cannot be used."""
    for column in columns:
        with suppress(UserError):
            yield work_of(column)
