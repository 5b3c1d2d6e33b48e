"""Server loop of all loaders: a persistent process that responds to requests, one JSON object per line.

    {"do": "make"}                       create the dataset in the format of this loader, unless it exists
    {"do": "open", "batch": 32}          start workers, allocate buffers
    {"do": "check"}                      one epoch without timing: {"num_distinct": 5000, "digest": "..."}
    {"do": "time", "at_least_s": 0.5}    complete epochs for at least this time: {"num_segments": ..., "seconds": ...}
    {"do": "close"}                      stop workers, release buffers

The time of an epoch starts with the request for the first batch, so that it includes shuffling, and ends with the last
batch.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.latent_peers.segment_set import SegmentSet, digest, open_segment_set
from benchmarks.peer_process import answer_requests

Batches = Iterator[tuple[Any, Any]]


class PeerLoader(Protocol):
    """Loader of the dataset, opened with a batch size."""

    def epoch(self, number: int) -> Batches:
        """Yield every segment once, shuffled: latents [b, 20, 4, 32, 32] and text [b, 512].

        A batch is valid until the next batch is requested.
        """
        ...

    def close(self) -> None:
        """Stop background workers."""
        ...


Make = Callable[[SegmentSet, Path], None]
Open = Callable[[Path, SegmentSet, int], PeerLoader]  # arguments: folder of the loader, dataset, batch size


class NothingToClose:
    """Mixin for loaders that start no workers."""

    def close(self) -> None:
        """Does nothing."""


def serve(make: Make, open_loader: Open) -> None:
    """Respond to requests until the input ends. The command line contains the folders of the dataset and the loader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("set_folder", type=Path)
    parser.add_argument("own_folder", type=Path)
    arguments, _ = parser.parse_known_args()
    answer_requests(_Server(arguments.own_folder, open_segment_set(arguments.set_folder), make, open_loader).answer)


class _Server:
    def __init__(self, own_folder: Path, segments: SegmentSet, make: Make, open_loader: Open) -> None:
        self._own_folder, self._segments, self._make, self._open_loader = own_folder, segments, make, open_loader
        self._loader: PeerLoader | None = None
        self._num_epochs = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do = request["do"]
        if do == "make":
            if not self._own_folder.exists():
                self._make(self._segments, self._own_folder)
            return {}
        if do == "open":
            self._loader = self._open_loader(self._own_folder, self._segments, request["batch"])
            return {}
        assert self._loader is not None, f"{do} before open"
        if do == "check":
            num_distinct, found = digest(self._epoch())
            return {"num_distinct": num_distinct, "digest": found}
        if do == "time":
            return self._time(request["at_least_s"])
        self._loader.close()
        self._loader = None
        return {}

    def _epoch(self) -> Batches:
        assert self._loader is not None
        self._num_epochs += 1
        return self._loader.epoch(self._num_epochs)

    def _time(self, at_least_s: float) -> dict[str, Any]:
        num_segments, seconds = 0, 0.0
        while seconds < at_least_s or not num_segments:
            num_of_epoch = 0
            begin_s = time.perf_counter()
            for latents, _ in self._epoch():
                num_of_epoch += latents.shape[0]
            seconds += time.perf_counter() - begin_s
            if num_of_epoch != len(self._segments):
                raise RuntimeError(f"an epoch has {num_of_epoch} segments, not {len(self._segments)}")
            num_segments += num_of_epoch
        return {"num_segments": num_segments, "seconds": seconds}
