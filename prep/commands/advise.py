"""`prep advise`: check whether a disk or a bucket can keep up with training, or whether re-encoding pays off."""

import json as json_module
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.settings import Checked, Range
from clipmill.prep.core.request import Data, Json
from clipmill.shards.columns import LATENTS, VIDEO

if TYPE_CHECKING:
    ReadColumn = str
else:
    ReadColumn = Literal[VIDEO, LATENTS]
_Number = Parameter(allow_leading_hyphen=True)
_MAX_NODES, _MAX_GPUS = 100_000, 1_000


@dataclass(frozen=True, kw_only=True)
class AdviseRequest(Checked):
    """Flags of `prep advise`."""

    step_time: Annotated[float | None, _Number, Range(above=0)] = None
    """Duration of a training step in seconds, excluding waits for data. Default: the median over the steps of --run."""

    batch: Annotated[int | None, _Number, Range(above=0)] = None
    """Batch size in clips, over all nodes. Default: the batch size of --run, scaled to --nodes and --gpus."""

    run: Path | None = None
    """Folder of a training run that provides the step time and the batch size."""

    nodes: Annotated[int | None, _Number, Range(1, _MAX_NODES)] = None
    """Number of nodes that read the same disk or bucket. Default: 1."""

    gpus: Annotated[int | None, _Number, Range(1, _MAX_GPUS)] = None
    """Number of GPUs per node. Default: 1."""

    column: ReadColumn = VIDEO
    """Column that training reads: video, or latents (train --input latents)."""

    read_speed: Annotated[float | None, _Number, Range(above=0)] = None
    """Total read speed of the disk or bucket in MB/s, over all nodes. Default: measured on this node."""

    bitrate: Annotated[str | None, _Number] = None
    """Bitrate of the chunks in bit/s, such as 800k, 0.8M or 2M. Default: the bitrate of the existing chunks."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error if --bitrate is set for a column other than `video`."""
        if self.bitrate is not None and self.column != VIDEO:
            yield UserError(
                f"--bitrate has no effect on {self.column}",
                hint=f"omit --bitrate, or use --column {VIDEO}",
                flags=("--bitrate",),
            )


def advise(
    request: Annotated[AdviseRequest, Parameter(name="*")] = AdviseRequest(),
    *,
    data: Data = Path("data"),
    json: Json = False,
) -> None:
    """Report whether the disk or the bucket keeps up with training, or when re-encoding indexed videos pays off.

    For chunks, the report covers loaders that read complete chunks, and loaders that, like train, read only the packets
    of a clip or stored latents. The read speed is measured by reading chunks of the current variant for a few seconds.

    For an index (`prep index`), clips are decoded from the source videos, and a few seconds of several videos are
    encoded with each --recipe of prep chunk. The report says after how many reads of each clip the encoding has saved
    as much CPU time as it took.

    Examples:

        prep advise
        prep advise --run runs/first
        prep advise --step-time 0.5 --batch 64
        prep advise --run runs/first --nodes 16 --gpus 8
    """
    from clipmill.manifests.formatting import parse_bitrate, size_text
    from clipmill.manifests.progress import Activity
    from clipmill.prep.advice import Bucket, Load, advice_text, advice_values, measure_bucket, measure_disk, open_column
    from clipmill.prep.core.column_arrays import bucket_tars
    from clipmill.prep.core.data_folder import require_data_folder
    from clipmill.shards.dataset import current_variant
    from clipmill.shards.opening import Damaged
    from clipmill.shards.reader import Variant

    bitrate_bytes_per_s = None if request.bitrate is None else parse_bitrate(request.bitrate, flag="--bitrate") / 8
    data_dir = require_data_folder(data)
    if request.column == VIDEO and _advise_on_sources(request, data_dir, json=json):
        return
    step = _step(request)
    num_nodes, gpus_per_node = request.nodes or 1, request.gpus or 1
    latency_s, is_total, speed_source = None, True, "set by --read-speed"
    read_bytes_per_s = 1e6 * (request.read_speed or 0)
    try:
        with Activity("reading chunks as training does, to measure the speed"):
            # If the chunks have latents, training may read the latents instead.
            tars, names = bucket_tars(data_dir), [request.column]
            is_remote = tars is not None
            if request.column == VIDEO and not is_remote and current_variant(data_dir, LATENTS) is not None:
                names.append(LATENTS)
            variants = {name: Variant.open(data_dir, column=name, tars=tars).require_complete() for name in names}
            columns = {name: open_column(variant, name) for name, variant in variants.items()}
            column = columns[request.column]
            if is_remote:
                single, parallel, method = measure_bucket(column, num_processes=gpus_per_node)
                latency_s = single.read_s
                if request.read_speed is None:
                    # A bucket provides this speed to each node.
                    per_node = "" if num_nodes == 1 else f"{num_nodes} x {size_text(round(parallel.bytes_per_s))}/s, "
                    read_bytes_per_s, speed_source = parallel.bytes_per_s * num_nodes, f"{per_node}{method}"
            elif request.read_speed is None:
                speed, speed_source = measure_disk(column)
                read_bytes_per_s, is_total = speed.bytes_per_s, num_nodes == 1
    except (Damaged, OSError) as error:
        raise UserError(f"the shards cannot be read: {error}", hint="run `prep verify` to find the damage") from None
    scale = 1.0 if bitrate_bytes_per_s is None else bitrate_bytes_per_s / column.bytes_per_s
    ways = {"packets" if name == VIDEO else name: facts.clip_bytes for name, facts in columns.items()}
    load = Load(
        batch=step.batch,
        step_s=step.step_s,
        read_bytes_per_s=read_bytes_per_s,
        video_bytes_per_s=bitrate_bytes_per_s or column.bytes_per_s,
        chunk_s=column.chunk_s,
        clip_bytes={name: size * (scale if name == "packets" else 1.0) for name, size in ways.items()},
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        is_total=is_total,
    )
    sampled = f"{len(column.sampled_shards)} of {count_noun(column.num_shards, 'shard')} of {column.variant}"
    clips = "; ".join(facts.clips for facts in columns.values())
    origin = {
        "step": step.origin,
        "read_speed": speed_source,
        "bitrate": sampled if request.bitrate is None else f"set by --bitrate {request.bitrate}",
        "clips": clips if request.bitrate is None else f"{clips}, scaled to --bitrate",
    }
    bucket = None
    if latency_s is not None:
        bucket = Bucket(
            load=load,
            latency_s=latency_s,
            requests_per_clip=column.requests_per_clip,
            set_bytes=column.set_bytes * scale,
            num_shards=column.num_shards,
            clips_per_epoch=column.clips_per_epoch,
        )
    if json:
        values = {**advice_values(load), "origin": origin, **({} if bucket is None else {"bucket": bucket.values()})}
        print(json_module.dumps(values, indent=1))
        return
    print(advice_text(load, origin, storage="disk" if bucket is None else "bucket"))
    for line in () if bucket is None else bucket.lines():
        print(line)


