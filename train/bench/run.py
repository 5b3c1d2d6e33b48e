"""Benchmark of one process: rates of the stages, complete steps, the bottleneck, and a report with advice."""

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.progress import Activity
from clipmill.train.bench.steps import (
    AUGMENT,
    CROP,
    DECODE,
    LOADER_STAGES,
    READ,
    TOKENS,
    OpenedTask,
    measure_stages,
    open_to_measure,
    take_steps,
)
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.shards import is_local_folder
from clipmill.train.config.training import plain_values
from clipmill.train.device.precision import choose_device
from clipmill.train.distributed.world import World
from clipmill.train.doctor.machine import examine_disk
from clipmill.train.engine.loop import check_batch
from clipmill.train.run.environment import machine
from clipmill.train.spec import TaskSpec


def run_bench(spec: TaskSpec, settings: ClipSettings, *, seconds: float) -> dict[str, Any]:
    """Measure every stage for about `seconds`, and find the bottleneck. Return a JSON-serialisable dict.

    Raises:
        UserError: The data cannot be measured (see `open_bench`).
        FailedWork: More samples than `settings.max_failures` could not be loaded.
    """
    opened_task = open_bench(spec, settings, World(), seconds=seconds)
    disk = None
    if is_local_folder(settings.folder):
        with Activity("measuring the disk"):
            disk = examine_disk(Path(settings.folder), is_data=True)
    rates, steps = measure_stages(opened_task, seconds=seconds)
    stage_rates = {name: rate for name, rate in rates.stages.items() if rate is not None}
    verdict = judge(stage_rates, loader=rates.loader, compute=rates.compute)
    # Steps wait for data only once they have used up the batches that were loaded in advance.
    num_ahead = 2 * opened_task.settings.batches_ahead + 3 if verdict.bound == "data" else 2
    with Activity("measuring complete steps"):
        step_times = take_steps(steps, opened_task, seconds=seconds, min_steps=num_ahead)
    return {
        "links": [{"link": name, "items_per_s": rate} for name, rate in rates.stages.items()],
        "loader_items_per_s": rates.loader,
        "compute_items_per_s": rates.compute,
        "step_items_per_s": opened_task.settings.batch / step_times.step_s,
        **asdict(verdict),
        "step_s": step_times.step_s,
        "wait_share": step_times.wait_share,
        "advice": advice(verdict.cause, opened_task.settings, cores=len(os.sched_getaffinity(0))),
        "read_bytes_per_item": rates.read_bytes_per_item,
        "memory_bytes": step_times.memory_bytes,
        "disk": disk and asdict(disk),
        "num_failed": len(rates.failures),
        "first_failure": next((f"{key}: {detail}" for key, detail in rates.failures.items()), None),
        **facts_of(opened_task),
    }


