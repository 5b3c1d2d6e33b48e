"""Loading of latents to the GPU, compared with plain copies of the same number of bytes from pinned memory.

The dataset is the same as in `benchmarks.latents`: segments of 20 x 4 x 32 x 32 float16 with an embedding each,
normally distributed. Two variants take turns: the loader with its prefetching thread, as in training, and a loop that
copies two pinned batches alternately, which is the limit of the bus. The first epoch, which verifies checksums, is not
timed.
"""

import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.feeding_threads import ratio
from benchmarks.gpu.measurements import Result, Setup, Target
from benchmarks.latent_peers.latent_data import SPLIT, write_columns
from benchmarks.latent_peers.segment_set import (
    SEGMENT_BYTES,
    SEGMENT_SHAPE,
    TEXT_WIDTH,
    make_segment_set,
    open_segment_set,
)
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.latents.segments import SegmentQuery
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.prefetch import prefetch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples

_GOAL = 0.9
_BYTES = SEGMENT_BYTES + 2 * TEXT_WIDTH


def measure_latents(setup: Setup) -> Result:
    """Measure the gigabytes per second that arrive on the device, for each batch size."""
    segments, data = setup.scratch / "segments", setup.scratch / "latents"
    num_segments = 64 if setup.is_dry_run else 4096
    make_segment_set(segments, num_segments=num_segments, num_videos=8, values="normal")
    data.mkdir()
    write_columns(data, open_segment_set(segments))
    rows = []
    for batch in (8,) if setup.is_dry_run else (32, 256, 1024):
        rounds = 1 if setup.is_dry_run else 5
        seconds = 0.05 if setup.is_dry_run else 0.8
        samples = open_latent_segments(SegmentQuery(data, split=SPLIT, loading=LoaderSettings(batch=batch)))
        rows.append(_row(setup, samples, batch, rounds=rounds, seconds=seconds))
    return Result(
        rows=rows,
        notes=[
            f"a segment with its text has {_BYTES} bytes; all data is in memory",
            "the loader gathers each batch from mapped files into pinned memory; plain copies start there. "
            "`gather GB/s` is the gathering alone, on the host",
        ],
        targets=[
            Target(what=f"batch {row['batch']}: loader / pinned copies", figure=row["share"], goal=_GOAL)
            for row in rows
        ],
    )


def _row(setup: Setup, loader: Samples[Any], batch: int, *, rounds: int, seconds: float) -> dict[str, Any]:
    device = setup.device
    rates: dict[str, list[float]] = {"loader": [], "copies": [], "gather": []}
    copy = _copier(batch, device=device)
    with closing(loader.batches(position=0)) as on_host:
        for _ in range(-(-len(loader) // batch) + 2):
            next(on_host)  # the first epoch verifies checksums
        for _ in range(rounds):
            rates["gather"].append(_gb_per_s(lambda: next(on_host), batch=batch, seconds=seconds))
    with closing(prefetch(loader.batches(), device)) as batches:

        def take() -> None:
            next(batches)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

        for _ in range(rounds):
            rates["loader"].append(_gb_per_s(take, batch=batch, seconds=seconds))
            rates["copies"].append(_gb_per_s(copy, batch=batch, seconds=seconds))
    share = ratio(rates["loader"], rates["copies"])
    return {
        "batch": batch,
        "loader GB/s": round(median(rates["loader"]), 2),
        "pinned copies GB/s": round(median(rates["copies"]), 2),
        "gather GB/s": round(median(rates["gather"]), 2),
        "share": round(share, 3),
        "segments/s": round(1e9 * median(rates["loader"]) / _BYTES),
    }


def _copier(batch: int, *, device: torch.device) -> Callable[[], None]:
    is_cuda = device.type == "cuda"
    ready: list[Batch] = [
        Batch(
            latents=torch.zeros((batch, *SEGMENT_SHAPE), dtype=torch.float16, pin_memory=is_cuda),
            text=torch.zeros((batch, TEXT_WIDTH), dtype=torch.float16, pin_memory=is_cuda),
        )
        for _ in range(2)
    ]
    stream = torch.cuda.Stream(device) if is_cuda else None

    def copy() -> None:
        ready.reverse()
        if stream is None:
            Batch(latents=ready[0]["latents"].clone(), text=ready[0]["text"].clone())
            return
        with torch.cuda.stream(stream):
            to_device(ready[0], device)
        stream.synchronize()

    return copy


def _gb_per_s(take: Callable[[], object], *, batch: int, seconds: float) -> float:
    take()
    num_batches, begin_s = 0, time.perf_counter()
    while (wall_s := time.perf_counter() - begin_s) < seconds or not num_batches:
        take()
        num_batches += 1
    return num_batches * batch * _BYTES / wall_s / 1e9
