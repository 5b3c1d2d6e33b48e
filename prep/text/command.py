"""`prep text`: the `text` column."""

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manifests.errors import FailedWork, UserError
from prep.core.options import Data, Json
from prep.engines.choice import (
    ModelWorkers,
    NumGpus,
    gpus_of_a_worker,
    open_model_engine,
    require_variant,
    require_workers,
)
from prep.text.recipe import TextRecipe
from prep.video.command import Address, EngineName, MaxFailures, parse_budget

Settings = Annotated[TextRecipe, Parameter(name="*")]
Batch = Annotated[
    int | None, Parameter(help="Texts that the tower gets at a time; by default 32 on a CPU, 256 on a GPU.")
]
_CPU_BATCH, _GPU_BATCH = 32, 256  # batches are filled up, which costs a CPU more than larger ones bring


def text(
    recipe: Settings,
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    workers: ModelWorkers = None,
    num_gpus: NumGpus = None,
    batch: Batch = None,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Encode every distinct caption of the manifest once, by the text tower of a CLIP model.

    Run it again at any time: only new texts are encoded. It needs the manifest alone: chunks may be made meanwhile, or
    never. Other towers make other variants beside the old one.

    Example: prep text --clip ViT-B-32:laion2b_s34b_b79k
    """
    run_texts(
        recipe,
        data=data,
        engine=engine,
        address=address,
        workers=workers,
        num_gpus=num_gpus,
        batch=batch,
        max_failures=max_failures,
        json=json,
    )


def plan_text(
    recipe: Settings,
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Say what `prep text` with the same settings would do and why; encode nothing.

    Example: prep plan text --clip ViT-B-32:laion2b_s34b_b79k
    """
    from prep.core.data_folder import require_data_folder
    from prep.text.plan import make_text_plan
    from prep.text.recipe import resolve
    from prep.text.report import text_report

    report = text_report(make_text_plan(require_data_folder(data), resolve(recipe)))
    print(json_module.dumps(report.values, indent=1) if json else report.text)


def run_texts(
    recipe: TextRecipe,
    *,
    data: Path,
    engine: str,
    address: str | None,
    workers: int | None,
    num_gpus: float | None = None,
    batch: int | None = None,
    max_failures: str,
    json: bool,
    retry_codes: frozenset[str] = frozenset(),
    only_variant: str | None = None,
) -> None:
    """Plans and makes the column.

    Args:
        retry_codes: failures to try again though nothing changed.
        only_variant: the variant that the recipe must lead to.
    """
    from prep.core.data_folder import TEXT, require_data_folder, writing
    from prep.core.progress import CountProgress
    from prep.core.run import FAILURES_FILE
    from prep.text.blocks import TowerUse
    from prep.text.plan import make_text_plan
    from prep.text.recipe import resolve
    from prep.text.report import text_summary_text, text_summary_values
    from prep.text.run import run_text

    budget = parse_budget(max_failures)
    if batch is not None and batch < 1:
        raise UserError(f"--batch {batch} encodes nothing", hint="give 1 or more, or leave it out")
    require_workers(workers, num_gpus=num_gpus, address=address, engine=engine)
    data_dir = require_data_folder(data)
    with writing(data_dir, column=TEXT):
        resolved = resolve(recipe)
        require_variant(resolved.variant, only_variant, command=f"prep text --clip {recipe.clip}")
        planned = make_text_plan(data_dir, resolved, retry_codes=retry_codes)
        has_work = any(shard.has_work for shard in planned.shards)
        # Looking for GPUs takes seconds, which a run with nothing to do need not spend.
        gpus_each = gpus_of_a_worker(num_gpus) if has_work else 0.0
        use = TowerUse(
            recipe.clip,
            resolved.clip_sha256,
            batch=batch or (_GPU_BATCH if gpus_each else _CPU_BATCH),
            device="cuda" if gpus_each else "cpu",
        )
        chosen = open_model_engine(engine, address=address, workers=workers, gpus_each=gpus_each)
        summary = run_text(planned, use, chosen, on_encoded=CountProgress("encoding texts"))
    listed = planned.variant_dir / FAILURES_FILE
    values = text_summary_values(summary, listed=listed)
    print(json_module.dumps(values, indent=1) if json else text_summary_text(summary, listed=listed))
    if summary.gave_up is not None:
        raise FailedWork(f"{summary.gave_up}; what was finished is kept, run the same command again to go on")
    if summary.num_failed_videos > budget(planned.num_videos):
        failed = f"{summary.num_failed_videos} of {planned.num_videos} videos"
        raise FailedWork(f"{failed} have failures, listed in {listed}")
    if summary.failures:
        print(f"{summary.num_failed_videos} videos failed, within --max-failures {max_failures}", file=sys.stderr)
