"""Planning and making a column: what `prep plan` and all commands that make a column share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.request import Request

if TYPE_CHECKING:
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.work import ColumnPlan, RunSummary


def parse_budget(text: str) -> Callable[[int], float]:
    """Parse `--max-failures` into a function from the number of videos to the number that may fail.

    Raises:
        UserError: `text` is neither a number nor a percentage.
    """
    share = text.removesuffix("%")
    try:
        value = float(share) if share != text else int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if share != text else float("inf")):
        raise UserError(
            f'--max-failures "{text}" is not a number or percentage',
            hint="give a number of videos such as 10, or a percentage such as 1%",
        )
    return (lambda num_videos: int(num_videos * value / 100)) if share != text else (lambda num_videos: value)


def plan_column(
    column: ColumnSpec,
    settings: Any,
    *,
    data: Path,
    json: bool,
    explain: str | None = None,
    request: Request | None = None,
) -> None:
    """Print what making the column would do, and why; or the state of what `explain` names (`ColumnWork.explain`).

    Args:
        request: what else the column's plan needs to know; None for nothing.

    Raises:
        UserError: a record is damaged.
    """
    with Activity("planning"):
        from clipmill.prep.core.data_folder import require_data_folder
        from clipmill.prep.core.ending import with_file_problems
        from clipmill.prep.core.report import show
        from clipmill.prep.core.work import work_of

        work, data_dir = work_of(column), require_data_folder(data)
        plan = work.plan(data_dir, settings, request or Request(data=data))
        report = work.plan_report(plan) if explain is None else work.explain(plan, explain)
        if explain is None:
            report = with_file_problems(report, column, plan.variant_dir, data_dir=data_dir)
    show(report, json=json)


def make_column(column: ColumnSpec, settings: Any, request: Request) -> None:
    """Plan and make the column, and print a summary.

    Raises:
        UserError: the request is invalid, or this machine lacks something that the settings need.
        FailedWork: the run gave up, or more videos failed than `--max-failures` allows.
    """
    budget = parse_budget(request.max_failures)
    request.check()
    with Activity("planning") as now:
        plan, summary, report, listed = _made(column, settings, request, now)
    from clipmill.prep.core.report import show

    show(report, json=request.json)
    if summary.gave_up is not None:
        raise FailedWork(f"{summary.gave_up}; finished work is kept; run the same command again to resume")
    if summary.num_failed_videos > budget(plan.num_videos):
        failed = f"{summary.num_failed_videos} of {counted(plan.num_videos, 'video')}"
        raise FailedWork(f"{failed} failed; failures are listed in {listed}")
    if summary.failures:
        failed = counted(summary.num_failed_videos, "video")
        sys.stderr.write(f"{failed} failed, within --max-failures {request.max_failures}\n")


def _made(
    column: ColumnSpec, settings: Any, request: Request, now: Activity
) -> "tuple[ColumnPlan, RunSummary, Report, Path]":
    """Plan and make the column; return the plan, the summary, its report, and the path of the list of failures."""
    from clipmill.prep.core.data_folder import require_data_folder, writing
    from clipmill.prep.core.ending import with_ending
    from clipmill.prep.core.part_locks import Part
    from clipmill.prep.core.parts import writing_part
    from clipmill.prep.core.report import with_part
    from clipmill.prep.core.run import FAILURES_FILE
    from clipmill.prep.core.work import work_of
    from clipmill.shards.dataset import current_variant

    work = work_of(column)
    part = None if request.part is None else Part.parse(request.part)
    data_dir = require_data_folder(request.data)
    work.require(settings)
    with (
        writing(data_dir, column=column.name)
        if part is None
        else writing_part(data_dir, part, column=column.name) as part_run
    ):
        plan = work.plan(data_dir, settings, request)
        now.say("", what=column.doing)
        summary = work.run(plan, settings, request, part_run)
        assert part_run is None or part_run.is_last is not None, f"{column.package} does not run its plan in parts"
    listed = plan.variant_dir / FAILURES_FILE
    report = work.summary_report(summary, settings, listed)
    if part_run is not None:
        report = with_part(report, part_run)
    # Videos that failed do not keep the others from being used, unless an earlier variant has stayed the current one.
    has_ended = (part_run is None or bool(part_run.is_last)) and summary.gave_up is None
    is_done = has_ended and current_variant(data_dir, column.name) == plan.variant_dir.name
    report = with_ending(report, column, plan.variant_dir, data=request.data, is_done=is_done, has_ended=has_ended)
    return plan, summary, report, listed
