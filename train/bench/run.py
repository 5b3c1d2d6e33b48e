"""A run of `train bench`: every operation by itself, then whole steps; or steps of several processes, by strategy."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.progress import Activity
from clipmill.train.bench.communication import measure_steps
from clipmill.train.bench.operations import BatchOperations, ClipOperations
from clipmill.train.bench.rates import Rate, advice, judge
from clipmill.train.config.training import Strategy, plain_values
from clipmill.train.data.outcomes import TooManyFailures
from clipmill.train.data.video_captions import VideoCaptions
from clipmill.train.device.precision import choose_device, open_precision
from clipmill.train.distributed.world import World
from clipmill.train.engine.attention_choice import choose_attention
from clipmill.train.engine.loop import check_batch
from clipmill.train.engine.rank_consistency import open_consistent
from clipmill.train.run.folder import machine
from clipmill.train.tasks.dual_encoder.settings import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask


def run_bench(settings: DualEncoderSettings, *, seconds: float) -> dict[str, Any]:
    """Measure every operation for about `seconds` and find the bottleneck; returns plain values.

    Raises:
        UserError: there is no such data, less than a batch of it, or the input is not pixels.
        FailedWork: more samples than `settings.max_failures` could not be loaded.
    """
    task, samples, device = _open(settings, World(), seconds=seconds)
    with Activity("measuring reading, decoding, cropping and tokens"):
        clips = ClipOperations(samples, settings).measure(seconds=seconds)
    with Activity("measuring the model"):
        steps = BatchOperations(task, samples, settings, device=device)
        rates: dict[str, Rate | None] = {**clips.rates, **steps.measure(clips.samples, seconds=seconds)}
    found = {name: rate.items_per_s for name, rate in rates.items() if rate is not None}
    try:
        with Activity("measuring the loader"):
            loader = steps.loader(seconds=seconds)
        verdict = judge(found, loader_items_per_s=loader.items_per_s)
        # Waiting shows only once the prefetched batches are used up.
        min_steps = settings.batches_ahead + 2 if verdict.bound == "data" else 1
        with Activity("measuring whole steps"):
            whole = steps.whole(seconds=seconds, min_steps=min_steps)
    except TooManyFailures as error:
        raise _too_many(settings, error) from error
    cores, per_chunk = len(os.sched_getaffinity(0)), settings.samples_per_chunk
    return {
        "links": [
            {"link": name, "items_per_s": rate and rate.items_per_s, "num_rounds": rate.num_rounds if rate else 0}
            for name, rate in rates.items()
        ],
        "loader_items_per_s": loader.items_per_s,
        "compute_items_per_s": verdict.compute_items_per_s,
        "step_items_per_s": whole.rate.items_per_s,
        "slowest": verdict.slowest,
        "bound": verdict.bound,
        "cause": verdict.cause,
        "expected_wait_share": verdict.expected_wait_share,
        "wait_share": whole.wait_share,
        "advice": advice(
            verdict, workers=settings.workers, cores=cores, decode=settings.decode, samples_per_chunk=per_chunk
        ),
        "read_bytes_per_item": clips.read_bytes_per_item,
        "num_failed": len(clips.failed),
        "first_failure": clips.failed[0] if clips.failed else None,
        **_about(samples, settings, device),
    }


def run_breakdown(
    settings: DualEncoderSettings, *, strategies: Sequence[Strategy], seconds: float, world: World
) -> dict[str, Any]:
    """Break down steps of all processes under each strategy; returns plain values, equal on all ranks.

    Raises:
        UserError: as `run_bench`; or the model is divided into pipeline stages.
        FailedWork: more samples than `settings.max_failures` could not be loaded.
    """
    if settings.parallel.stages > 1:
        raise UserError(
            f"train bench measures data parallelism, not --parallel.stages {settings.parallel.stages}",
            hint="leave out --parallel.stages",
        )
    task, samples, device = _open(settings, world, seconds=seconds)
    try:
        found = [
            _measured(task, samples, one, world=world, device=device, seconds=seconds)
            for one in (replace(settings, parallel=replace(settings.parallel, strategy=name)) for name in strategies)
        ]
    except TooManyFailures as error:
        raise _too_many(settings, error) from error
    return {"strategies": found, **_about(samples, settings, device)}


def _measured(
    task: DualEncoderTask,
    samples: VideoCaptions,
    settings: DualEncoderSettings,
    *,
    world: World,
    device: torch.device,
    seconds: float,
) -> dict[str, Any]:
    with Activity(f"measuring steps with {settings.parallel.strategy}"):
        return measure_steps(task, samples, settings, world=world, device=device, seconds=seconds)


def _open(
    settings: DualEncoderSettings, world: World, *, seconds: float
) -> tuple[DualEncoderTask, VideoCaptions, torch.device]:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(f"--seconds is {seconds}", hint="it must be more than 0")
    if len(settings.folders) > 1:
        raise UserError(
            f"train bench measures one data folder, and --shards names {len(settings.folders)}",
            hint=f"measure each by itself: --shards {settings.folders[0]}",
        )
    if settings.input != "pixels":
        raise UserError(
            f"train bench measures pixels, not --input {settings.input}", hint="leave out --input and --text-tower"
        )
    device = choose_device(settings.device)
    device = torch.device("cuda", world.local_rank) if device.type == "cuda" else device
    products = open_precision(settings.precision, device_type=device.type).products
    attention, _ = choose_attention(settings, device=device, products=products, world=world)
    task = DualEncoderTask(settings, attention=attention, device=device)
    with Activity(f"opening {settings.folder}"):
        samples = open_consistent(lambda: task.training_set(world), settings, columns=task.columns, world=world)
    if not isinstance(samples, VideoCaptions):
        raise UserError(f"train bench measures a data folder, not {settings.folder}", hint="name one: --shards DIR")
    check_batch(settings, samples)
    return task, samples, device


def _about(samples: VideoCaptions, settings: DualEncoderSettings, device: torch.device) -> dict[str, Any]:
    return {
        "data": samples.describe(),
        "variant": samples.variant_name,
        "device": device.type,
        "machine": machine(device),
        "settings": plain_values(asdict(settings)),
    }


def _too_many(settings: DualEncoderSettings, error: TooManyFailures) -> FailedWork:
    return FailedWork(f"more samples failed than --max-failures {settings.max_failures}; the last: {error}")
