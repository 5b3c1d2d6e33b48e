"""`prep chunk` and `prep plan`: the `video` column."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from manifests.errors import FailedWork, UserError
from prep.core.options import Data, Json
from prep.video.recipe import Recipe

Settings = Annotated[Recipe, Parameter(name="*")]
EngineName = Annotated[
    Literal["ray", "processes"], Parameter(help="ray (this machine or a cluster), or processes (this machine).")
]
Address = Annotated[
    str | None, Parameter(help="Ray cluster to use, auto or host:port; by default one is started here.")
]
Workers = Annotated[int | None, Parameter(help="Shards made at a time; by default one a core.")]
MaxFailures = Annotated[
    str, Parameter(help="Videos that may fail before the exit status says so: a number, or a share such as 1%.")
]


def chunk(
    recipe: Settings = Recipe(),  # noqa: B008 - frozen
    *,
    data: Data = Path("data"),
    engine: EngineName = "ray",
    address: Address = None,
    workers: Workers = None,
    max_failures: MaxFailures = "0",
    json: Json = False,
) -> None:
    """Cut the videos of the manifest into re-encoded chunks, in shards that WebDataset reads.

    Run it again at any time: only what is new, changed, missing or damaged is made. Other settings make another
    variant beside the old one.

    Example: prep chunk --len 15s --crf 21
    """
    run_chunks(recipe, data=data, engine=engine, address=address, workers=workers, max_failures=max_failures, json=json)


def plan(
    recipe: Settings = Recipe(),  # noqa: B008 - frozen
    *,
    data: Data = Path("data"),
    explain: Annotated[str | None, Parameter(help="A chunk's key or a video's id: why it would be made again.")] = None,
    json: Json = False,
) -> None:
    """Say what `prep chunk` with the same settings would do, why, and what it would cost; do nothing.

    Example: prep plan --bitrate 800k
    """
    from prep.core.data_folder import require_data_folder
    from prep.core.progress import CountProgress
    from prep.core.report import explanation, plan_report
    from prep.video.ffmpeg import find_ffmpeg
    from prep.video.planning import make_plan
    from prep.video.recipe import resolve

    data_dir = require_data_folder(data)
    resolved = resolve(recipe, ffmpeg_version=find_ffmpeg().version)
    planned = make_plan(data_dir, resolved, on_probe=CountProgress("probing sources"))
    report = plan_report(planned) if explain is None else explanation(planned, explain)
    print(json_module.dumps(report.values, indent=1) if json else report.text)


def run_chunks(
    recipe: Recipe,
    *,
    data: Path,
    engine: str,
    address: str | None,
    workers: int | None,
    max_failures: str,
    json: bool,
    retry_codes: frozenset[str] = frozenset(),
) -> None:
    """Plans and makes chunks; `retry_codes` are failures to try again though nothing changed."""
    from prep.core.data_folder import require_data_folder, writing
    from prep.core.progress import CountProgress
    from prep.core.report import summary_text, summary_values
    from prep.core.run import FAILURES_FILE, execute
    from prep.engines import Engine
    from prep.video.ffmpeg import find_ffmpeg, require_encoder
    from prep.video.job import chunk_job
    from prep.video.planning import make_plan
    from prep.video.recipe import resolve
    from prep.video.scratch import remove_abandoned

    budget = parse_budget(max_failures)
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} makes nothing", hint="give 1 or more, or leave it out for one a core")
    if address is not None and engine != "ray":
        raise UserError(f"--address {address} needs Ray", hint="leave out --engine processes, or the address")
    data_dir = require_data_folder(data)
    ffmpeg = find_ffmpeg()
    if ffmpeg.passed_over:
        print(f"using the ffmpeg that clipmill[prep] ships: {ffmpeg.passed_over} is too old", file=sys.stderr)
    require_encoder(ffmpeg, recipe.settings().codec)
    chosen: Engine
    if engine == "ray":
        from prep.engines.ray import ray_apart

        chosen = ray_apart(num_workers=workers, address=address)
    else:
        from prep.engines.processes import ProcessEngine

        chosen = ProcessEngine(num_workers=workers or len(os.sched_getaffinity(0)))
    with writing(data_dir):
        resolved = resolve(recipe, ffmpeg_version=ffmpeg.version)
        planned = make_plan(data_dir, resolved, retry_codes=retry_codes, on_probe=CountProgress("probing sources"))
        summary = execute(chunk_job(planned), chosen)
        remove_abandoned()  # of workers that were lost, now or in an earlier run
    listed = planned.variant_dir / FAILURES_FILE
    values = summary_values(summary, listed=listed)
    print(json_module.dumps(values, indent=1) if json else summary_text(summary, listed=listed))
    if summary.gave_up is not None:
        raise FailedWork(f"{summary.gave_up}; what was finished is kept, run the same command again to go on")
    if summary.num_failed_videos > budget(planned.plan.num_videos):
        raise FailedWork(
            f"{summary.num_failed_videos} of {planned.plan.num_videos} videos have failures, listed in {listed}"
        )
    if summary.failures:
        print(f"{summary.num_failed_videos} videos failed, within --max-failures {max_failures}", file=sys.stderr)


def parse_budget(text: str) -> Any:
    """A function from the number of videos to the number of them that may fail.

    Raises:
        UserError: `text` is neither a number nor a share.
    """
    share = text.removesuffix("%")
    try:
        value = float(share) if share != text else int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if share != text else float("inf")):
        raise UserError(
            f'--max-failures "{text}" is not a budget', hint="give a number of videos, or a share such as 1%"
        )
    return (lambda num_videos: int(num_videos * value / 100)) if share != text else (lambda num_videos: value)
