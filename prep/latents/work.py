"""The functions behind the column `latents`."""

import shlex
from dataclasses import replace
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import num_captions_of
from clipmill.prep.core.column import VIDEO
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork
from clipmill.prep.engines.choice import open_engine, resolve_gpus_per_worker, threads_per_worker
from clipmill.prep.latents.column import BATCH
from clipmill.prep.latents.plan import LatentsPlan, latents_job, make_latents_plan, pending_latents
from clipmill.prep.latents.recipe import LatentsSettings, resolve
from clipmill.prep.latents.report import latents_report, latents_summary
from clipmill.shards.dataset import current_variant

_WORKER_GB = 3.5  # measured (benchmarks/README.md): Stable Diffusion's VAE, batch of 16 on a CPU: 3.0 GB


def _plan(data_dir: Path, settings: LatentsSettings, request: Request) -> LatentsPlan:
    video = current_variant(data_dir, VIDEO)
    if video is None:
        hint = f"create them first: prep chunk --len 15s --data {shlex.quote(str(data_dir))}"
        raise UserError(f"{data_dir} has no chunks", hint=hint)
    recipe = resolve(settings, video=video)
    request.require_variant(recipe.variant, command=f"prep latents --vae {settings.vae}")
    return make_latents_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: LatentsPlan, settings: LatentsSettings, request: Request, part_run: PartRun | None) -> Summary:
    # Detecting GPUs takes seconds, so a run without work skips it.
    gpus_per_worker = 0.0
    if any(shard.has_work for shard in plan.shards):
        gpus_per_worker = resolve_gpus_per_worker(request.num_gpus, address=request.cluster)
    engine = open_engine(
        request.engine,
        address=request.cluster,
        workers=request.workers,
        gpus_per_worker=gpus_per_worker,
        execution=request.execution,
        memory_gb=_WORKER_GB,
    )
    job = latents_job(
        plan,
        device="cuda" if gpus_per_worker else "cpu",
        batch=request.batch or BATCH,
        num_threads=threads_per_worker(
            request.workers,
            gpus_per_worker=gpus_per_worker,
            address=request.cluster,
            execution=request.execution,
        ),
    )
    return execute(replace(job, lag_limit_s=request.lag_limit_s), engine, part_run=part_run)


def _next_command(data: Path) -> list[str]:
    task = "dual-encoder" if num_captions_of(data) else "mae"
    return ["train", task, "--shards", str(data), "--input", "latents", "--out", "runs/latents"]


WORK = ColumnWork(
    plan=_plan,
    run=_run,
    plan_report=latents_report,
    summary_report=lambda summary, settings, listed: latents_summary(summary, vae=settings.vae, listed=listed),
    pending=pending_latents,
    extra_files=(MERGED_TABLE,),
    next_command=_next_command,
)
