"""Two ranks in one process, for tests of what ranks do with an exchange, not of the exchange itself."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from clipmill.train.distributed.world import World

_SHARED: dict[int, torch.Tensor] = {}
_BARRIER = threading.Barrier(2, timeout=60)


class Threads(World):
    """A rank whose peer is a different thread."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        _SHARED[self.rank] = rows
        _BARRIER.wait()
        together = torch.cat([_SHARED[rank] for rank in range(self.size)])
        _BARRIER.wait()
        return together


def on_two_ranks(work: Callable[[World], Any]) -> list[Any]:
    """Return the result of `work` on each rank."""
    _BARRIER.reset()
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank=rank, size=2))
        except BaseException as error:
            _BARRIER.abort()
            results[rank] = error
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
