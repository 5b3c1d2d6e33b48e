"""The functions behind the column `video`."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clipmill.manifests.imported import late
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork
from clipmill.prep.video.ffmpeg import find_ffmpeg, require_encoder
from clipmill.prep.video.layout import layout_file
from clipmill.prep.video.plan_inputs import Planned, chunk_job, make_plan, pending_chunks, with_shots
from clipmill.prep.video.recipe import Recipe, recipe_from_dict, resolve
from clipmill.prep.video.report import (
    audio_lines,
    chunk_summary,
    other_settings_lines,
    with_cutting,
)
from clipmill.prep.video.scratch import remove_abandoned

_WORKER_GB = 0.5  # measured (benchmarks/README.md): a source of 2160 lines takes 0.27 GB


def _require(recipe: Recipe) -> None:
    # Only workers import them, but the command says what is missing before it starts any.
    for package in ("av", "ffmpeg"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    ffmpeg = find_ffmpeg()
    if ffmpeg.passed_over:
        sys.stderr.write(f"using the ffmpeg of the imageio-ffmpeg package: {ffmpeg.passed_over} is too old\n")
    require_encoder(ffmpeg, recipe.settings().codec)


def _plan(data_dir: Path, recipe: Recipe, request: Request) -> Planned:
    resolved = resolve(recipe, ffmpeg_version=find_ffmpeg().version)
    engine = None if request.cluster is None else request.open_engine(memory_gb=_WORKER_GB)
    return make_plan(data_dir, resolved, retry_codes=request.retry_codes, engine=engine)


def _run(plan: Planned, recipe: Recipe, request: Request, part_run: PartRun | None) -> Summary:
    engine = request.open_engine(memory_gb=_WORKER_GB)
    for line in (*other_settings_lines(plan), *audio_lines(plan)):
        sys.stderr.write(f"{line}\n")
    plan = with_shots(plan, engine)
    job = replace(
        chunk_job(plan, scratch_bytes=request.scratch_bytes),
        lag_limit_s=request.lag_limit_s,
        asked=request.asked_engine,
    )
    summary = with_cutting(execute(job, engine, part_run=part_run), plan)
    remove_abandoned()  # left by workers that were lost, in this run or an earlier one
    return summary


def _layout_file(stored: Mapping[str, Any]) -> str:
    return layout_file(recipe_from_dict(stored).settings())


WORK = ColumnWork(
    require=_require,
    plan=_plan,
    run=_run,
    plan_report=late("clipmill.prep.video.plan_report:plan_report"),
    explain=late("clipmill.prep.video.plan_report:explanation"),
    summary_report=lambda summary, recipe, listed: chunk_summary(summary, listed=listed),
    pending=pending_chunks,
    layout_file=_layout_file,
    extra_files=(MERGED_TABLE,),
    sample_report=late("clipmill.prep.video.inspection:chunk_report"),
    write_page=late("clipmill.prep.video.page.write:write_chunk_page"),
    next_command=lambda data: ["train", "quickstart", str(data)],
)
