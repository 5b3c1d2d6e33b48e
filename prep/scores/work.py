"""The functions behind the column `scores`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key, split_key
from clipmill.prep.core.chunk_shards import current_chunks
from clipmill.prep.core.column import data_flags
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.work import ColumnWork, ExtraFile
from clipmill.prep.scores.page import write_scores_page
from clipmill.prep.scores.plan import ScoresPlan, make_scores_plan, pending_scores, scores_job, table_problem
from clipmill.prep.scores.recipe import SCORES, ScoresSettings, resolve
from clipmill.prep.scores.report import ScoresSummary, scores_report, scores_summary
from clipmill.shards.reader import Variant
from clipmill.shards.scores import CHUNKS_FILE, open_scores, publish_score_table

_KEY = ("video_id", "start_ms")
_WORKER_GB = 0.5  # measured (benchmarks/README.md): 0.16 GB


def _plan(data_dir: Path, settings: ScoresSettings, request: Request) -> ScoresPlan:
    recipe = resolve(settings, video=current_chunks(data_dir))
    request.require_variant(recipe.variant, command="prep scores")
    return make_scores_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: ScoresPlan, settings: ScoresSettings, request: Request, part_run: PartRun | None) -> ScoresSummary:
    engine = request.open_engine(memory_gb=_WORKER_GB)
    job = replace(scores_job(plan), lag_limit_s=request.lag_limit_s, asked=request.asked_engine)
    summary = execute(job, engine, part_run=part_run)
    if part_run is not None and not part_run.is_last:
        return ScoresSummary(**vars(summary))
    return publish_table(summary, plan.variant_dir)


def publish_table(summary: Summary, folder: Path) -> ScoresSummary:
    """Write the merged table of a variant at the end of a run, unless it is up to date."""
    variant = Variant(folder)
    is_needed = table_problem(variant) is not None
    if is_needed:
        publish_score_table(variant)
    return ScoresSummary(**vars(summary), is_table_written=is_needed)


def _sample_facts(data_dir: Path, key: str) -> dict[str, Any]:
    """Return the key of the chunk that a chunk nearly duplicates; None if it is unique, nothing if that is unknown."""
    video_id, start_ms = split_key(key)
    try:
        table = open_scores(data_dir, columns=("video_id", "start_ms", "duplicate_of")).table
    except UserError:
        return {}
    is_chunk = pc.and_(pc.equal(table["video_id"], video_id), pc.equal(table["start_ms"], start_ms))
    first = [row for row in table["duplicate_of"].filter(is_chunk).to_pylist() if row >= 0]
    return {"duplicate_of": next((chunk_key(*(table[name][row].as_py() for name in _KEY)) for row in first), None)}


WORK = ColumnWork(
    plan=_plan,
    run=_run,
    plan_report=scores_report,
    summary_report=lambda summary, settings, listed: scores_summary(summary, listed=listed),
    pending=pending_scores,
    extra_files=(ExtraFile(CHUNKS_FILE, table_problem),),
    sample_facts=_sample_facts,
    write_page=write_scores_page,
    next_command=lambda data: ["prep", "inspect", "--column", SCORES, "--html", "scores.html", *data_flags(data)],
)
