"""`prep text`: the `text` column."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from manifests.errors import FailedWork, UserError
from prep.chunk_commands import Address, EngineName, MaxFailures, parse_budget
from prep.options import Data, Json
from prep.text.recipe import TextRecipe

if TYPE_CHECKING:
    from prep.engines import Engine

Settings = Annotated[TextRecipe, Parameter(name="*")]
TextWorkers = Annotated[
    int | None, Parameter(help="Copies of the tower that work at a time; by default one a core, or one a GPU.")
]
NumGpus = Annotated[
    float | None, Parameter(help="GPUs of a worker, such as 1 or 0.5; 0 for none. By default 1 where there are any.")
]


def text(
    recipe: Settings = TextRecipe(),  # noqa: B008 - frozen
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    workers: TextWorkers = None,
    num_gpus: NumGpus = None,
    batch: Annotated[int, Parameter(help="Texts computed at a time.")] = 256,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Encode every distinct caption of the manifest once, by the text tower of a CLIP model.

    Run it again at any time: only new texts are encoded. It needs the manifest alone: chunks may be made meanwhile, or
    never. Other towers make other variants beside the old one.

    Example: prep text --clip ViT-B-32:laion2b_s34b_b79k
    """
    from prep.data_folder import TEXT, require_data_folder, writing
    from prep.progress import CountProgress
    from prep.run import FAILURES_FILE
    from prep.text.blocks import TowerUse
    from prep.text.planning import make_text_plan
    from prep.text.recipe import resolve
    from prep.text.run import run_text
    from prep.text.summary import text_summary_text, text_summary_values

    budget = parse_budget(max_failures)
    if batch < 1:
        raise UserError(f"--batch {batch} computes nothing", hint="give 1 or more; 256 suits most machines")
    data_dir = require_data_folder(data)
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} makes nothing", hint="give 1 or more, or leave it out")
    if num_gpus is not None and num_gpus < 0:
        raise UserError(f"--num-gpus {num_gpus:g} is not a number of GPUs", hint="give 1, a share such as 0.5, or 0")
    if address is not None and engine != "ray":
        raise UserError(f"--address {address} needs Ray", hint="leave out --engine processes, or the address")
    with writing(data_dir, column=TEXT):
        resolved = resolve(recipe)
        planned = make_text_plan(data_dir, resolved)
        has_work = any(shard.has_work for shard in planned.shards)
        # Looking for GPUs takes seconds, which a run with nothing to do need not spend.
        gpus_each = _gpus_each(num_gpus) if has_work else 0.0
        use = TowerUse(recipe.clip, resolved.clip_sha256, batch=batch, device="cuda" if gpus_each else "cpu")
        chosen = _engine(engine, address=address, workers=workers, gpus_each=gpus_each)
        summary = run_text(planned, use, chosen, on_encoded=CountProgress("encoding texts"))
    print(json_module.dumps(text_summary_values(summary), indent=1) if json else text_summary_text(summary))
    if summary.num_failed_videos > budget(planned.num_videos):
        listed = planned.variant_dir / FAILURES_FILE
        failed = f"{summary.num_failed_videos} of {planned.num_videos} videos"
        raise FailedWork(f"{failed} have failures, listed in {listed}")
    if summary.failures:
        print(f"{summary.num_failed_videos} videos failed, within --max-failures {max_failures}", file=sys.stderr)


def _gpus_each(asked: float | None) -> float:
    from prep.text.tower import num_gpus

    return asked if asked is not None else float(num_gpus() > 0)


def _engine(name: str, *, address: str | None, workers: int | None, gpus_each: float) -> "Engine":
    if name == "ray":
        from prep.engines.ray import RayEngine

        return RayEngine(num_workers=workers, address=address, actor_gpus=gpus_each)
    from prep.engines.processes import ProcessEngine

    if not gpus_each:
        return ProcessEngine(num_workers=workers or len(os.sched_getaffinity(0)))
    from prep.text.tower import num_gpus

    room = int(num_gpus() / gpus_each)
    if not room:
        raise UserError(
            f"this machine has {num_gpus()} GPUs, a worker needs {gpus_each:g}", hint="use --num-gpus 0 for the CPU"
        )
    gpus = [str(gpu) for gpu in range(num_gpus())]
    return ProcessEngine(num_workers=min(room, workers or room), gpus=gpus)
