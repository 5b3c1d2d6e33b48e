"""What the rates of the links say: which side holds up the other, by which link, and what would help."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

COMPUTE_LINKS = ("augment", "model")


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    slowest: of all links, each by itself.
    bound: "data" where the loader is slower than what uses its batches.
    cause: the slowest link of that side.
    compute_items_per_s: of augment and model, one after the other.
    expected_wait_share: of a step, where loader and model overlap and do not share the processor.
    """

    slowest: str
    bound: Literal["data", "compute"]
    cause: str
    compute_items_per_s: float
    expected_wait_share: float


def judge(links: dict[str, float], *, loader_items_per_s: float) -> Verdict:
    """The verdict on items per second, by link."""
    compute = 1 / sum(1 / links[name] for name in COMPUTE_LINKS)
    is_data_bound = loader_items_per_s < compute
    of_side = [name for name in links if (name in COMPUTE_LINKS) != is_data_bound]
    return Verdict(
        slowest=min(links, key=links.__getitem__),
        bound="data" if is_data_bound else "compute",
        cause=min(of_side, key=links.__getitem__),
        compute_items_per_s=compute,
        expected_wait_share=max(0.0, 1 - loader_items_per_s / compute),
    )


def advice(verdict: Verdict, *, workers: int, cores: int, decode: str, samples_per_chunk: int) -> list[str]:
    """What to change, the most promising first."""
    if verdict.bound == "compute":
        return {
            "augment": ["lower --augment.blur: blur is what costs most there"],
            "model": ["the data keeps up; to go faster, use a faster device, a smaller --model or fewer --num-frames"],
        }[verdict.cause]
    found = []
    if verdict.cause == "decode" and decode != "packets":
        found.append("--decode packets")
    if verdict.cause in ("decode", "crop", "tokens") and workers < cores:
        found.append(f"more --workers: {workers} of {cores} cores are used")
    if verdict.cause in ("read", "decode") and samples_per_chunk == 1:
        found.append("--samples-per-chunk 2 or more: chunks are read and decoded once for several samples")
    found += {
        "read": [
            "a faster disk, or chunks of a lower bitrate",
            "more --workers: they wait for the disk, not for cores",
        ],
        "decode": ["chunks that are cheaper to decode: a smaller short side, or every frame a key frame"],
        "crop": ["chunks of a smaller short side, or a smaller --size-px"],
        "tokens": ["shorter captions"],
        "collate": ["a smaller --size-px or fewer --num-frames"],
        "transfer": ["a smaller --size-px or fewer --num-frames"],
    }[verdict.cause]
    return found


# The table that `train bench` prints.


_WHAT = {
    "read": "bytes of the packets that are needed",
    "decode": "packets to frames",
    "crop": "cut out and resize planes",
    "tokens": "captions to tokens",
    "collate": "samples to a batch",
    "transfer": "host to device",
    "augment": "planes to pictures, jitter, blur, normalise",
    "model": "forward, backward, step",
}


def print_report(result: dict[str, Any]) -> None:
    """Prints a result of `train.bench.run.run_bench`."""
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
    table = Table("link", "what it does", box=None, padding=(0, 2, 0, 0))
    for name in ("items/s", "ms an item"):
        table.add_column(name, justify="right")
    for link in result["links"]:
        mark = " ←" if link["link"] == result["slowest"] else ""
        table.add_row(link["link"] + mark, _WHAT[link["link"]], *_cells(link["items_per_s"]))
    table.add_section()
    table.add_row("loader", f"disk to batches, {settings['workers']} workers", *_cells(result["loader_items_per_s"]))
    table.add_row("compute", "augment, then model", *_cells(result["compute_items_per_s"]))
    table.add_row("step", "all of it, overlapping", *_cells(result["step_items_per_s"]))
    console.print(table)
    for line in _conclusion(result):
        console.print(line, markup=False)


def _cells(items_per_s: float | None) -> tuple[str, str]:
    return ("not needed", "") if items_per_s is None else (f"{items_per_s:,.1f}", f"{1000 / items_per_s:,.3f}")


def _conclusion(result: dict[str, Any]) -> list[str]:
    loader, compute = result["loader_items_per_s"], result["compute_items_per_s"]
    if result["bound"] == "data":
        meaning = f"data-bound: the loader gives {loader:,.1f} items/s, augment and model would take {compute:,.1f}"
        meaning += f"; they would wait for {result['expected_wait_share']:.0%} of a step"
    else:
        meaning = f"compute-bound: augment and model take {compute:,.1f} items/s, the loader could give {loader:,.1f}"
    lines = [
        f"slowest link: {result['slowest']}",
        f"{meaning}; measured: {result['wait_share']:.0%} of a step is waiting for data",
        f"a sample takes {result['read_bytes_per_item'] / 1000:,.0f} kB from the disk",
    ]
    if result["cause"] != result["slowest"]:
        lines.append(f"what holds up the step is {result['cause']}: the links before the model add up in each thread")
    if result["device"] == "cpu":
        lines.append("the model runs on the cores that decode: together each is slower than alone")
    lines += [f"what to change ({result['cause']}): {advice}" for advice in result["advice"]]
    if result["num_failed"]:
        lines.append(f"{result['num_failed']} samples could not be had; the first: {result['first_failure']}")
    return lines


# Repeating a piece of work for a given time: a round to warm up, then rounds that count.


@dataclass(frozen=True)
class Rate:
    """How fast a link is, over `num_rounds` rounds."""

    items_per_s: float
    num_rounds: int


class Rounds:
    """Seconds an item of the rounds so far, of one link."""

    def __init__(self) -> None:
        self.seconds_an_item: list[float] = []
        self.total_s = 0.0

    def add(self, seconds: float, *, num_items: int) -> None:
        """Counts one round."""
        self.total_s += seconds
        self.seconds_an_item.append(seconds / num_items)

    @property
    def median_rate(self) -> Rate:
        """Of rounds that do not depend on one another."""
        return Rate(1 / median(self.seconds_an_item), len(self.seconds_an_item))

    @property
    def mean_rate(self) -> Rate:
        """Of rounds that take from a queue, where a quick one only means that others have waited."""
        return Rate(1 / fmean(self.seconds_an_item), len(self.seconds_an_item))


def repeat(work: Callable[[], object], *, num_items: int, seconds: float) -> Rate:
    """The rate of `work`, which handles `num_items` each time and returns when all of it is done."""
    work()
    rounds = Rounds()
    while rounds.total_s < seconds:
        began = time.perf_counter()
        work()
        rounds.add(time.perf_counter() - began, num_items=num_items)
    return rounds.median_rate
