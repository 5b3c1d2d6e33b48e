"""`prep latents`: the `latents` column."""

import json as json_module
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    threads_of_a_worker,
)
from prep.latents.settings import LatentsSettings
from prep.video.command import Address, EngineName, MaxFailures, parse_budget

if TYPE_CHECKING:
    from prep.latents.recipe import LatentsRecipe

Settings = Annotated[LatentsSettings, Parameter(name="*")]
Batch = Annotated[int, Parameter(help="Frames that the model gets at a time.")]


def latents(
    settings: Settings,
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    workers: ModelWorkers = None,
    num_gpus: NumGpus = None,
    batch: Batch = 16,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Encode the chunks of the current variant of video by a VAE, a few frames a second.

    Run it again at any time, also while `prep chunk` is at work: only what is new, changed, missing or damaged is made.
    After another codec or bitrate, run it once more: the latents of the old chunks are kept until then.

    Example: prep latents --vae stabilityai/sd-vae-ft-mse --crop random
    """
    run_latents(
        settings,
        data=data,
        engine=engine,
        address=address,
        workers=workers,
        num_gpus=num_gpus,
        batch=batch,
        max_failures=max_failures,
        json=json,
    )


def plan_latents(
    settings: Settings,
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Say what `prep latents` with the same settings would do and why; do nothing.

    Example: prep plan latents --vae stabilityai/sd-vae-ft-mse
    """
    from prep.core.data_folder import require_data_folder
    from prep.latents.plan import make_latents_plan
    from prep.latents.report import latents_report

    data_dir = require_data_folder(data)
    report = latents_report(make_latents_plan(data_dir, _recipe(settings, data_dir)))
    print(json_module.dumps(report.values, indent=1) if json else report.text)


def run_latents(
    settings: LatentsSettings,
    *,
    data: Path,
    engine: str,
    address: str | None,
    workers: int | None,
    num_gpus: float | None = None,
    batch: int = 16,
    max_failures: str,
    json: bool,
    retry_codes: frozenset[str] = frozenset(),
    only_variant: str | None = None,
) -> None:
    """Plans and makes latents.

    Args:
        retry_codes: failures to try again though nothing changed.
        only_variant: the variant that the settings must lead to.
    """
    from prep.core.data_folder import LATENTS, require_data_folder, writing
    from prep.core.run import FAILURES_FILE, execute
    from prep.latents.job import latents_job
    from prep.latents.plan import make_latents_plan
    from prep.latents.report import latents_summary_text, latents_summary_values

    budget = parse_budget(max_failures)
    if batch < 1:
        raise UserError(f"--batch {batch} encodes nothing", hint="give 1 or more; 16 suits a CPU, 64 a large GPU")
    require_workers(workers, num_gpus=num_gpus, address=address, engine=engine)
    data_dir = require_data_folder(data)
    with writing(data_dir, column=LATENTS):
        recipe = _recipe(settings, data_dir)
        require_variant(recipe.variant, only_variant, command=f"prep latents --vae {settings.vae}")
        planned = make_latents_plan(data_dir, recipe, retry_codes=retry_codes)
        has_work = any(shard.has_work for shard in planned.shards)
        # Looking for GPUs takes seconds, which a run with nothing to do need not spend.
        gpus_each = gpus_of_a_worker(num_gpus) if has_work else 0.0
        chosen = open_model_engine(engine, address=address, workers=workers, gpus_each=gpus_each)
        job = latents_job(
            planned,
            device="cuda" if gpus_each else "cpu",
            batch=batch,
            num_threads=threads_of_a_worker(workers, gpus_each=gpus_each),
        )
        summary = execute(job, chosen)
    listed = planned.variant_dir / FAILURES_FILE
    values = latents_summary_values(summary, vae=settings.vae, listed=listed)
    print(json_module.dumps(values, indent=1) if json else latents_summary_text(summary, listed=listed))
    if summary.gave_up is not None:
        raise FailedWork(f"{summary.gave_up}; what was finished is kept, run the same command again to go on")
    if summary.num_failed_videos > budget(planned.num_videos):
        raise FailedWork(
            f"{summary.num_failed_videos} of {planned.num_videos} videos have failures, listed in {listed}"
        )
    if summary.failures:
        print(f"{summary.num_failed_videos} videos failed, within --max-failures {max_failures}", file=sys.stderr)


def _recipe(settings: LatentsSettings, data_dir: Path) -> "LatentsRecipe":
    from prep.core.data_folder import VIDEO
    from prep.latents.recipe import resolve
    from shards.dataset import current_variant

    video = current_variant(data_dir, VIDEO)
    if video is None:
        hint = f"make them first: prep chunk --len 15s --data {shlex.quote(str(data_dir))}"
        raise UserError(f"{data_dir} holds no chunks", hint=hint)
    return resolve(settings, video=video)
