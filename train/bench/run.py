"""A complete benchmark of one process: the stages separately, then complete steps; the bottleneck, advice and table."""

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
    LOADING,
    READ,
    TOKENS,
    Opened,
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
    """Measure every stage for about `seconds`, and find the bottleneck; return a JSON-serialisable dict.

    Raises:
        UserError: The data do not exist, or have fewer samples than a batch.
        FailedWork: More samples than `settings.max_failures` could not be loaded.
    """
    opened = open_bench(spec, settings, World(), seconds=seconds)
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
        **facts_of(opened),
    }


def open_bench(spec: TaskSpec, settings: ClipSettings, world: World, *, seconds: float) -> Opened:
    """Open a task to measure it; UserError as for `run_bench`."""
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


def facts_of(opened: Opened) -> dict[str, Any]:
    """Return the entries of a result that say what was measured, and where."""
    return {
        "data": opened.samples.describe(),
        "variant": opened.samples.variant_name,
        "device": opened.device.type,
        "machine": machine(opened.device),
        "settings": plain_values(asdict(opened.settings)),
    }


# Conclusions from the rates.

_COMPUTE = (AUGMENT, "model")
_WHAT = {
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
        slowest: Slowest stage when the stages run separately.
        bound: "data" if the loader is slower than augmentation and model together, else "compute".
        cause: Slowest stage of loading or computing, according to `bound`; "loader" if the stages of loading are
            unknown.
        expected_wait_share: Expected fraction of a step spent waiting for data, if loader and model do not share cores.
    """

    slowest: str
    bound: Literal["data", "compute"]
    cause: str
    expected_wait_share: float


def judge(stages: dict[str, float], *, loader: float, compute: float) -> Verdict:
    """Find the bottleneck from the items per second of each stage, of the loader, and of augmentation and model."""
    is_data_bound = loader < compute
    rates = stages if any(name in stages for name in LOADING) else {**stages, "loader": loader}
    candidates = [name for name in rates if (name in _COMPUTE) != is_data_bound]
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
            "more --workers, which wait for the disk and not for cores",
        ],
        DECODE: ["chunks that are cheaper to decode: a smaller short side, or every frame a key frame"],
        CROP: ["chunks of a smaller short side, or a smaller --size-px"],
        TOKENS: ["shorter captions"],
        "loader": ["a faster disk, or more --workers"],
        "transfer": ["a smaller --size-px or fewer --num-frames"],
        AUGMENT: ["lower --augment.blur: blur is the most expensive augmentation"],
        "model": ["the data keeps up; for more speed use a faster device, a smaller --model or fewer --num-frames"],
    }[cause]
    return hints


def about(result: dict[str, Any]) -> str:
    """Describe what was measured, on one line."""
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
    console.print(about(result), markup=False)
    table = Table("stage", "what it does", box=None, padding=(0, 2, 0, 0))
    for name in ("items/s", "ms per item"):
        table.add_column(name, justify="right")
    for link in result["links"]:
        mark = " ←" if link["link"] == result["slowest"] else ""
        table.add_row(link["link"] + mark, _WHAT[link["link"]], *_cells(link["items_per_s"]))
    table.add_section()
    workers = result["settings"]["workers"]
    table.add_row(
        "loader", f"from disk to batches, {count_noun(workers, 'worker')}", *_cells(result["loader_items_per_s"])
    )
    table.add_row("compute", "augment and model, a batch on the device", *_cells(result["compute_items_per_s"]))
    table.add_row("step", "loader and compute, overlapping", *_cells(result["step_items_per_s"]))
    console.print(table)
    for line in _conclusion(result):
        console.print(line, markup=False)


def _cells(items_per_s: float | None) -> tuple[str, str]:
    return ("not needed", "") if items_per_s is None else (f"{items_per_s:,.1f}", f"{1000 / items_per_s:,.3f}")


def _conclusion(result: dict[str, Any]) -> list[str]:
    loader, compute, cause = result["loader_items_per_s"], result["compute_items_per_s"], result["cause"]
    lines = [
        f"slowest stage: {result['slowest']}; {result['bound']}-bound: the loader produces {loader:,.1f} items/s, "
        f"augment and model process {compute:,.1f}",
        f"a step takes {1000 * result['step_s']:,.1f} ms; {result['wait_share']:.0%} of it is waiting for data "
        f"(expected: {result['expected_wait_share']:.0%})",
        f"memory: {size_text(result['memory_bytes'])}{' of GPU memory' if result['device'] == 'cuda' else ''}",
    ]
    if result["read_bytes_per_item"] is not None:
        lines.append(f"{result['read_bytes_per_item'] / 1000:,.0f} kB are read from the disk per sample")
    if speed := (result["disk"] or {}).get("speed"):
        per_s = size_text(speed["read_bytes_per_s"])
        lines.append(f"the disk is read at {per_s}/s, 64 KiB in {speed['piece_ms']:.2f} ms")
    if cause != result["slowest"]:
        lines.append(f"the bottleneck is {cause}: stages before the model add up in each loader thread")
    if result["device"] == "cpu":
        lines.append("the model shares the cores with decoding, so each is slower than when it runs separately")
    lines += [f"what to change ({cause}): {hint}" for hint in result["advice"]]
    if result["num_failed"]:
        lines.append(
            f"{count_noun(result['num_failed'], 'sample')} could not be loaded; the first: {result['first_failure']}"
        )
    return lines
