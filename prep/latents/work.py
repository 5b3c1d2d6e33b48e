"""The functions behind the column `latents`."""

import shlex
from dataclasses import replace
from pathlib import Path

from clipmill.manifests.store import num_captions_of
from clipmill.prep.core.chunk_shards import current_chunks
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import execute
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork
from clipmill.prep.engines.choice import threads_per_worker
from clipmill.prep.latents.column import BATCH
from clipmill.prep.latents.plan import LatentsPlan, latents_job, make_latents_plan, pending_latents
from clipmill.prep.latents.recipe import LatentsSettings, resolve
from clipmill.prep.latents.report import LatentsSummary, latents_report, latents_summary
from clipmill.prep.latents.trial import run_trial

_WORKER_GB = 3.5  # measured (benchmarks/README.md): Stable Diffusion's VAE, batch of 16 on a CPU: 3.0 GB
_MARGIN = 1.2


def _plan(data_dir: Path, settings: LatentsSettings, request: Request) -> LatentsPlan:
    recipe = resolve(settings, video=current_chunks(data_dir))
    request.require_variant(recipe.variant, command=shlex.join(["prep", "latents", "--vae", settings.vae]))
    plan = make_latents_plan(data_dir, recipe, retry_codes=request.retry_codes)
    plan.require_segments()
    return plan


def _run(plan: LatentsPlan, settings: LatentsSettings, request: Request, part_run: PartRun | None) -> LatentsSummary:
    gpus_per_worker = request.gpus_per_worker(has_work=any(shard.has_work for shard in plan.shards))
    batch = request.batch or BATCH
    engine = request.open_engine(
        memory_gb=worker_memory_gb(plan, request, on_cpu=not gpus_per_worker, batch=batch),
        gpus_per_worker=gpus_per_worker,
    )
    job = latents_job(
        plan,
        device="cuda" if gpus_per_worker else "cpu",
        batch=batch,
        num_threads=threads_per_worker(
            request.workers,
            gpus_per_worker=gpus_per_worker,
            address=request.cluster,
            execution=request.execution,
        ),
    )
    summary = execute(replace(job, lag_limit_s=request.lag_limit_s), engine, part_run=part_run)
    return LatentsSummary(**vars(summary), left_out=plan.left_out)


def worker_memory_gb(plan: LatentsPlan, request: Request, *, on_cpu: bool, batch: int) -> float:
    """Return the memory that a worker reserves on a cluster.

    For a VAE of videos on CPUs it is what the segments of a batch take in a trial on this machine, with a margin.
    """
    recipe, has_work = plan.recipe, any(shard.has_work for shard in plan.shards)
    is_asked = request.cluster is not None and request.execution.task_memory is None
    if is_asked and on_cpu and has_work and recipe.latent_frames is not None:
        trial = run_trial(plan, num_gpus=0)
        if trial is not None and trial.segment_bytes is not None:
            return _MARGIN * trial.segment_bytes * recipe.units_per_batch(batch) / 1e9
    return _WORKER_GB


def _next_command(data: Path) -> list[str]:
    task = "dual-encoder" if num_captions_of(data) else "mae"
    return ["train", task, "--shards", str(data), "--input", "latents", "--out", "runs/latents"]


WORK = ColumnWork(
    plan=_plan,
    run=_run,
    plan_report=latents_report,
    summary_report=lambda summary, settings, listed: latents_summary(summary, settings, listed=listed),
    pending=pending_latents,
    extra_files=(MERGED_TABLE,),
    next_command=_next_command,
)
