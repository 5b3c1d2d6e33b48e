"""The column `video`: the commands `prep chunk` and `prep plan`, and the `ColumnSpec`."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.help_text import FIRST_RUN
from clipmill.prep.core.column import MERGED_TABLE, VIDEO, ColumnSpec, Pending, changed_flags
from clipmill.prep.core.make import (
    Address,
    Data,
    EngineName,
    ExecutionFlags,
    Json,
    MaxFailures,
    PartOf,
    Request,
    ScratchSize,
    Workers,
    make_column,
    plan_column,
)
from clipmill.prep.engines.execution import Execution
from clipmill.prep.sources.detector import DEFAULT_DETECTOR
from clipmill.prep.video.recipe import NAMED_RECIPES, Recipe, recipe_from_dict, settings_line
from clipmill.prep.video.settings import SHOT_SETTINGS

if TYPE_CHECKING:
    from clipmill.prep.core.pages import PageRequest
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.run import Summary
    from clipmill.prep.video.planning import Planned
    from clipmill.shards.reader import CommittedShard, Variant

_WORKER_GB = 0.5  # measured (benchmarks/README.md): a source of 2160 lines takes 0.27 GB
Settings = Annotated[Recipe, Parameter(name="*")]


def chunk(
    recipe: Settings = Recipe(),  # noqa: B008 - frozen
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    execution: ExecutionFlags = Execution(),  # noqa: B008 - frozen
    workers: Workers = None,
    part: PartOf = None,
    max_failures: MaxFailures = "0",
    scratch_size: ScratchSize = None,
    json: Json = False,
) -> None:
    """Encode the videos of the manifest as chunks, and write them to WebDataset shards.

    Chunks have the length --len or, with --cut shots, begin and end at shot boundaries. Each run encodes only chunks
    that are new, changed, missing or damaged. Other settings create another variant, and the existing one is kept.

    Example:

        prep chunk --len 15s --crf 21
    """
    request = Request(
        data=data,
        engine=engine,
        address=address,
        execution=execution,
        workers=workers,
        part=part,
        max_failures=max_failures,
        scratch_size=scratch_size,
        json=json,
    )
    make_column(COLUMN, recipe, request)


def plan(
    recipe: Settings = Recipe(),  # noqa: B008 - frozen
    *,
    data: Data = Path("data"),
    explain: Annotated[
        str | None,
        FIRST_RUN,
        Parameter(help="Chunk key or video ID to explain: its state in the plan, and the reason."),
    ] = None,
    json: Json = False,
) -> None:
    """Print what `prep chunk` would do with the same settings, why, and the estimated cost (dry run).

    Example:

        prep plan --bitrate 800k
    """
    if explain is None:
        plan_column(COLUMN, recipe, data=data, json=json)
        return
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.prep.core.report import show
    from clipmill.prep.video.report import explanation

    planned = _plan(require_data_folder(data), recipe, Request(data=data))
    show(explanation(planned, explain), json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    make_column(COLUMN, recipe_from_dict(stored), request)


def _require(recipe: Recipe) -> None:
    from clipmill.prep.video.ffmpeg import find_ffmpeg, require_encoder

    ffmpeg = find_ffmpeg()
    if ffmpeg.passed_over:
        sys.stderr.write(f"using the ffmpeg of the imageio-ffmpeg package: {ffmpeg.passed_over} is too old\n")
    require_encoder(ffmpeg, recipe.settings().codec)


def _plan(data_dir: Path, recipe: Recipe, request: Request) -> "Planned":
    from clipmill.prep.video.ffmpeg import find_ffmpeg
    from clipmill.prep.video.planning import make_plan
    from clipmill.prep.video.recipe import resolve

    resolved = resolve(recipe, ffmpeg_version=find_ffmpeg().version)
    return make_plan(data_dir, resolved, retry_codes=request.retry_codes)


def _run(plan: "Planned", recipe: Recipe, request: Request) -> "Summary":
    from clipmill.prep.core.run import execute
    from clipmill.prep.engines.choice import open_engine
    from clipmill.prep.video.planning import chunk_job, with_shots
    from clipmill.prep.video.report import with_cutting
    from clipmill.prep.video.scratch import remove_abandoned

    engine = open_engine(
        request.engine,
        address=request.cluster,
        workers=request.workers,
        execution=request.execution,
        memory_gb=_WORKER_GB,
    )
    plan = with_shots(plan, engine)
    job = replace(chunk_job(plan, scratch_bytes=request.scratch_bytes), lag_limit_s=request.lag_limit_s)
    summary = with_cutting(execute(job, engine, part_run=request.part_run), plan)
    remove_abandoned()  # left by workers that were lost, in this run or an earlier one
    return summary


def _plan_report(plan: "Planned") -> "Report":
    from clipmill.prep.video.report import plan_report

    return plan_report(plan)


def _summary_report(summary: "Summary", recipe: Recipe, listed: Path) -> "Report":
    from clipmill.prep.video.report import chunk_summary

    return chunk_summary(summary, listed=listed)


def _flags(stored: Mapping[str, Any]) -> list[str]:
    settings = recipe_from_dict(stored).settings()
    names = [name for name, values in NAMED_RECIPES.items() if values["codec"] == settings.codec]
    name, codec = (names[0], None) if names else (Recipe().recipe, settings.codec)
    # The defaults that depend on the GOP layout, and the default layout itself.
    defaults = asdict(Recipe(recipe=name, codec=codec, gop=settings.gop).settings())
    by_itself = Recipe(recipe=name, codec=codec).settings()
    defaults |= {"len": settings.len, "gop": by_itself.gop, "codec": by_itself.codec if names else None}
    if settings.cut == "shots":
        of_shots = Recipe(len=settings.len, fps=settings.fps, cut="shots", detector=settings.detector).settings()
        defaults |= {name: getattr(of_shots, name) for name in SHOT_SETTINGS} | {"detector": DEFAULT_DETECTOR}
    chosen = [] if name == Recipe().recipe else ["--recipe", name]
    return ["--len", settings.len, *chosen, *changed_flags(asdict(settings), defaults)]


def _pending(data_dir: Path, variant: "Variant") -> Pending:
    from clipmill.prep.video.planning import pending_chunks

    return pending_chunks(data_dir, variant)


def _layout_file(stored: Mapping[str, Any]) -> str:
    from clipmill.prep.video.layout import layout_file

    return layout_file(recipe_from_dict(stored).settings())


def _sample_report(shard: "CommittedShard", row: int, data_dir: Path) -> "Report":
    from clipmill.prep.video.inspection import chunk_report

    return chunk_report(shard, row, data_dir=data_dir)


def _write_page(variant: "Variant", request: "PageRequest") -> "Report":
    from clipmill.prep.video.page.write import write_chunk_page

    return write_chunk_page(variant, request)


def _next_step(data: Path) -> list[str]:
    return ["train", "quickstart", str(data)]


COLUMN = ColumnSpec(
    name=VIDEO,
    package="clipmill.prep.video",
    checked_noun="decoded frame",
    make_command=chunk,
    plan_command=plan,
    require=_require,
    plan=_plan,
    run=_run,
    plan_report=_plan_report,
    summary_report=_summary_report,
    flags=_flags,
    settings_line=settings_line,
    retry=_retry,
    pending=_pending,
    check_sample="clipmill.prep.video.check:check_video",
    layout_file=_layout_file,
    sample_report=_sample_report,
    write_page=_write_page,
    next_step=_next_step,
    extra_files=(MERGED_TABLE,),
)