def _advise_on_sources(request: AdviseRequest, data_dir: Path, *, json: bool) -> bool:
    """Report when re-encoding indexed sources pays off. Return False if the current variant is not an index."""
    from clipmill.prep.core.column_arrays import bucket_tars
    from clipmill.shards.columns import SOURCE_MEMBER
    from clipmill.shards.opening import Damaged
    from clipmill.shards.reader import Variant

    try:
        variant = Variant.open(data_dir, column=VIDEO, tars=bucket_tars(data_dir))
        if not any(SOURCE_MEMBER in shard.extensions for shard in variant.shards()[:1]):
            return False
        for name in ("read_speed", "bitrate"):
            if getattr(request, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} has no effect on an index of videos", hint=f"omit {flag}", flags=(flag,))
        from clipmill.prep.video.reencoding import advise_on_sources

        needs_step = request.run is not None or request.step_time is not None or request.batch is not None
        step = _step(request) if needs_step else None
        rate = None if step is None else step.batch / step.step_s
        costs = advise_on_sources(variant.require_complete(), data_dir, clips_per_s=rate)
    except (Damaged, OSError) as error:
        raise UserError(f"the shards cannot be read: {error}", hint="run `prep verify` to find the damage") from None
    print(json_module.dumps(costs.values(), indent=1) if json else "\n".join(costs.lines()))
    return True


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Duration and batch size of a training step, and a description of their origin."""

    step_s: float
    batch: int
    origin: str


def _step(request: AdviseRequest) -> _Step:
    """Return the duration and batch size of a step, from the flags or from a run.

    The batch size of a run is scaled to the number of GPUs that the flags specify.

    Raises:
        UserError: The duration or the batch size is unknown, or the run cannot be read.
    """
    from clipmill.prep.advice import read_run_steps

    num_gpus = None if request.nodes is None and request.gpus is None else (request.nodes or 1) * (request.gpus or 1)
    step_s, batch, origin = request.step_time, request.batch, "set by --step-time"
    if request.run is not None:
        steps = read_run_steps(request.run)
        if step_s is None:
            step_s = steps.step_s
            origin = f"median of {count_noun(steps.num_steps, 'step')} of {request.run}, excluding waits for data"
        if batch is None and steps.batch is not None:
            batch = steps.batch
            if num_gpus is not None and steps.num_readers not in (None, num_gpus):
                batch = max(1, round(batch * num_gpus / steps.num_readers))
                origin += (
                    f"; its batch of {count_noun(steps.batch, 'clip')} is scaled from {steps.num_readers} to"
                    f" {num_gpus} GPUs"
                )
    if step_s is None:
        raise UserError("the step time is unknown", hint="use --step-time SECONDS, or --run RUN")
    if batch is None:
        raise UserError("the batch size is unknown", hint="use --batch CLIPS")
    return _Step(step_s=step_s, batch=batch, origin=origin)
