"""The functions behind the column `text`."""

import shlex
from pathlib import Path

from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.request import Request
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, ExtraFolder
from clipmill.prep.text.bank import is_whole_block
from clipmill.prep.text.blocks import TowerUse
from clipmill.prep.text.plan import TextPlan, make_text_plan, pending_text
from clipmill.prep.text.recipe import BANK_FOLDER, BLOCK_FILE, TEXT, TextRecipe
from clipmill.prep.text.report import TextSummary, text_report, text_summary
from clipmill.prep.text.run import run_text
from clipmill.prep.text.t5 import resolve_t5
from clipmill.prep.text.tower import resolve

_WORKER_GB = 2.5  # measured (benchmarks/README.md): CLIP ViT-B-32, batch of 32 on a CPU: 2.1 GB
_CPU_BATCH, _GPU_BATCH = 32, 256  # batches are padded to full size, which on a CPU costs more than larger batches gain


def _plan(data_dir: Path, recipe: TextRecipe, request: Request) -> TextPlan:
    recipe.require_encoder()
    resolved = resolve_t5(recipe) if recipe.clip is None else resolve(recipe)
    request.require_variant(resolved.variant, command=f"prep text {shlex.join(recipe.flags)}")
    return make_text_plan(data_dir, resolved, retry_codes=request.retry_codes)


def _run(plan: TextPlan, recipe: TextRecipe, request: Request, part_run: PartRun | None) -> TextSummary:
    gpus_per_worker = request.gpus_per_worker(has_work=any(shard.has_work for shard in plan.shards))
    use = TowerUse(
        recipe,
        plan.recipe.encoder_sha256,
        batch=request.batch or (_GPU_BATCH if gpus_per_worker and recipe.clip is not None else _CPU_BATCH),
        device="cuda" if gpus_per_worker else "cpu",
    )
    engine = request.open_engine(memory_gb=_WORKER_GB, gpus_per_worker=gpus_per_worker)
    return run_text(plan, use, engine, part_run=part_run, lag_limit_s=request.lag_limit_s, asked=request.asked_engine)


WORK = ColumnWork(
    plan=_plan,
    run=_run,
    plan_report=text_report,
    summary_report=lambda summary, recipe, listed: text_summary(summary, listed=listed),
    pending=pending_text,
    layout_file=lambda stored: f"{TEXT}.parquet",
    extra_folders=(ExtraFolder(BANK_FOLDER, BLOCK_FILE, is_whole_block),),
    extra_files=(MERGED_TABLE,),
    next_command=lambda data: [
        *("train", "dual-encoder", "--shards", str(data), "--text-tower", "frozen", "--out", "runs/frozen-text")
    ],
)
