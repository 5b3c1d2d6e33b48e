"""Break down the time of a step on several processes into computation, communication and overlap, for `train bench`.

The method is from FastCLIP (figure 3, tables 15 to 22): torch.profiler records steps of the training loop, and the
intervals of all events of the same kind are merged. The parts of a step are

    compute      time in which an operation computes: on a GPU, kernels other than NCCL's (copies do not count); on a
                 CPU, operators of the training thread
    overlap      communication during computation
    exposed      communication without computation (FastCLIP: pure communication)
    other        all other time: waiting for data, Python, launches

    compute + exposed + other = total;  overlap + exposed = communication

Communication lasts from the first byte to the end of a collective on this rank, including the time that an early rank
waits for the other ranks. The exchange of failures and signals before a step (clipmill.train.engine.failures) is not
included. Recording makes steps slower; `unrecorded_s` is the time of a step without recording.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, pstdev
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.publish import publish_bytes
from clipmill.shards.pages.templates import load_template
from clipmill.train.bench.run import describe_bench, facts_of, open_bench
from clipmill.train.bench.steps import OpenedTask, Steps, convert_failures
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.training import Strategy
from clipmill.train.distributed.world import World
from clipmill.train.losses.contrastive import (
    AutogradObjective,
    ContrastiveObjective,
    Similarities,
    Weights,
    blocks,
    exact_products,
)
from clipmill.train.losses.settings import Exchange
from clipmill.train.spec import TaskSpec


class FeatureExchange(Similarities):
    """OpenCLIP's exchange for a contrastive loss, which is the baseline in FastCLIP's tables 15 to 22.

    Embeddings are gathered with their gradients. Each rank computes the losses with its own clips and captions as
    anchors, and obtains gradients for the embeddings of all ranks. REDUCE_SCATTER sums these gradients: 2 B E numbers.
    The exchange in training (clipmill.train.losses.contrastive) sends only a few numbers per pair. Both exchanges give
    the same loss and gradients.
    """

    def gradients(
        self, weights: Weights, *, clips_KB: torch.Tensor, captions_KB: torch.Tensor, pair_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of the base class from only this rank's pairs, and sum them over the ranks."""
        width = self.video_bE.shape[1]
        videos, texts = slice(0, width), slice(width, None)
        grad_B2E = torch.zeros_like(self.pairs_B2E)
        sides = ((self.video_to_text_bB, clips_KB, videos, texts), (self.text_to_video_bB, captions_KB, texts, videos))
        with exact_products(self.pair_b.device):
            for rows_bB, values_KB, columns, opposite in sides:
                for rows in blocks(rows_bB):
                    global_rows = slice(self.local_rows.start + rows.start, self.local_rows.start + rows.stop)
                    weight_RB = weights(rows_bB[rows], values_KB[:, global_rows, None])
                    if not len(values_KB):  # `weights` returns W, and each side uses half of it
                        weight_RB.div_(2)
                    weight_RB[:, global_rows].diagonal().copy_(pair_B[global_rows] / 2)
                    grad_B2E[global_rows, columns].addmm_(weight_RB, self.pairs_B2E[:, opposite])
                    grad_B2E[:, opposite].addmm_(weight_RB.T, self.pairs_B2E[global_rows, columns])
        grad_b2E = self.world.reduce_scatter(grad_B2E).mul_(self.world.size)
        return grad_b2E[:, videos], grad_b2E[:, texts]


_STEP = "clipmill::step"
_NUM_WARMUP = 3  # number of steps before the measurement
_MIN_STEPS, _MAX_STEPS = 3, 50


