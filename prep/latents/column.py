"""The column `latents`: its commands and its `ColumnSpec`."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.prep.core.column import MERGED_TABLE, VIDEO, ColumnSpec, Pending, changed_flags
from clipmill.prep.core.make import (
    EXECUTION,
    Address,
    Data,
    EngineName,
    ExecutionFlags,
    Json,
    MaxFailures,
    ModelWorkers,
    NumGpus,
    PartOf,
    Request,
    make_column,
    plan_column,
)
from clipmill.prep.engines.execution import Execution
from clipmill.prep.latents.recipe import LATENTS, LatentsSettings, latents_recipe_from_dict

if TYPE_CHECKING:
    from clipmill.prep.core.report import Report
    from clipmill.prep.core.run import Summary
    from clipmill.prep.latents.plan import LatentsPlan
    from clipmill.shards.reader import Variant

Settings = Annotated[LatentsSettings, Parameter(name="*")]
Batch = Annotated[int, EXECUTION, FIRST_RUN, Parameter(help="Batch size of the VAE in frames, 1 or more.")]
_WORKER_GB = 3.5  # measured (benchmarks/README.md): Stable Diffusion's VAE, batch of 16 on a CPU: 3.0 GB
_BATCH = 16


def latents(
    settings: Settings,
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    execution: ExecutionFlags = Execution(),  # noqa: B008 - frozen
    workers: ModelWorkers = None,
    part: PartOf = None,
    num_gpus: NumGpus = None,
    batch: Batch = _BATCH,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Encode frames of the chunks with a VAE, and write the latents to shards.

    It encodes the chunks of the current video variant; each run encodes only what is new, changed, missing or damaged.
    It may run while `prep chunk` is running; a later run encodes the remaining chunks. After the chunks have been
    re-encoded, run it again: until then, the existing latents are kept.

    Example:

        prep latents --vae stabilityai/sd-vae-ft-mse --crop random
    """
    if batch < 1:
        raise UserError(
            f"--batch {batch} is out of range", hint="give 1 or more, for example 16 on a CPU or 64 on a large GPU"
        )
    request = Request(
        data=data,
        engine=engine,
        address=address,
        execution=execution,
        workers=workers,
        part=part,
        num_gpus=num_gpus,
        batch=batch,
        max_failures=max_failures,
        json=json,
    )
    make_column(COLUMN, settings, request)


def plan_latents(settings: Settings, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep latents` would do with the same settings, and why (dry run).

    Example:

        prep plan latents --vae stabilityai/sd-vae-ft-mse
    """
    plan_column(COLUMN, settings, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = latents_recipe_from_dict(stored)
    settings = replace(recipe.settings, vae=weights or recipe.settings.vae)
    make_column(COLUMN, settings, replace(request, only_variant=recipe.variant))


def _plan(data_dir: Path, settings: LatentsSettings, request: Request) -> "LatentsPlan":
    from clipmill.prep.latents.plan import make_latents_plan
    from clipmill.prep.latents.recipe import resolve
    from clipmill.shards.dataset import current_variant

    video = current_variant(data_dir, VIDEO)
    if video is None:
        hint = f"create them first: prep chunk --len 15s --data {shlex.quote(str(data_dir))}"
        raise UserError(f"{data_dir} has no chunks", hint=hint)
    recipe = resolve(settings, video=video)
    request.require_variant(recipe.variant, command=f"prep latents --vae {settings.vae}")
    return make_latents_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: "LatentsPlan", settings: LatentsSettings, request: Request) -> "Summary":
    from clipmill.prep.core.run import execute
    from clipmill.prep.engines.choice import open_engine, resolve_gpus_per_worker, threads_per_worker
    from clipmill.prep.latents.plan import latents_job

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
        batch=request.batch or _BATCH,
        num_threads=threads_per_worker(
            request.workers,
            gpus_per_worker=gpus_per_worker,
            address=request.cluster,
            execution=request.execution,
        ),
    )
    return execute(replace(job, lag_limit_s=request.lag_limit_s), engine, part_run=request.part_run)


def _plan_report(plan: "LatentsPlan") -> "Report":
    from clipmill.prep.latents.report import latents_report

    return latents_report(plan)


def _summary_report(summary: "Summary", settings: LatentsSettings, listed: Path) -> "Report":
    from clipmill.prep.latents.report import latents_summary

    return latents_summary(summary, vae=settings.vae, listed=listed)


def _flags(stored: Mapping[str, Any]) -> list[str]:
    settings = latents_recipe_from_dict(stored).settings
    return ["--vae", settings.vae, *changed_flags(asdict(settings), asdict(LatentsSettings(vae=settings.vae)))]


def _pending(data_dir: Path, variant: "Variant") -> Pending:
    from clipmill.prep.latents.plan import pending_latents

    return pending_latents(data_dir, variant)


def _next_step(data: Path) -> list[str]:
    from clipmill.manifests.store import num_captions_of

    task = "dual-encoder" if num_captions_of(data) else "mae"
    return ["train", task, "--shards", str(data), "--input", "latents", "--out", "runs/latents"]


COLUMN = ColumnSpec(
    name=LATENTS,
    package="clipmill.prep.latents",
    make_command=latents,
    plan_command=plan_latents,
    plan=_plan,
    run=_run,
    plan_report=_plan_report,
    summary_report=_summary_report,
    flags=_flags,
    retry=_retry,
    pending=_pending,
    check_sample="clipmill.prep.latents.sample:check_latents",
    extra_files=(MERGED_TABLE,),
    next_step=_next_step,
)