def open_bench(spec: TaskSpec, settings: ClipSettings, world: World, *, seconds: float) -> OpenedTask:
    """Open a task for measurements.

    Raises:
        UserError: `seconds` is not a number above 0, there are several data folders, the data do not exist, or the data
            contain fewer samples than a batch.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        message = f"--seconds is {seconds}, but must be greater than 0"
        raise UserError(message, hint="use a number above 0", flags=("--seconds",))
    if len(settings.folders) > 1:
        raise UserError(
            f"train bench measures one data folder, but --shards names {len(settings.folders)}",
            hint=f"measure each folder separately: --shards {settings.folders[0]}",
            flags=("--shards",),
        )
    device = choose_device(settings.device, needs_gpu=settings.require_gpu)
    device = torch.device("cuda", world.local_rank) if device.type == "cuda" else device
    opened_task = open_to_measure(spec, settings, world=world, device=device, say=lambda line: None)
    check_batch(opened_task.settings, opened_task.samples)
    return opened_task


def facts_of(opened_task: OpenedTask) -> dict[str, Any]:
    """Return the entries of a result about the data, the machine and the settings."""
    return {
        "data": opened_task.samples.describe(),
        "variant": opened_task.samples.variant_name,
        "device": opened_task.device.type,
        "machine": machine(opened_task.device),
        "settings": plain_values(asdict(opened_task.settings)),
    }


# Conclusions from the rates

_COMPUTE_STAGES = (AUGMENT, "model")
_STAGE_TEXTS = {
    READ: "choose frames, read their packets",
    DECODE: "decode packets to frames",
    CROP: "crop and resize planes",
    TOKENS: "tokenize captions, or look up labels",
    "transfer": "copy to the device",
    AUGMENT: "convert to RGB, jitter, blur, normalise",
    "model": "forward, backward, optimizer step",
}


@dataclass(frozen=True)
class Verdict:
    """Bottleneck of training.

    Attributes:
        slowest: Slowest stage when each stage runs separately.
        bound: "data" if the loader is slower than augmentation and model together, else "compute".
        cause: Slowest stage of the loader if `bound` is "data" ("loader" if it has no stages), else slowest stage of
            the computation.
        expected_wait_share: Fraction of a step that would be spent waiting for data if loader and model did not share
            cores.
    """

    slowest: str
    bound: Literal["data", "compute"]
    cause: str
    expected_wait_share: float


def judge(stages: dict[str, float], *, loader: float, compute: float) -> Verdict:
    """Find the bottleneck.

    Args:
        stages: Items per second of each stage.
        loader, compute: Items per second of the loader, and of augmentation and model together.
    """
    is_data_bound = loader < compute
    rates = stages if any(name in stages for name in LOADER_STAGES) else {**stages, "loader": loader}
    candidates = [name for name in rates if (name in _COMPUTE_STAGES) != is_data_bound]
    return Verdict(
        slowest=min(rates, key=rates.__getitem__),
        bound="data" if is_data_bound else "compute",
        cause=min(candidates, key=rates.__getitem__),
        expected_wait_share=max(0.0, 1 - loader / compute),
    )


def advice(cause: str, settings: ClipSettings, *, cores: int) -> list[str]:
    """Return recommended changes, the most promising first."""
    hints = []
    if cause == DECODE and settings.decode != "packets":
        hints.append("--decode packets")
    if cause in (DECODE, CROP, TOKENS) and settings.workers < cores:
        hints.append(f"more --workers: {settings.workers} of {cores} cores are used")
    if cause in (READ, DECODE) and settings.samples_per_chunk == 1:
        hints.append("--samples-per-chunk 2 or more, so that a chunk is read and decoded once for several samples")
    hints += {
        READ: [
            "a faster disk, or chunks of a lower bitrate",
            "more --workers, because threads that wait for the disk need no cores",
        ],
        DECODE: ["chunks that are cheaper to decode: a smaller short side, or only key frames"],
        CROP: ["chunks with a smaller short side, or a smaller --size-px"],
        TOKENS: ["shorter captions"],
        "loader": ["a faster disk, or more --workers"],
        "transfer": ["a smaller --size-px or fewer --num-frames"],
        AUGMENT: ["a lower --augment.blur: blur is the most expensive augmentation"],
        "model": ["a faster device, a smaller --model or fewer --num-frames; the loader is fast enough"],
    }[cause]
    return hints


def describe_bench(result: dict[str, Any]) -> str:
    """Describe the data, the machine and the settings of a result on one line."""
    settings = result["settings"]
    return (
        f"{'; '.join(filter(None, [result['data'], result['variant'], result['machine']]))}; batches of "
        f"{count_noun(settings['batch'], 'clip')} "
        f"with {count_noun(settings['num_frames'], 'frame')}, {settings['size_px']} px, model {settings['model']}"
    )


def print_report(result: dict[str, Any]) -> None:
    """Print the result of `run_bench`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(describe_bench(result), markup=False)
    table = Table("stage", "what it does", box=None, padding=(0, 2, 0, 0))
    for name in ("items/s", "ms per item"):
        table.add_column(name, justify="right")
    for link in result["links"]:
        mark = " ←" if link["link"] == result["slowest"] else ""
        table.add_row(link["link"] + mark, _STAGE_TEXTS[link["link"]], *_cells(link["items_per_s"]))
    table.add_section()
    workers = result["settings"]["workers"]
    table.add_row(
        "loader", f"from disk to batches, {count_noun(workers, 'worker')}", *_cells(result["loader_items_per_s"])
    )
    table.add_row("compute", "augment and model, on one batch", *_cells(result["compute_items_per_s"]))
    table.add_row("step", "loader and compute at the same time", *_cells(result["step_items_per_s"]))
    console.print(table)
    for line in _conclusion(result):
        console.print(line, markup=False)


def _cells(items_per_s: float | None) -> tuple[str, str]:
    return ("not needed", "") if items_per_s is None else (f"{items_per_s:,.1f}", f"{1000 / items_per_s:,.3f}")


def _conclusion(result: dict[str, Any]) -> list[str]:
    loader, compute, cause = result["loader_items_per_s"], result["compute_items_per_s"], result["cause"]
    lines = [
        f"slowest stage: {result['slowest']}; training is {result['bound']}-bound: the loader produces {loader:,.1f} "
        f"items/s, augment and model process {compute:,.1f}",
        f"a step takes {1000 * result['step_s']:,.1f} ms, and waits for data {result['wait_share']:.0%} of this time "
        f"(expected: {result['expected_wait_share']:.0%})",
        f"memory: {size_text(result['memory_bytes'])}{' of GPU memory' if result['device'] == 'cuda' else ''}",
    ]
    if result["read_bytes_per_item"] is not None:
        lines.append(f"the loader reads {result['read_bytes_per_item'] / 1000:,.0f} kB per sample from the disk")
    if speed := (result["disk"] or {}).get("speed"):
        per_s = size_text(speed["read_bytes_per_s"])
        lines.append(
            f"the disk reads {per_s}/s sequentially, and 64 KiB at a random position in {speed['piece_ms']:.2f} ms"
        )
    if cause != result["slowest"]:
        lines.append(
            f"the bottleneck is {cause}: each loader thread runs its stages in sequence, so their times add up"
        )
    if result["device"] == "cpu":
        lines.append("the model and the decoders share the cores, so both are slower than when they run separately")
    lines += [f"what to change ({cause}): {hint}" for hint in result["advice"]]
    if result["num_failed"]:
        failures = f"{count_noun(result['num_failed'], 'sample')} could not be loaded"
        lines.append(f"{failures}; the first failure: {result['first_failure']}")
    return lines
