"""The column `text`: its commands and its `ColumnSpec`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.prep.core.column import MERGED_TABLE, ColumnSpec, ExtraFolder, Pending
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
from clipmill.prep.text.recipe import BANK_FOLDER, BLOCK_FILE, TEXT, TextRecipe, text_recipe_from_dict

if TYPE_CHECKING:
    from clipmill.prep.core.report import Report
    from clipmill.prep.text.plan import TextPlan
    from clipmill.prep.text.report import TextSummary
    from clipmill.shards.reader import Variant

Settings = Annotated[TextRecipe, Parameter(name="*")]
Batch = Annotated[
    int | None,
    EXECUTION,
    Parameter(help="Batch size of the text encoder, 1 or more. Default: 32 on a CPU, 256 on a GPU."),
]
_WORKER_GB = 2.5  # measured (benchmarks/README.md): CLIP ViT-B-32, batch of 32 on a CPU: 2.1 GB
_CPU_BATCH, _GPU_BATCH = 32, 256  # batches are padded to full size, which on a CPU costs more than larger batches gain


def text(
    recipe: Settings,
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    execution: ExecutionFlags = Execution(),  # noqa: B008 - frozen
    workers: ModelWorkers = None,
    part: PartOf = None,
    num_gpus: NumGpus = None,
    batch: Batch = None,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Encode each unique caption of the manifest once with an open_clip text encoder.

    Each run encodes only new captions. Only the manifest is needed, no chunks. Another text encoder creates another
    variant, and the existing one is kept.

    Example:

        prep text --clip ViT-B-32:laion2b_s34b_b79k
    """
    if batch is not None and batch < 1:
        raise UserError(f"--batch {batch} is out of range", hint="give 1 or more, or omit it")
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
    make_column(COLUMN, recipe, request)


def plan_text(recipe: Settings, *, data: Data = Path("data"), json: Json = False) -> None:
    """Print what `prep text` would do with the same settings, and why (dry run).

    Example:

        prep plan text --clip ViT-B-32:laion2b_s34b_b79k
    """
    plan_column(COLUMN, recipe, data=data, json=json)


def _retry(stored: Mapping[str, Any], weights: str | None, request: Request) -> None:
    recipe = text_recipe_from_dict(stored)
    clip = recipe.clip if weights is None else f"{recipe.clip.partition(':')[0]}:{weights}"
    make_column(COLUMN, TextRecipe(clip=clip, where=recipe.where), replace(request, only_variant=recipe.variant))


def _plan(data_dir: Path, recipe: TextRecipe, request: Request) -> "TextPlan":
    from clipmill.prep.text.plan import make_text_plan
    from clipmill.prep.text.recipe import resolve

    resolved = resolve(recipe)
    request.require_variant(resolved.variant, command=f"prep text --clip {recipe.clip}")
    return make_text_plan(data_dir, resolved, retry_codes=request.retry_codes)


def _run(plan: "TextPlan", recipe: TextRecipe, request: Request) -> "TextSummary":
    from clipmill.prep.engines.choice import open_engine, resolve_gpus_per_worker
    from clipmill.prep.text.blocks import TowerUse
    from clipmill.prep.text.run import run_text

    # Detecting GPUs takes seconds, so a run without work skips it.
    gpus_per_worker = 0.0
    if any(shard.has_work for shard in plan.shards):
        gpus_per_worker = resolve_gpus_per_worker(request.num_gpus, address=request.cluster)
    use = TowerUse(
        recipe.clip,
        plan.recipe.clip_sha256,
        batch=request.batch or (_GPU_BATCH if gpus_per_worker else _CPU_BATCH),
        device="cuda" if gpus_per_worker else "cpu",
    )
    engine = open_engine(
        request.engine,
        address=request.cluster,
        workers=request.workers,
        gpus_per_worker=gpus_per_worker,
        execution=request.execution,
        memory_gb=_WORKER_GB,
    )
    return run_text(
        plan,
        use,
        engine,
        part_run=request.part_run,
        lag_limit_s=request.lag_limit_s,
    )


def _plan_report(plan: "TextPlan") -> "Report":
    from clipmill.prep.text.report import text_report

    return text_report(plan)


def _summary_report(summary: "TextSummary", recipe: TextRecipe, listed: Path) -> "Report":
    from clipmill.prep.text.report import text_summary

    return text_summary(summary, listed=listed)


def _flags(stored: Mapping[str, Any]) -> list[str]:
    recipe = text_recipe_from_dict(stored)
    return ["--clip", recipe.clip, *(() if recipe.where is None else ("--where", recipe.where))]


def _pending(data_dir: Path, variant: "Variant") -> Pending:
    from clipmill.prep.text.plan import pending_text

    return pending_text(data_dir, variant)


def _layout_file(stored: Mapping[str, Any]) -> str:
    return f"{TEXT}.parquet"


def _is_whole_block(path: Path) -> bool:
    from clipmill.prep.text.bank import is_whole_block

    return is_whole_block(path)


def _next_step(data: Path) -> list[str]:
    return ["train", "dual-encoder", "--shards", str(data), "--text-tower", "frozen", "--out", "runs/frozen-text"]


COLUMN = ColumnSpec(
    name=TEXT,
    package="clipmill.prep.text",
    sample="video",
    has_hours=False,
    make_command=text,
    plan_command=plan_text,
    plan=_plan,
    run=_run,
    plan_report=_plan_report,
    summary_report=_summary_report,
    flags=_flags,
    retry=_retry,
    pending=_pending,
    check_sample="clipmill.prep.text.check:check_text",
    layout_file=_layout_file,
    extra_folders=(ExtraFolder(BANK_FOLDER, BLOCK_FILE, _is_whole_block),),
    extra_files=(MERGED_TABLE,),
    next_step=_next_step,
)
