"""What a LatentLoader costs beside its time: memory after an epoch, and jumps. A program that prints one JSON object.

    python -m benchmarks.latent_peers.loader_costs DATA

A process of its own, because memory that was used before would count.
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
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("smaps_rollup says nothing of anonymous memory")


def measure_memory(data: Path) -> dict[str, Any]:
    """Anonymous memory before the loader is made, and after an epoch."""
    import torch  # noqa: F401 - memory of the library is not the loader's

    from train.data.latents.loader import LatentLoader

    before = anonymous_bytes()
    loader = LatentLoader(data, split=SPLIT, batch=BATCH)
    for loaded in loader.batches(position=0):
        if loaded.next_position >= len(loader):
            break
    return {
        "num_segments": len(loader),
        "before_bytes": before,
        "after_bytes": anonymous_bytes(),
        "jumps": {
            f"order of {BILLION:,} samples: which {BATCH} come next": jumps_ms(_order_jump()),
            f"the loader's order, captions and addresses for {BATCH}": jumps_ms(_visit_jump(loader)),
            f"the loader's batch of {BATCH}, bytes and all": jumps_ms(lambda at: next(loader.batches(position=at))),
        },
    }


def jumps_ms(jump: Callable[[int], object]) -> tuple[float, float]:
    """Median and worst milliseconds of jumps to random positions below a billion."""
    costs = []
    for position in np.random.default_rng(0).integers(BILLION, size=NUM_JUMPS).tolist():
        begin_s = time.perf_counter()
        jump(position)
        costs.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(costs), max(costs)


def _order_jump() -> Callable[[int], object]:
    from train.data.order import SampleOrder, positions_of_rank

    order = SampleOrder(BILLION, seed=0)
    return lambda position: order.at(positions_of_rank(position, BATCH, rank=0, num_ranks=1))


def _visit_jump(loader: Any) -> Callable[[int], object]:
    from train.data.order import SampleOrder, positions_of_rank

    order = SampleOrder(len(loader), seed=0)

    def jump(position: int) -> object:
        positions = positions_of_rank(position, BATCH, rank=0, num_ranks=1)
        return loader.samples.visit(order.at(positions), position=positions, seed=0)

    return jump


if __name__ == "__main__":
    print(json.dumps(measure_memory(Path(sys.argv[1]))))
