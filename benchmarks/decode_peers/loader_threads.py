"""The training loader of clipmill with a given number of threads: clips per second of wall time and per CPU second.

    {"do": "load", "set": "own", "at_least_s": 2}      {"num_clips": ..., "cpu_s": ..., "wall_s": ...}
    {"do": "load", "set": "own", "at_least": 1024}     the same, for a number of clips

The captions have the spans of the benchmark's short clips. The loader draws frames and rectangles as in training.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_peers.clip_set import MIN_AREA, SIZE_PX, data_folder
from benchmarks.peer_process import answer_requests
from clipmill.train.data.chunks import ClipQuery
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.decoders import DecodeRule
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.producers.captioned_clips import open_captioned_clips

BATCH, NUM_AHEAD = 8, 32
SPLIT = "train"


def endless_batches(data: Path, *, num_threads: int, decode: DecodeRule) -> Iterator[LoadedBatch]:
    """Yield batches of clips with four frames, as YUV planes."""
    samples = open_captioned_clips(
        ClipQuery(
            data,
            split=SPLIT,
            shape=ClipShape(sampling=Sampling(num_frames=4), size_px=SIZE_PX, min_crop_area=MIN_AREA),
            loading=LoaderSettings(batch=BATCH, num_threads=num_threads, num_ahead=NUM_AHEAD, seed=0),
            decode=decode,
        ),
        tokenize=lambda text: np.zeros(1, np.int64),
    )
    return samples.batches(max_failures=0)


def load(batches: Iterator[LoadedBatch], *, at_least_s: float = 0, at_least: int = 0) -> dict[str, Any]:
    """Load batches for a minimum time or number of clips, once the batches loaded before the start are used up."""
    for _ in range(NUM_AHEAD // BATCH + 1):
        next(batches)
    num_clips = 0
    cpu_begin_s, begin_s = time.process_time(), time.perf_counter()
    while time.perf_counter() - begin_s < at_least_s or num_clips < at_least:
        num_clips += len(next(batches).batch["key"])
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_begin_s
    return {"num_clips": num_clips, "cpu_s": cpu_s, "wall_s": wall_s}


def main() -> None:
    """Respond to requests; the command line contains the number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--decode", default="packets")
    arguments = parser.parse_args()
    of_set: dict[str, Iterator[LoadedBatch]] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        name = request["set"]
        if name not in of_set:
            data = data_folder(arguments.folder, name)
            of_set[name] = endless_batches(data, num_threads=arguments.threads, decode=arguments.decode)
        return load(of_set[name], at_least_s=request.get("at_least_s", 0), at_least=request.get("at_least", 0))

    answer_requests(answer)


if __name__ == "__main__":
    main()