@dataclass(frozen=True)
class Event:
    """Event in a profile. Times are in microseconds; `thread` is the ID of a host thread."""

    name: str
    begin: float
    end: float
    is_on_device: bool = False
    thread: int = 0


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Time of a step and of its parts, in seconds. The docstring of the module defines the parts."""

    total_s: float
    compute_s: float
    overlap_s: float
    exposed_s: float
    other_s: float


def breakdowns(events: Sequence[Event]) -> list[Breakdown]:
    """Break down each step in the profile of a rank."""
    steps = [event for event in events if event.name == _STEP and not event.is_on_device]
    threads, has_device = {step.thread for step in steps}, any(event.is_on_device for event in events)
    compute_events, communication_events = [], []
    for event in events:
        name = event.name
        if name.startswith("gloo:") or (event.is_on_device and "nccl" in name.lower()):
            communication_events.append(event)
        elif (event.is_on_device and not name.startswith(("Memcpy", "Memset"))) or (
            not has_device and name.startswith("aten::") and event.thread in threads
        ):
            compute_events.append(event)
    return [_break_down_step(step, compute_events, communication_events) for step in steps]


def _break_down_step(step: Event, compute_events: Sequence[Event], communication_events: Sequence[Event]) -> Breakdown:
    changes = [(step.end, 0, 0)]
    for kind, events in enumerate((compute_events, communication_events)):
        for event in events:
            start, end = max(event.begin, step.begin), min(event.end, step.end)
            if start < end:
                changes += [(start, kind, 1), (end, kind, -1)]
    # Seconds with and without computation (first key) and communication (second key).
    seconds, num_running, previous_us = {(a, b): 0.0 for a in (False, True) for b in (False, True)}, [0, 0], step.begin
    for time, kind, change in sorted(changes):
        seconds[num_running[0] > 0, num_running[1] > 0] += (time - previous_us) / 1e6
        num_running[kind] += change
        previous_us = time
    return Breakdown(
        total_s=(step.end - step.begin) / 1e6,
        compute_s=seconds[True, False] + seconds[True, True],
        overlap_s=seconds[True, True],
        exposed_s=seconds[False, True],
        other_s=seconds[False, False],
    )


_EXCHANGES: dict[Exchange, type[Similarities]] = {"scalars": Similarities, "features": FeatureExchange}


def run_breakdown(
    spec: TaskSpec,
    settings: ClipSettings,
    *,
    strategies: Sequence[Strategy],
    exchanges: Sequence[Exchange | None],
    seconds: float,
    world: World,
) -> dict[str, Any]:
    """Break down steps with each strategy and exchange. Return a JSON-serialisable dict, the same on all ranks.

    Args:
        exchanges: Exchanges for a contrastive loss; None for the exchange that training uses.
        seconds: Approximate duration of each measurement in seconds.

    Raises:
        UserError: The data cannot be measured (see `open_bench`), --parallel.stages is above 1, or the exchange of the
            objective cannot be replaced.
        FailedWork: More samples than `settings.max_failures` could not be loaded.
    """
    if settings.parallel.stages > 1:
        raise UserError(
            f"train bench measures data parallelism, not --parallel.stages {settings.parallel.stages}",
            hint="omit --parallel.stages",
            flags=("--parallel.stages",),
        )
    opened_task, results = open_bench(spec, settings, world, seconds=seconds), []
    with convert_failures(opened_task.settings):
        for name in strategies:
            changed_task = replace(
                opened_task,
                settings=replace(opened_task.settings, parallel=replace(opened_task.settings.parallel, strategy=name)),
            )
            for exchange in exchanges:
                with Activity(f"measuring steps with {name}{'' if exchange is None else f', exchange {exchange}'}"):
                    results.append(measure_breakdown(changed_task, exchange=exchange, seconds=seconds))
    return {"strategies": results, **facts_of(opened_task)}


def measure_breakdown(opened_task: OpenedTask, *, exchange: Exchange | None, seconds: float) -> dict[str, Any]:
    """Break down training steps. All ranks call this function and get the same JSON-serialisable dict.

    Args:
        exchange: Exchange for a contrastive loss; None for the exchange that training uses.

    Raises:
        UserError: The exchange of this objective cannot be replaced.
    """
    steps, world = Steps(opened_task), opened_task.world
    if exchange is not None:
        objective = steps.state.objective
        if not isinstance(objective, ContrastiveObjective) or isinstance(objective, AutogradObjective):
            raise UserError(
                "--exchanges needs a contrastive loss with gradients in closed form, but the objective is "
                f"{type(objective).__name__}",
                hint="omit --exchanges, or measure a task with one of clipmill's contrastive losses (--loss.kind)",
                flags=("--exchanges",),
            )
        objective.exchange = _EXCHANGES[exchange]
    batches = steps.batches()

    def take() -> None:
        with record_function(_STEP):
            steps.take(next(batches))

    try:
        for _ in range(_NUM_WARMUP):
            take()
        began = perf_counter()
        take()
        slowest_s = max(world.gather_objects(perf_counter() - began))
        num_steps = min(max(round(seconds / slowest_s), _MIN_STEPS), _MAX_STEPS)
        began = perf_counter()
        for _ in range(num_steps):
            take()
        unrecorded_s = (perf_counter() - began) / num_steps
        with _record_events(opened_task.device) as events:
            for _ in range(num_steps):
                take()
    finally:
        batches.close()
    ranks: list[list[Breakdown]] = world.gather_objects(breakdowns(events))
    all_steps = [asdict(step) for rank in ranks for step in rank]
    names = [field.name for field in fields(Breakdown)]
    return {
        "strategy": opened_task.settings.parallel.strategy,
        "exchange": exchange,
        "num_processes": world.size,
        "num_steps": num_steps,
        "unrecorded_s": fmean(world.gather_objects(unrecorded_s)),
        "mean": {name: fmean(step[name] for step in all_steps) for name in names},
        "std": {name: pstdev(step[name] for step in all_steps) for name in names},
        "ranks": [{name: fmean(getattr(step, name) for step in rank) for name in names} for rank in ranks],
    }


@contextmanager
def _record_events(device: torch.device) -> Iterator[list[Event]]:
    """Record the events within the block. The list is filled when the block ends."""
    events: list[Event] = []
    if device.type != "cuda":  # without a GPU, the profiler's library would print several messages
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        yield events
    for event in profiler.events() or []:
        is_on_device = event.device_type == torch.autograd.DeviceType.CUDA
        # Omit ranges of the host (record_function) on the timeline of the device: they cover the events inside them.
        if not (is_on_device and event.is_user_annotation):
            events.append(Event(event.name, event.time_range.start, event.time_range.end, is_on_device, event.thread))


# The table on the console, and the page.


_COLUMNS = ("strategy", "total", "compute", "overlap", "exposed", "other", "std of total", "unrecorded")
_NOTES = (
    "compute: an operation computes; overlap: communication during computation; exposed: communication without "
    "computation; other: neither. compute + exposed + other = total.",
    "Exchange for a contrastive loss: scalars (FastCLIP, as in training) or features (OpenCLIP).",
    "Communication includes waiting for slower processes. Unrecorded: the time of a step without the profiler.",
)


def print_breakdown(result: dict[str, Any]) -> None:
    """Print the result of `run_breakdown`."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(describe_bench(result), markup=False)
    table = Table(_COLUMNS[0], box=None, padding=(0, 2, 0, 0))
    for column in _COLUMNS[1:]:
        table.add_column(column, justify="right")
    for row in _rows(result):
        table.add_row(*row)
    console.print(table)
    for line in ("Milliseconds per step, means over all processes.", *_NOTES):
        console.print(line, markup=False)


