"""Rates of operations, the bottleneck that follows from them, advice, and the table that `train bench` prints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

_COMPUTE = ("augment", "model")
_WHAT = {
    "read": "read the packets of the frames",
    "decode": "decode packets to frames",
    "crop": "crop and resize planes",
    "tokens": "tokenize captions",
    "collate": "copy samples into a batch",
    "transfer": "copy to the device",
    "augment": "convert to RGB, jitter, blur, normalise",
    "model": "forward, backward, optimizer step",
}


@dataclass(frozen=True)
class Rate:
    """Speed of an operation, over `num_rounds` rounds."""

    items_per_s: float
    num_rounds: int


class Rounds:
    """Timings of an operation."""

    def __init__(self) -> None:
        self.seconds_per_item: list[float] = []
        self.total_s = 0.0

    def add(self, seconds: float, *, num_items: int) -> None:
        """Add a round."""
        self.total_s += seconds
        self.seconds_per_item.append(seconds / num_items)

    @property
    def median_rate(self) -> Rate:
        """For independent rounds."""
        return Rate(1 / median(self.seconds_per_item), len(self.seconds_per_item))

    @property
    def mean_rate(self) -> Rate:
        """For rounds that take from a queue, where a fast one only means that others have waited."""
        return Rate(1 / fmean(self.seconds_per_item), len(self.seconds_per_item))


def repeat(work: Callable[[], object], *, num_items: int, seconds: float) -> Rate:
    """Rate of `work`, which processes `num_items` synchronously; the first call is not counted."""
    work()
    rounds = Rounds()
    while rounds.total_s < seconds:
        began = time.perf_counter()
        work()
        rounds.add(time.perf_counter() - began, num_items=num_items)
    return rounds.median_rate


@dataclass(frozen=True)
class Verdict:
    """The bottleneck.

    Attributes:
        slowest: the slowest operation by itself.
        bound: "data" if the loader is slower than augmentation and model together.
        cause: the slowest operation on that side.
        compute_items_per_s: rate of augmentation and model in sequence.
        expected_wait_share: share of a step spent waiting for data, if loader and model do not share cores.
    """

    slowest: str
    bound: Literal["data", "compute"]
    cause: str
    compute_items_per_s: float
    expected_wait_share: float


def judge(rates: dict[str, float], *, loader_items_per_s: float) -> Verdict:
    """Find the bottleneck from items per second, by operation."""
    compute = 1 / sum(1 / rates[name] for name in _COMPUTE)
    is_data_bound = loader_items_per_s < compute
    of_side = [name for name in rates if (name in _COMPUTE) != is_data_bound]
    return Verdict(
        slowest=min(rates, key=rates.__getitem__),
        bound="data" if is_data_bound else "compute",
        cause=min(of_side, key=rates.__getitem__),
        compute_items_per_s=compute,
        expected_wait_share=max(0.0, 1 - loader_items_per_s / compute),
    )


def advice(verdict: Verdict, *, workers: int, cores: int, decode: str, samples_per_chunk: int) -> list[str]:
    """What to change, the most promising first."""
    if verdict.bound == "compute":
        return {
            "augment": ["lower --augment.blur: blur is the most expensive augmentation"],
            "model": ["the data keeps up; for more speed use a faster device, a smaller --model or fewer --num-frames"],
        }[verdict.cause]
    found = []
    if verdict.cause == "decode" and decode != "packets":
        found.append("--decode packets")
    if verdict.cause in ("decode", "crop", "tokens") and workers < cores:
        found.append(f"more --workers: {workers} of {cores} cores are used")
    if verdict.cause in ("read", "decode") and samples_per_chunk == 1:
        found.append("--samples-per-chunk 2 or more, so that a chunk is read and decoded once for several samples")
    found += {
        "read": [
            "a faster disk, or chunks of a lower bitrate",
            "more --workers, which wait for the disk and not for cores",
        ],
        "decode": ["chunks that are cheaper to decode: a smaller short side, or every frame a key frame"],
        "crop": ["chunks of a smaller short side, or a smaller --size-px"],
        "tokens": ["shorter captions"],
        "collate": ["a smaller --size-px or fewer --num-frames"],
        "transfer": ["a smaller --size-px or fewer --num-frames"],
    }[verdict.cause]
    return found


def print_report(result: dict[str, Any]) -> None:
    """Print a result of `clipmill.train.bench.run.run_bench`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    settings = result["settings"]
    console.print(
        f"data: {result['data']}; {result['variant']}\n"
        f"on: {result['machine']}; batches of {settings['batch']} clips of {settings['num_frames']} frames, "
        f"{settings['size_px']} px, model {settings['model']}",
        markup=False,
    )
    table = Table("operation", "what it does", box=None, padding=(0, 2, 0, 0))
    for name in ("items/s", "ms per item"):
        table.add_column(name, justify="right")
    for link in result["links"]:
        mark = " ←" if link["link"] == result["slowest"] else ""
        table.add_row(link["link"] + mark, _WHAT[link["link"]], *_cells(link["items_per_s"]))
    table.add_section()
    table.add_row(
        "loader", f"from disk to batches, {settings['workers']} workers", *_cells(result["loader_items_per_s"])
    )
    table.add_row("compute", "augment, then model", *_cells(result["compute_items_per_s"]))
    table.add_row("step", "loader and compute, overlapping", *_cells(result["step_items_per_s"]))
    console.print(table)
    for line in _conclusion(result):
        console.print(line, markup=False)


def _cells(items_per_s: float | None) -> tuple[str, str]:
    return ("not needed", "") if items_per_s is None else (f"{items_per_s:,.1f}", f"{1000 / items_per_s:,.3f}")


def _conclusion(result: dict[str, Any]) -> list[str]:
    loader, compute = result["loader_items_per_s"], result["compute_items_per_s"]
    if result["bound"] == "data":
        meaning = f"data-bound: the loader gives {loader:,.1f} items/s, augment and model could process {compute:,.1f}"
        meaning += f"; they would wait for {result['expected_wait_share']:.0%} of a step"
    else:
        meaning = (
            f"compute-bound: augment and model process {compute:,.1f} items/s, the loader could give {loader:,.1f}"
        )
    lines = [
        f"slowest operation: {result['slowest']}",
        f"{meaning}; measured: {result['wait_share']:.0%} of a step",
        f"{result['read_bytes_per_item'] / 1000:,.0f} kB are read from the disk per sample",
    ]
    if result["cause"] != result["slowest"]:
        lines.append(f"the bottleneck is {result['cause']}: operations before the model add up in each loader thread")
    if result["device"] == "cpu":
        lines.append("the model shares the cores with decoding, so together each is slower than alone")
    lines += [f"what to change ({result['cause']}): {advice}" for advice in result["advice"]]
    if result["num_failed"]:
        lines.append(f"{result['num_failed']} samples could not be loaded; the first: {result['first_failure']}")
    return lines
