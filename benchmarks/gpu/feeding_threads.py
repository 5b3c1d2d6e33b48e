"""The training loader with 1 to 16 threads: clips per second, and the gain of each additional thread."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.feeding_data import require_repeated
from benchmarks.gpu.measurements import Result, Setup
from clipmill.train.data.loader import Loader, LoaderSettings
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import open_attention
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask

_NUMBERS = (1, 2, 4, 8, 16)
_WARM_BATCHES = 2
_BATCHES_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Clips to load, as flags of `train dual-encoder`."""

    num_frames: int
    sampling: str
    size_px: int
    batch: int


_SHOWN = {
    "4 frames": Shown(num_frames=4, sampling="uniform", size_px=224, batch=64),
    "16 frames, stride 4": Shown(num_frames=16, sampling="stride", size_px=224, batch=32),
}


def thread_counts(cores: int, *, is_dry_run: bool) -> list[int]:
    """Return the numbers of threads to measure on this machine."""
    return [1, 2] if is_dry_run else [number for number in _NUMBERS if number <= max(cores, 2)]


def measure_threads(setup: Setup) -> Result:
    """Measure the clips per second for each number of threads, in turns."""
    data = str(require_repeated(setup))
    cores = len(os.sched_getaffinity(0))
    numbers = thread_counts(cores, is_dry_run=setup.is_dry_run)
    num_rounds, seconds = (1, 0.02) if setup.is_dry_run else (3, 1.0)
    rows: list[dict[str, Any]] = []
    for name, shown in _SHOWN.items():
        samples = _samples(replace(shown, size_px=32, batch=4) if setup.is_dry_run else shown, data=data)
        rates: dict[int, list[float]] = {number: [] for number in numbers}
        cpu_ms: dict[int, list[float]] = {number: [] for number in numbers}
        for turn in range(num_rounds):
            for number in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
                with _batches(samples, batch=shown.batch, num_threads=number) as take:
                    rate, spent_ms = _time_turn(take, seconds=seconds)
                rates[number].append(rate)
                cpu_ms[number].append(spent_ms)
        rows += [
            {
                "clips": name,
                "threads": number,
                "clips/s": round(median(rates[number])),
                "lowest": round(min(rates[number])),
                "highest": round(max(rates[number])),
                "/ one thread": round(ratio(rates[number], rates[1]), 2),
                "CPU ms a clip": round(median(cpu_ms[number]), 2),
            }
            for number in numbers
        ]
    return Result(
        rows=rows,
        notes=[
            "the chunks are new copies of a small set, so all reads are from the page cache, and the disk is not "
            "measured",
            f"{cores} cores; medians of {num_rounds} interleaved rounds, {seconds:g} s per turn",
        ],
    )


def _samples(shown: Shown, *, data: str) -> Samples[Any]:
    settings = DualEncoderSettings(
        shards=data,
        num_frames=shown.num_frames,
        sampling=shown.sampling,  # type: ignore[arg-type]
        size_px=shown.size_px,
        batch=shown.batch,
        device="cpu",
    )
    attention = open_attention("sdpa", device_type="cpu")
    samples = DualEncoderTask(settings, attention=attention, device=torch.device("cpu")).training_set(World())
    assert isinstance(samples, Samples)
    return samples


@contextmanager
def _batches(samples: Samples[Any], *, batch: int, num_threads: int) -> Iterator[Callable[[], int]]:
    """Open the loader within the block; yield a function that loads a batch and returns its number of clips."""
    settings = LoaderSettings(batch=batch, num_threads=num_threads, num_ahead=batch * _BATCHES_AHEAD, seed=0)
    with closing(Loader(samples, samples.reader, settings).batches(max_failures=0)) as batches:
        for _ in range(_WARM_BATCHES):
            next(batches)
        yield lambda: len(next(batches).batch["key"])


def _time_turn(take: Callable[[], int], *, seconds: float) -> tuple[float, float]:
    """Return the clips per second of wall time, and the CPU time of this process per clip in milliseconds."""
    num_clips, cpu_begin_s, begin_s = 0, time.process_time(), time.perf_counter()
    while (wall_s := time.perf_counter() - begin_s) < seconds or not num_clips:
        num_clips += take()
    return num_clips / wall_s, 1000 * (time.process_time() - cpu_begin_s) / num_clips


def ratio(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return median(one / other for one, other in zip(own, others, strict=True))
