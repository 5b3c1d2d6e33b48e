"""`prep advise`: check whether the disk can keep up with training."""

import json as json_module
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manifests.errors import UserError
from prep.core.make import Data, Json
from prep.video.settings import require_bitrate_unit


def advise(
    *,
    step_time: Annotated[
        float | None,
        Parameter(help="Seconds that a training step takes when its data is there.", allow_leading_hyphen=True),
    ] = None,
    batch: Annotated[int | None, Parameter(help="Clips in a step.", allow_leading_hyphen=True)] = None,
    run: Annotated[
        Path | None, Parameter(help="Folder of a run, from whose records step time and batch are taken.")
    ] = None,
    read_speed: Annotated[
        float | None,
        Parameter(help="Megabytes a second that the disk reads; by default measured.", allow_leading_hyphen=True),
    ] = None,
    bitrate: Annotated[
        str | None,
        Parameter(
            help="Bitrate of the chunks, 800k or 2M; by default that of those there.",
            allow_leading_hyphen=True,
            validator=require_bitrate_unit,
        ),
    ] = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Say how long chunks may be for the disk to keep up with training, read whole and read by packets.

    Takes seconds: it reads chunks of the current variant to measure the disk.

    Example: prep advise --run runs/first
    """
    from prep.advice.equation import Load, Origin, advice_text, advice_values
    from prep.advice.reading_costs import clip_bytes, measure_read_speed, spread, video_bytes_per_s
    from prep.advice.run_steps import read_run_steps
    from prep.core.data_folder import require_data_folder
    from prep.video.recipe import recipe_from_dict
    from prep.video.settings import bits_per_second
    from shards.damage import Damaged
    from shards.reader import Variant

    _positive("--step-time", step_time, unit="seconds")
    _positive("--batch", batch, unit="clips")
    _positive("--read-speed", read_speed, unit="megabytes a second")
    given_bytes_per_s = None if bitrate is None else bits_per_second(bitrate) / 8
    variant = Variant.open(require_data_folder(data))
    chunk_s = float(recipe_from_dict(variant.recipe).settings().len_s)
    shards = spread(variant.shards())
    step = "as given"
    if run is not None:
        steps = read_run_steps(run)
        if step_time is None:
            step = f"median of {steps.num_steps} steps of {run}, without waiting for data"
        step_time, batch = step_time or steps.step_s, batch or steps.batch
    if step_time is None:
        raise UserError("how long a step takes is not known", hint="give --step-time SECONDS, or --run RUN")
    if batch is None:
        raise UserError("how many clips a step has is not known", hint="give --batch CLIPS")
    looked_at = f"{len(shards)} of {len(variant.shards())} shards"
    try:
        per_clip, num_clips = clip_bytes(shards)
        measured_bytes_per_s = video_bytes_per_s(shards)
        if read_speed is None:
            found = measure_read_speed(shards)
            read_bytes_per_s = found.bytes_per_s
            speed = (
                f"{found.num_reads} chunks of {found.num_shards} shards, read whole, once, in random order, one at a "
                "time; the kernel was asked to drop them from memory first"
            )
        else:
            read_bytes_per_s, speed = read_speed * 1e6, "as given"
    except (Damaged, OSError) as error:
        raise UserError(f"the shards cannot be read: {error}", hint="`prep verify` says what is damaged") from None
    of_bitrate = 1.0 if given_bytes_per_s is None else given_bytes_per_s / measured_bytes_per_s
    scaled = "" if given_bytes_per_s is None else ", in proportion to the bitrate"
    load = Load(
        batch=batch,
        step_s=step_time,
        read_bytes_per_s=read_bytes_per_s,
        video_bytes_per_s=given_bytes_per_s or measured_bytes_per_s,
        chunk_s=chunk_s,
        clip_bytes=per_clip * of_bitrate,
    )
    origin = Origin(
        read_speed=speed,
        bitrate=f"of {looked_at} of {variant.directory.name}" if bitrate is None else f"--bitrate {bitrate}",
        clip_bytes=f"mean of {num_clips} clips of 4 frames in 1 to 4 s{scaled}",
        step=step,
    )
    print(json_module.dumps(advice_values(load, origin), indent=1) if json else advice_text(load, origin))


def _positive(flag: str, value: float | None, *, unit: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{flag} {value} is not possible", hint=f"give a number of {unit} greater than zero")
