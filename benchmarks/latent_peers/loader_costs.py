"""Measure the memory of the loader of latents after an epoch, and the time of seeks; print one JSON object.

    python -m benchmarks.latent_peers.loader_costs DATA

The program runs in a separate process, so that it does not count memory that was used before.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.latent_peers.latent_data import SPLIT

BATCH = 32
BILLION = 10**9
NUM_JUMPS = 1000


def anonymous_bytes() -> int:
    """Return the anonymous (not file-backed) memory of this process in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("smaps_rollup does not report anonymous memory")


def measure(data: Path) -> dict[str, Any]:
    """Measure the anonymous memory before the loader is created and after an epoch, and then the time of seeks."""
    import torch  # noqa: F401 - import torch first, because its memory does not belong to the loader

    from clipmill.train.data.latents.segments import SegmentQuery
    from clipmill.train.data.loader import LoaderSettings
    from clipmill.train.data.order import SampleOrder
    from clipmill.train.data.producers.latent_segments import open_latent_segments

    before = anonymous_bytes()
    loader = open_latent_segments(SegmentQuery(data, split=SPLIT, loading=LoaderSettings(batch=BATCH)))
    for loaded in loader.batches(position=0):
        if loaded.cursor.position >= len(loader):
            break
    after = anonymous_bytes()
    order = SampleOrder(BILLION, seed=0)
    single = open_latent_segments(SegmentQuery(data, split=SPLIT, loading=LoaderSettings(batch=1)))
    return {
        "num_segments": len(loader),
        "before_bytes": before,
        "after_bytes": after,
        "jumps": {
            f"order of {BILLION:,} samples: the next {BATCH}": jumps_ms(lambda at: order.at(np.arange(at, at + BATCH))),
            "LatentLoader: a batch of 1, copied": jumps_ms(lambda at: next(single.batches(position=at))),
            f"LatentLoader: a batch of {BATCH}, copied": jumps_ms(lambda at: next(loader.batches(position=at))),
        },
    }


def jumps_ms(jump: Callable[[int], object]) -> tuple[float, float]:
    """Return the median and maximum time of seeks to random positions below a billion, in milliseconds."""
    costs = []
    for position in np.random.default_rng(0).integers(BILLION, size=NUM_JUMPS).tolist():
        begin_s = time.perf_counter()
        jump(position)
        costs.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(costs), max(costs)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
