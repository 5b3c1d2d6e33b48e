"""`ColumnWork`: the functions that plan, make, show and maintain a column, which its spec names."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipmill.manifests.imported import imported
from clipmill.manifests.storage.mirrors import is_away
from clipmill.prep.core.column import ColumnSpec, Pending, Stored
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan
from clipmill.prep.core.report import Report
from clipmill.prep.core.request import Request
from clipmill.shards.chunk_table import chunk_table_problem
from clipmill.shards.commits import Failure
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import CommittedShard, Variant

if TYPE_CHECKING:
    from clipmill.prep.core.pages import PageRequest


class ColumnPlan(Protocol):
    """Interface of a column's plan."""

    @property
    def variant_dir(self) -> Path: ...
    @property
    def shards(self) -> Sequence[ShardPlan]: ...
    @property
    def num_videos(self) -> int:
        """Number of videos in the plan; a percentage in `--max-failures` refers to it."""
        ...


class RunSummary(Protocol):
    """Interface of the result of a run. `gave_up` is the reason why it ended before all shards were tried, or None."""

    @property
    def gave_up(self) -> str | None: ...
    @property
    def failures(self) -> Sequence[Failure]: ...
    @property
    def unchanged(self) -> Collection[Failure]:
        """Failures that an earlier run has reported, and that this one had no reason to try again."""
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
    """

    name: str
    problem: Callable[[Variant], str | None]


# Of columns that training reads.
MERGED_TABLE = ExtraFile(CHUNKS_FILE, chunk_table_problem)


def _nothing_in_particular(data: Path) -> list[str]:
    return []


def _no_layout(stored: Stored) -> None:
    return None


def _no_report(plan: Any, asked: str) -> Report:
    raise NotImplementedError


def _no_facts(data_dir: Path, key: str) -> dict[str, Any]:
    return {}


def _any_settings(settings: Any) -> None:
    return None


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

    require: Callable[[Any], None] = _any_settings
    plan: Callable[[Path, Any, Request], ColumnPlan]
    run: Callable[[Any, Any, Request, PartRun | None], RunSummary]
    plan_report: Callable[[Any], Report]
    explain: Callable[[Any, str], Report] = _no_report
    summary_report: Callable[[Any, Any, Path], Report]
    pending: Callable[[Path, Variant], Pending]
    layout_file: Callable[[Stored], str | None] = _no_layout
    extra_folders: tuple[ExtraFolder, ...] = ()
    extra_files: tuple[ExtraFile, ...] = ()
    sample_report: Callable[[CommittedShard, int, Path], Report] | None = None
    sample_facts: Callable[[Path, str], dict[str, Any]] = _no_facts
    write_page: "Callable[[Variant, PageRequest], Report] | None" = None
    next_command: Callable[[Path], list[str]] = _nothing_in_particular

    def file_problems(self, variant: Variant) -> list[str]:
        """Return why files of a variant that are derived from its shards cannot be used; the next run writes them."""
        # A merged table that is only in a bucket would have to be fetched; `prep verify` does.
        files = (
            file for file in self.extra_files if file is not MERGED_TABLE or not is_away(variant.directory / file.name)
        )
        return [why for file in files if (why := file.problem(variant)) is not None]


def work_of(column: ColumnSpec) -> ColumnWork:
    """Return the functions of a column."""
    found: ColumnWork = imported(column.work)
    return found
