"""`prep advise`: check whether the disk can keep up with training."""

import json as json_module
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manifests.errors import UserError
from manifests.quoting import counted
from prep.core.make import Data, Json
from prep.video.settings import require_bitrate_unit


def advise(
    *,
    step_time: Annotated[
        float | None,
        Parameter(
            help="Duration of a training step in seconds, without waiting for data. Default: the median of --run.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        Parameter(help="Batch size in clips per step. Default: that of --run.", allow_leading_hyphen=True),
    ] = None,
    run: Annotated[Path | None, Parameter(help="Run folder of train, which provides step time and batch size.")] = None,
    read_speed: Annotated[
        float | None,
        Parameter(help="Read speed of the disk in MB/s. Default: measured on the chunks.", allow_leading_hyphen=True),
    ] = None,
    bitrate: Annotated[
        str | None,
        Parameter(
            help="Bitrate of the chunks in bit/s, such as 800k or 2M. Default: that of the existing chunks.",
            allow_leading_hyphen=True,
            validator=require_bitrate_unit,
        ),
    ] = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Report how long chunks may be for the disk to keep up with training.

    It considers loaders that read whole chunks, and loaders that read only the packets of a clip, as train does. It
    reads chunks of the current variant for a few seconds to measure the read speed.

    Examples:

        prep advise --run runs/first
        prep advise --step-time 0.5 --batch 64
    """
    from prep.advice.equation import Load, Origin, advice_text, advice_values
    from prep.advice.reading_costs import clip_bytes, mean_chunk_s, measure_read_speed, spread, video_bytes_per_s
    from prep.advice.run_steps import read_run_steps
    from prep.core.data_folder import require_data_folder
    from prep.video.recipe import recipe_from_dict
    from prep.video.settings import bits_per_second
    from shards.damage import Damaged
    from shards.reader import Variant

    _positive("--step-time", step_time, unit="seconds")
    _positive("--batch", batch, unit="clips")
    _positive("--read-speed", read_speed, unit="MB/s")
    given_bytes_per_s = None if bitrate is None else bits_per_second(bitrate) / 8
    variant = Variant.open(require_data_folder(data))
    settings = recipe_from_dict(variant.recipe).settings()
    shards = spread(variant.shards())
    step = "given by --step-time"
    if run is not None:
        steps = read_run_steps(run)
        if step_time is None:
            step = f"median of {counted(steps.num_steps, 'step')} of {run}, without waiting for data"
        step_time, batch = step_time or steps.step_s, batch or steps.batch
    if step_time is None:
        raise UserError("the step time is unknown", hint="give --step-time SECONDS, or --run RUN")
    if batch is None:
        raise UserError("the batch size is unknown", hint="give --batch CLIPS")
    sampled = f"{len(shards)} of {counted(len(variant.shards()), 'shard')}"
    try:
        per_clip, num_clips = clip_bytes(shards)
        measured_bytes_per_s = video_bytes_per_s(shards)
        chunk_s = float(settings.len_s) if settings.cut == "even" else mean_chunk_s(shards)
        if read_speed is None:
            found = measure_read_speed(shards)
            read_bytes_per_s = found.bytes_per_s
            speed = (
                f"measured on {counted(found.num_reads, 'chunk')} from {counted(found.num_shards, 'shard')}: "
                "whole chunks in random order, one at a time, page cache dropped"
            )
        else:
            read_bytes_per_s, speed = read_speed * 1e6, "given by --read-speed"
    except (Damaged, OSError) as error:
        raise UserError(
            f"the shards cannot be read: {error}", hint="run `prep verify` to find what is damaged"
        ) from None
    of_bitrate = 1.0 if given_bytes_per_s is None else given_bytes_per_s / measured_bytes_per_s
    scaled = "" if given_bytes_per_s is None else ", scaled to --bitrate"
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
        bitrate=f"{sampled} of {variant.directory.name}" if bitrate is None else f"given by --bitrate {bitrate}",
        clip_bytes=f"mean of {num_clips} clips with 4 frames, 1 to 4 s long{scaled}",
        step=step,
    )
    print(json_module.dumps(advice_values(load, origin), indent=1) if json else advice_text(load, origin))


def _positive(flag: str, value: float | None, *, unit: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{flag} {value} is out of range", hint=f"give a number of {unit} greater than 0")