def write_breakdown(result: dict[str, Any], path: Path) -> None:
    """Write the result of `run_breakdown` as a page, with a bar and a table row for each strategy and exchange."""
    longest_s = max(strategy["mean"]["total_s"] for strategy in result["strategies"])
    bars = []
    for strategy in result["strategies"]:
        mean = strategy["mean"]
        seconds = {
            "compute only": mean["compute_s"] - mean["overlap_s"],
            "compute and communication": mean["overlap_s"],
            "exposed communication": mean["exposed_s"],
            "other": mean["other_s"],
        }
        parts = [
            {"name": name, "ms": 1000 * value, "share": 100 * value / mean["total_s"]}
            for name, value in seconds.items()
        ]
        width = 100 * mean["total_s"] / longest_s
        bars.append({"strategy": _label(strategy), "total_ms": 1000 * mean["total_s"], "width": width, "parts": parts})
    page = load_template(Path(__file__).with_name("bench.html.j2")).render(
        num_processes=result["strategies"][0]["num_processes"],
        about=describe_bench(result),
        names=[part["name"] for part in bars[0]["parts"]],
        bars=bars,
        columns=_COLUMNS,
        rows=_rows(result),
        notes=_NOTES,
    )
    publish_bytes(path, page.encode())


def _label(strategy: dict[str, Any]) -> str:
    return ", ".join(filter(None, (strategy["strategy"], strategy["exchange"])))


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for strategy in result["strategies"]:
        mean = strategy["mean"]
        seconds = [mean[f"{column}_s"] for column in _COLUMNS[1:6]]
        seconds += [strategy["std"]["total_s"], strategy["unrecorded_s"]]
        rows.append((_label(strategy), *(f"{1000 * value:,.1f}" for value in seconds)))
    return rows
