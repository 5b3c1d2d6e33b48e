"""What every way has in common: a process that stays alive and answers requests, one JSON object a line each.

    {"do": "make"}                       make the set in this way's own format, unless it is there
    {"do": "open", "batch": 32}          get ready: workers, buffers
    {"do": "check"}                      one epoch, untimed: {"num_distinct": 5000, "digest": "..."}
    {"do": "time", "at_least_s": 0.5}    whole epochs for so long: {"num_segments": ..., "seconds": ...}
    {"do": "close"}                      end workers, give buffers back

The time of an epoch runs from asking for its first batch, so it holds the making of its order, to the end of its last.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.latent_peers.segment_set import SegmentSet, digest, open_segment_set
from benchmarks.way_process import answer_requests

Batches = Iterator[tuple[Any, Any]]


class Way(Protocol):
    """One way to load the set, ready for one batch size."""

    def epoch(self, number: int) -> Batches:
        """Every segment once, shuffled: (latents [b, 20, 4, 32, 32], text [b, 512]), good until the next batch."""
        ...

    def close(self) -> None:
        """Ends what runs beside it."""
        ...


Make = Callable[[SegmentSet, Path], None]
Open = Callable[[Path, SegmentSet, int], Way]  # (its own folder, the set, batch size)


class NothingToClose:
    """Of a way that starts nothing."""

    def close(self) -> None:
        """Does nothing."""


def serve(make: Make, open_way: Open) -> None:
    """Answers requests until there are no more; the program's arguments are the set's folder and this way's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("set_folder", type=Path)
    parser.add_argument("own_folder", type=Path)
    arguments, _ = parser.parse_known_args()
    answer_requests(_Contestant(arguments.own_folder, open_segment_set(arguments.set_folder), make, open_way).answer)


class _Contestant:
    def __init__(self, own_folder: Path, segments: SegmentSet, make: Make, open_way: Open) -> None:
        self._own_folder, self._segments, self._make, self._open_way = own_folder, segments, make, open_way
        self._way: Way | None = None
        self._num_epochs = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do = request["do"]
        if do == "make":
            if not self._own_folder.exists():
                self._make(self._segments, self._own_folder)
            return {}
        if do == "open":
            self._way = self._open_way(self._own_folder, self._segments, request["batch"])
            return {}
        assert self._way is not None, f"{do} before open"
        if do == "check":
            num_distinct, found = digest(self._epoch())
            return {"num_distinct": num_distinct, "digest": found}
        if do == "time":
            return self._time(request["at_least_s"])
        self._way.close()
        self._way = None
        return {}

    def _epoch(self) -> Batches:
        assert self._way is not None
        self._num_epochs += 1
        return self._way.epoch(self._num_epochs)

    def _time(self, at_least_s: float) -> dict[str, Any]:
        num_segments, seconds = 0, 0.0
        while seconds < at_least_s or not num_segments:
            num_of_epoch = 0
            begin_s = time.perf_counter()
            for latents, _ in self._epoch():
                num_of_epoch += latents.shape[0]
            seconds += time.perf_counter() - begin_s
            if num_of_epoch != len(self._segments):
                raise RuntimeError(f"an epoch of {num_of_epoch} segments, the set has {len(self._segments)}")
            num_segments += num_of_epoch
        return {"num_segments": num_segments, "seconds": seconds}
