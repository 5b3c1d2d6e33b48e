"""Measurements of `train bench`: each stage separately, then complete steps; or steps by strategy."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.train.bench.communication import measure_breakdown
from clipmill.train.bench.report import advice, judge
from clipmill.train.bench.steps import Opened, enough_samples, measure_stages, open_to_measure, take_steps
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.shards import is_local_folder
from clipmill.train.config.training import Strategy, plain_values
from clipmill.train.device.precision import choose_device
from clipmill.train.distributed.world import World
from clipmill.train.doctor.machine import examine_disk
from clipmill.train.engine.loop import check_batch
from clipmill.train.losses.settings import Exchange
from clipmill.train.run.environment import machine
from clipmill.train.spec import TaskSpec


def run_bench(spec: TaskSpec, settings: ClipSettings, *, seconds: float) -> dict[str, Any]:
    """Measure every stage for about `seconds`, and find the bottleneck; return a JSON-serialisable dict.

    Raises:
        UserError: The data do not exist, or have fewer samples than a batch.
        FailedWork: More samples than `settings.max_failures` could not be loaded.
    """
    opened = _open(spec, settings, World(), seconds=seconds)
    disk = None
    if is_local_folder(settings.folder):
        with Activity("measuring the disk"):
            disk = examine_disk(Path(settings.folder), is_data=True)
    rates, steps = measure_stages(opened, seconds=seconds)
    known = {name: rate for name, rate in rates.stages.items() if rate is not None}
    verdict = judge(known, loader=rates.loader, compute=rates.compute)
    # Steps wait for data only after the batches that were loaded in advance are used up.
    num_ahead = 2 * opened.settings.batches_ahead + 3 if verdict.bound == "data" else 2
    with Activity("measuring complete steps"):
        taken = take_steps(steps, opened, seconds=seconds, at_least=num_ahead)
    return {
        "links": [{"link": name, "items_per_s": rate} for name, rate in rates.stages.items()],
        "loader_items_per_s": rates.loader,
        "compute_items_per_s": rates.compute,
        "step_items_per_s": opened.settings.batch / taken.step_s,
        **asdict(verdict),
        "step_s": taken.step_s,
        "wait_share": taken.wait_share,
        "advice": advice(verdict.cause, opened.settings, cores=len(os.sched_getaffinity(0))),
        "read_bytes_per_item": rates.read_bytes_per_item,
        "memory_bytes": taken.memory_bytes,
        "disk": disk and asdict(disk),
        "num_failed": len(rates.failed),
        "first_failure": next((f"{key}: {detail}" for key, detail in rates.failed.items()), None),
        **_about(opened),
    }


def run_breakdown(
    spec: TaskSpec,
    settings: ClipSettings,
    *,
    strategies: Sequence[Strategy],
    exchanges: Sequence[Exchange | None],
    seconds: float,
    world: World,
) -> dict[str, Any]:
    """Break down steps by strategy and exchange; return a JSON-serialisable dict that is equal on all ranks.

    Raises:
        UserError: The data do not exist or are too small (see `run_bench`), or --parallel.stages is above 1.
        FailedWork: More samples than `settings.max_failures` could not be loaded.
    """
    if settings.parallel.stages > 1:
        raise UserError(
            f"train bench measures data parallelism, not --parallel.stages {settings.parallel.stages}",
            hint="omit --parallel.stages",
            flags=("--parallel.stages",),
        )
    opened, measured = _open(spec, settings, world, seconds=seconds), []
    with enough_samples(opened.settings):
        for name in strategies:
            changed = replace(
                opened, settings=replace(opened.settings, parallel=replace(opened.settings.parallel, strategy=name))
            )
            for exchange in exchanges:
                with Activity(f"measuring steps with {name}{'' if exchange is None else f', exchange {exchange}'}"):
                    measured.append(measure_breakdown(changed, exchange=exchange, seconds=seconds))
    return {"strategies": measured, **_about(opened)}


def _open(spec: TaskSpec, settings: ClipSettings, world: World, *, seconds: float) -> Opened:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(f"--seconds is {seconds}", hint="use a number above 0", flags=("--seconds",))
    if len(settings.folders) > 1:
        raise UserError(
            f"train bench measures one data folder, but --shards names {len(settings.folders)}",
            hint=f"measure each folder separately: --shards {settings.folders[0]}",
            flags=("--shards",),
        )
    device = choose_device(settings.device, needs_gpu=settings.require_gpu)
    device = torch.device("cuda", world.local_rank) if device.type == "cuda" else device
    opened = open_to_measure(spec, settings, world=world, device=device, say=lambda line: None)
    check_batch(opened.settings, opened.samples)
    return opened


def _about(opened: Opened) -> dict[str, Any]:
    return {
        "data": opened.samples.describe(),
        "variant": opened.samples.variant_name,
        "device": opened.device.type,
        "machine": machine(opened.device),
        "settings": plain_values(asdict(opened.settings)),
    }
