"""`prep advise`: check whether a disk or a bucket can keep up with training."""

import json as json_module
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.prep.core.request import Data, Json

_Positive = Parameter(allow_leading_hyphen=True)
_MAX_NODES, _MAX_GPUS = 100_000, 1_000


def advise(
    *,
    step_time: Annotated[
        float | None,
        _Positive,
        Parameter(
            help="Duration of a training step in seconds, without waiting for data. Default: the median of --run."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        _Positive,
        Parameter(
            help="Batch size in clips per step, of all nodes. Default: that of --run, scaled to --nodes and --gpus."
        ),
    ] = None,
    run: Annotated[Path | None, Parameter(help="Run folder of train, which provides step time and batch size.")] = None,
    nodes: Annotated[
        int | None, _Positive, Parameter(help="Number of nodes that read the same disk or bucket. Default: 1.")
    ] = None,
    gpus: Annotated[int | None, _Positive, Parameter(help="GPUs per node. Default: 1.")] = None,
    column: Annotated[
        Literal["video", "latents"], Parameter(help="What training reads: video, or latents (train --input latents).")
    ] = "video",
    read_speed: Annotated[
        float | None,
        _Positive,
        Parameter(
            help="Read speed of the disk or bucket in MB/s, of all nodes together. Default: measured from this node."
        ),
    ] = None,
    bitrate: Annotated[
        str | None,
        Parameter(
            help="Bitrate of the chunks in bit/s, such as 800k or 2M. Default: that of the existing chunks.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Report how long chunks may be for the disk to keep up with training, and what each node of a cluster reads.

    It considers loaders that read whole chunks, and loaders that read only the packets of a clip, as train does. It
    reads chunks of the current variant for a few seconds to measure the read speed.

    Examples:

        prep advise --run runs/first
        prep advise --step-time 0.5 --batch 64
        prep advise --run runs/first --nodes 16 --gpus 8
    """
    from clipmill.manifests.progress import Activity
    from clipmill.manifests.storage.mirrors import mirror_of
    from clipmill.manifests.storage.objects import open_objects
    from clipmill.manifests.units import parse_bitrate
    from clipmill.prep.advice.bucket import BucketLoad, bucket_text, bucket_values
    from clipmill.prep.advice.costs import measure_costs
    from clipmill.prep.advice.equation import Load, Origin, advice_text, advice_values
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.shards.damage import Damaged
    from clipmill.shards.reader import Variant

    _positive("--step-time", step_time, unit="seconds")
    _positive("--batch", batch, unit="clips")
    _positive("--read-speed", read_speed, unit="MB/s")
    _positive("--nodes", nodes, unit="nodes", most=_MAX_NODES)
    _positive("--gpus", gpus, unit="GPUs", most=_MAX_GPUS)
    given_bytes_per_s = None if bitrate is None else parse_bitrate(bitrate, flag="--bitrate") / 8
    if bitrate is not None and column != "video":
        raise UserError(f"--bitrate has no effect on {column}", hint="leave it out, or use --column video")
    data_dir = require_data_folder(data)
    variant = Variant.open(data_dir, column=column).whole()
    step = _step(step_time, batch, run, num_gpus=None if nodes is None and gpus is None else (nodes or 1) * (gpus or 1))
    mirror = mirror_of(data_dir)
    try:
        with Activity("reading chunks to measure what training reads"):
            costs = measure_costs(
                variant,
                column=column,
                data_dir=data_dir,
                objects=None if mirror is None else open_objects(mirror.address),
                read_bytes_per_s=None if read_speed is None else read_speed * 1e6,
                num_nodes=nodes or 1,
                gpus_per_node=gpus or 1,
            )
    except (Damaged, OSError) as error:
        raise UserError(
            f"the shards cannot be read: {error}", hint="run `prep verify` to find what is damaged"
        ) from None
    of_bitrate = 1.0 if given_bytes_per_s is None else given_bytes_per_s / costs.bytes_per_s
    load = Load(
        batch=step.batch,
        step_s=step.step_s,
        read_bytes_per_s=costs.read_bytes_per_s,
        video_bytes_per_s=given_bytes_per_s or costs.bytes_per_s,
        chunk_s=costs.chunk_s,
        clip_bytes=costs.clip_bytes * of_bitrate,
        num_nodes=nodes or 1,
        gpus_per_node=gpus or 1,
        is_total=read_speed is not None or mirror is not None or (nodes or 1) == 1,
    )
    sampled = f"{costs.num_sampled} of {counted(costs.num_shards, 'shard')}"
    origin = Origin(
        read_speed=costs.read_speed,
        bitrate=f"{sampled} of {variant.directory.name}" if bitrate is None else f"given by --bitrate {bitrate}",
        clip_bytes=costs.clips if bitrate is None else f"{costs.clips}, scaled to --bitrate",
        step=step.origin,
    )
    needs = (
        None
        if costs.latency_s is None
        else BucketLoad(
            load=load,
            latency_s=costs.latency_s,
            requests_per_clip=costs.requests_per_clip,
            set_bytes=round(costs.set_bytes * of_bitrate),
            num_shards=costs.num_shards,
            clips_per_epoch=costs.clips_per_epoch,
            reads_ranges=column == "video",
        )
    )
    if json:
        bucket = {} if needs is None else {"bucket": bucket_values(needs)}
        print(json_module.dumps({**advice_values(load, origin), **bucket}, indent=1))
        return
    print(advice_text(load, origin, storage="disk" if needs is None else "bucket", column=column))
    if needs is not None:
        print(bucket_text(needs))


@dataclass(frozen=True, kw_only=True)
class _Step:
    step_s: float
    batch: int
    origin: str


def _step(step_s: float | None, batch: int | None, run: Path | None, *, num_gpus: int | None) -> _Step:
    """Duration and batch size of a step, as given or of a run; the run's batch size is scaled to `num_gpus`."""
    from clipmill.prep.advice.run_steps import read_run_steps

    origin = "given by --step-time"
    if run is not None:
        steps = read_run_steps(run)
        if step_s is None:
            origin = f"median of {counted(steps.num_steps, 'step')} of {run}, without waiting for data"
        step_s = step_s or steps.step_s
        if batch is None and steps.batch is not None:
            batch = steps.batch
            if num_gpus is not None and steps.num_readers not in (None, num_gpus):
                batch = max(1, round(batch * num_gpus / steps.num_readers))
                origin += f"; its {counted(steps.batch, 'clip')} are scaled from {steps.num_readers} to {num_gpus} GPUs"
    if step_s is None:
        raise UserError("the step time is unknown", hint="give --step-time SECONDS, or --run RUN")
    if batch is None:
        raise UserError("the batch size is unknown", hint="give --batch CLIPS")
    return _Step(step_s=step_s, batch=batch, origin=origin)


def _positive(flag: str, value: float | None, *, unit: str, most: float = math.inf) -> None:
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        limit = "" if math.isinf(most) else f", at most {most:,}"
        raise UserError(f"{flag} {value} is out of range", hint=f"give a number of {unit} greater than 0{limit}")
