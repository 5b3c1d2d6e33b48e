"""The column `scores`: its commands and its `ColumnSpec`."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.column import VIDEO, ColumnSpec, ExtraFile, Pending, changed_flags, data_flags
from clipmill.prep.core.make import (
    Address,
    Data,
    EngineName,
    ExecutionFlags,
    Json,
    MaxFailures,
    PartOf,
    Request,
    Workers,
    make_column,
    plan_column,
)
from clipmill.prep.engines.execution import Execution
from clipmill.prep.scores.recipe import SCORES, ScoresSettings, scores_recipe_from_dict

if TYPE_CHECKING:
    from clipmill.prep.core.pages import PageRequest
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.run import Summary
    from clipmill.prep.scores.plan import ScoresPlan
    from clipmill.prep.scores.report import ScoresSummary
    from clipmill.shards.reader import Variant

_WORKER_GB = 0.5  # measured (benchmarks/README.md): 0.16 GB
Settings = Annotated[ScoresSettings, Parameter(name="*")]
_DEFAULTS = ScoresSettings()
_TABLE_FILE = "chunks.arrow"  # clipmill.shards.scores.CHUNKS_FILE; importing it would make `prep --help` slow


def scores(
    settings: Settings = _DEFAULTS,
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    execution: ExecutionFlags = Execution(),  # noqa: B008 - frozen
    workers: Workers = None,
    part: PartOf = None,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Score the chunks: motion, sharpness, brightness, black and frozen shares, bars, cuts, speech, perceptual hash.

    It scores the chunks of the current video variant; each run scores only what is new, changed, missing or damaged.
    After the chunks have been re-encoded, run it again: until then, the existing scores are kept.

    Example:

        prep scores
    """
    request = Request(
        data=data,
        engine=engine,
        address=address,
        execution=execution,
        workers=workers,
        part=part,
        max_failures=max_failures,
        json=json,
    )
    make_column(COLUMN, settings, request)


def plan_scores(settings: Settings = _DEFAULTS, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep scores` would do with the same settings, and why (dry run).

    Example:

        prep plan scores
    """
    plan_column(COLUMN, settings, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = scores_recipe_from_dict(stored)
    make_column(COLUMN, recipe.settings, replace(request, only_variant=recipe.variant))


def _plan(data_dir: Path, settings: ScoresSettings, request: Request) -> "ScoresPlan":
    from clipmill.prep.scores.plan import make_scores_plan
    from clipmill.prep.scores.recipe import resolve
    from clipmill.shards.dataset import current_variant

    video = current_variant(data_dir, VIDEO)
    if video is None:
        hint = f"create them first: prep chunk --len 15s --data {shlex.quote(str(data_dir))}"
        raise UserError(f"{data_dir} has no chunks", hint=hint)
    recipe = resolve(settings, video=video)
    request.require_variant(recipe.variant, command="prep scores")
    return make_scores_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: "ScoresPlan", settings: ScoresSettings, request: Request) -> "ScoresSummary":
    from clipmill.prep.core.run import execute
    from clipmill.prep.engines.choice import open_engine
    from clipmill.prep.scores.plan import scores_job

    engine = open_engine(
        request.engine,
        address=request.cluster,
        workers=request.workers,
        execution=request.execution,
        memory_gb=_WORKER_GB,
    )
    job = replace(scores_job(plan), lag_limit_s=request.lag_limit_s)
    summary = execute(job, engine, part_run=request.part_run)
    if request.part_run is not None and not request.part_run.is_last:
        return without_table(summary)
    return publish_table(summary, plan.variant_dir)


def without_table(summary: "Summary") -> "ScoresSummary":
    """Return the summary of a run that leaves the merged table to another part."""
    from clipmill.prep.scores.report import ScoresSummary

    return ScoresSummary(**vars(summary))


def publish_table(summary: "Summary", folder: Path) -> "ScoresSummary":
    """Write the merged table of a variant at the end of a run, unless it is up to date."""
    from clipmill.prep.scores.report import ScoresSummary
    from clipmill.shards.reader import Variant
    from clipmill.shards.scores import publish_score_table

    variant = Variant(folder)
    is_needed = table_problem(variant) is not None
    if is_needed:
        publish_score_table(variant)
    return ScoresSummary(**vars(summary), is_table_written=is_needed)


def table_problem(variant: "Variant") -> str | None:
    """Return why the merged table cannot be used; None if it can, or if the variant has no scores to merge."""
    from clipmill.shards.scores import score_table_problem

    return score_table_problem(variant) if any(commit.files for commit in variant.commits.values()) else None


def _plan_report(plan: "ScoresPlan") -> "Report":
    from clipmill.prep.scores.report import scores_report

    return scores_report(plan)


def _summary_report(summary: "ScoresSummary", settings: ScoresSettings, listed: Path) -> "Report":
    from clipmill.prep.scores.report import scores_summary

    return scores_summary(summary, listed=listed)


def _flags(stored: Mapping[str, Any]) -> list[str]:
    return changed_flags(asdict(scores_recipe_from_dict(stored).settings), asdict(_DEFAULTS))


def _pending(data_dir: Path, variant: "Variant") -> Pending:
    from clipmill.prep.scores.plan import pending_scores

    return pending_scores(data_dir, variant)


def _write_page(variant: "Variant", request: "PageRequest") -> "Report":
    from clipmill.prep.scores.page import write_scores_page

    return write_scores_page(variant, request)


def _next_step(data: Path) -> list[str]:
    return ["prep", "inspect", "--column", SCORES, "--html", "scores.html", *data_flags(data)]


COLUMN = ColumnSpec(
    name=SCORES,
    package="clipmill.prep.scores",
    verb="score",
    has_hours=False,
    make_command=scores,
    plan_command=plan_scores,
    plan=_plan,
    run=_run,
    plan_report=_plan_report,
    summary_report=_summary_report,
    flags=_flags,
    retry=_retry,
    pending=_pending,
    check_sample="clipmill.prep.scores.sample:check_scores",
    write_page=_write_page,
    next_step=_next_step,
    extra_files=(ExtraFile(_TABLE_FILE, table_problem),),
)
