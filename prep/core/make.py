"""Plan, make and retry any column, and build its commands (`prep NAME`, `prep plan NAME`) from its spec."""

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_object
from clipmill.manifests.progress import Activity
from clipmill.prep.core.column import WEIGHTS, ColumnSpec, StoredRecipe
from clipmill.prep.core.request import PlanRequest, Request


def parse_budget(text: str) -> Callable[[int], float]:
    """Parse a value of `--max-failures`, such as `10` or `1%`.

    Returns:
        Function that takes the total number of videos and returns the maximum number of videos that may fail.

    Raises:
        UserError: `text` is neither a number of videos (0 or more) nor a percentage from 0% to 100%.
    """
    number = text.removesuffix("%")
    try:
        value = float(number) if number != text else int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if number != text else float("inf")):
        raise UserError(
            f'--max-failures "{text}" is neither a number of videos nor a percentage from 0% to 100%',
            hint="use a number of videos such as 10, or a percentage such as 1%",
        )
    return (lambda num_videos: int(num_videos * value / 100)) if number != text else (lambda num_videos: value)


def make_command(column: ColumnSpec) -> Callable[..., None]:
    """Return the function that runs `prep NAME`. Its parameters are the column's settings and request."""

    def make(settings: Any, request: Request) -> None:
        make_column(column, settings, request)

    return _as_command(make, column, request=column.request_type, help=column.help)


def plan_command(column: ColumnSpec) -> Callable[..., None]:
    """Return the function that runs `prep plan NAME`. Its parameters are the column's settings and plan request."""

    def plan(settings: Any, request: PlanRequest) -> None:
        with Activity("planning"):
            from clipmill.prep.core.data_folder import require_data_folder
            from clipmill.prep.core.report import show, with_file_problems
            from clipmill.prep.core.work import work_of

            work, data_dir = work_of(column), require_data_folder(request.data)
            # Probe sources on this machine: workers of a cluster must not write without a lock, which a dry run lacks.
            run_request = column.request_type(data=request.data, engine="processes", trial=request.trial)
            column_plan = work.plan(data_dir, settings, run_request)
            if request.explain is not None and work.explain is not None:
                report = work.explain(column_plan, request.explain)
            else:
                report = work.plan_report(column_plan)
                report = with_file_problems(report, column, column_plan.variant_dir, data_dir=data_dir)
        try:
            work.require(settings)
        except UserError as error:  # another machine may run the plan, so this is not an error
            warning = f"warning: `prep {column.command}` cannot start on this machine: {error}"
            sys.stderr.write("\n".join([warning, *error.__notes__, ""]))
        show(report, json=request.json)

    help = column.plan_help or (
        f"Print what `prep {column.command}` would do with the same settings, and why (dry run).\n\n"
        f"Example:\n\n    prep plan {column.name}\n"
    )
    return _as_command(plan, column, request=import_object(column.plan_request), help=help)


def _as_command(function: Callable[..., None], column: ColumnSpec, *, request: type, help: str) -> Callable[..., None]:
    """Set the annotations, defaults and docstring of a function. cyclopts builds the command from them."""
    kinds = {"settings": column.settings, "request": request}
    has_defaults = all(field.default is not MISSING for field in fields(column.settings))
    function.__annotations__ = {name: Annotated[kind, Parameter(name="*")] for name, kind in kinds.items()}
    function.__defaults__ = (column.settings(), request()) if has_defaults else (request(),)
    function.__doc__ = help
    return function


def retry_column(column: ColumnSpec, stored: StoredRecipe, *, weights: str | None, request: Request) -> None:
    """Retry the failures of a variant with the settings and flags of its last run.

    Args:
        stored: Recipe, merged with the request of the last run (`variants.stored_request`).
        weights: Path of local weights; None for the weights of the last run.
        request: Flags of `prep retry`. A flag that is None takes its value from the last run.

    Raises:
        UserError: The recipe was written by a different version. See also `make_column`.
        FailedWork: See `make_column`.
    """
    kind = column.request_type
    names = {field.name for field in fields(kind)}
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    flags = {name: value for name, value in values.items() if value is not None and name in names}
    settings = column.stored_settings(stored, weights or stored.get(WEIGHTS))
    make_column(column, settings, kind(**{**column.kept_flags(stored), **flags}))


def make_column(column: ColumnSpec, settings: Any, request: Request) -> None:
    """Plan and make a column, and print the report of the run.

    Raises:
        UserError: The request is invalid, or this machine lacks something that the settings need.
        FailedWork: The run gave up (exit code 3 if object storage denied access, otherwise 1), or more videos failed
            than `--max-failures` allows. Failures that an earlier run reported and that this run had no reason to retry
            do not count.
    """
    from clipmill.prep.core.data_folder import lock_for_writing, require_data_folder
    from clipmill.prep.core.failure_list import FAILURES_FILE
    from clipmill.prep.core.parts import Part, register_part
    from clipmill.prep.core.report import show, with_ending
    from clipmill.prep.core.work import Report, work_of

    budget = parse_budget(request.max_failures)
    request.check()
    with request.monitoring.begin(), Activity("planning") as activity:
        work = work_of(column)
        part = None if request.part is None else Part.parse(request.part)
        data_dir = require_data_folder(request.data)
        work.require(settings)
        with (
            lock_for_writing(data_dir, column=column.name)
            if part is None
            else register_part(data_dir, part, column=column.name) as part_run
        ):
            plan = work.plan(data_dir, settings, replace(request, part_run=part_run))
            activity.say("", work=column.activity)
            summary = work.run(plan, settings, request, part_run)
            assert part_run is None or part_run.is_last is not None, f"{column.package} does not run its plan in parts"
        list_path = plan.variant_dir / FAILURES_FILE
        report = work.summary_report(summary, settings, list_path)
        if part_run is not None:
            report = Report(f"{report.text}\n{part_run.line()}", {**report.values, "part": part_run.values()})
        report = with_ending(
            report,
            column,
            plan.variant_dir,
            data=request.data,
            num_videos=plan.num_videos,
            has_ended=part_run is None or bool(part_run.is_last),
            gave_up=summary.gave_up is not None,
        )
    show(report, json=request.json)
    if summary.gave_up is not None:
        raise FailedWork(
            f"{summary.gave_up}; finished work is kept; run the same command again to resume",
            exit_code=summary.exit_code,
        )
    # If the variant is empty or not current, the run has not succeeded, so known failures count too.
    is_usable = report.values["current"] == plan.variant_dir.name and report.values["total_bytes"] > 0
    unchanged_failures = summary.unchanged if is_usable else ()
    new_failures = [failure for failure in summary.failures if failure not in unchanged_failures]
    if unchanged_failures:
        videos = count_noun(len({failure.video_id for failure in unchanged_failures}), "video")
        sys.stderr.write(f"not counted: {videos} whose failures an earlier run reported, listed in {list_path}\n")
    num_videos = len({failure.video_id for failure in new_failures})
    failed_text = f"{num_videos} of {count_noun(plan.num_videos, 'video')}"
    # If spans or samples failed rather than complete videos, also report how many.
    sample = column.sample
    if sample != "video" and any(failure.key is not None for failure in new_failures):
        failed_text = f"{count_noun(len(new_failures), 'span' if column.is_first else sample)} in {failed_text}"
    if num_videos > budget(plan.num_videos):
        raise FailedWork(f"{failed_text}; failures are listed in {list_path}")
    if new_failures:
        sys.stderr.write(f"failed, within --max-failures {request.max_failures}: {failed_text}\n")
