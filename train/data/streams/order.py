"""The order in which clips of many tars come: tars shuffled, then clips within a window, by (seed, epoch)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from train.data.order import permute

_WINDOW = 256
_WINDOW_BYTES = 1 << 30  # of whole long videos, fewer
_Item = TypeVar("_Item")


def tars_of_epoch(tars: Sequence[str], *, seed: int, epoch: int) -> list[str]:
    """All of `tars` in the order of one epoch."""
    return [tars[number] for number in permute(np.arange(len(tars)), len(tars), seed=seed, epoch=epoch).tolist()]


def shuffled(items: Iterable[_Item], *, size_of: Callable[[_Item], int], seed: int, epoch: int) -> Iterator[_Item]:
    """All of `items`, once: each leaves a window of `_WINDOW` items, `_WINDOW_BYTES` at most, at a random moment.

    Args:
        size_of: bytes of an item.
    """
    rng = np.random.default_rng((seed, epoch))
    window: list[_Item] = []
    held_bytes = 0
    for item in items:
        window.append(item)
        held_bytes += size_of(item)
        while len(window) > _WINDOW or held_bytes > _WINDOW_BYTES:
            taken = _take(window, rng)
            held_bytes -= size_of(taken)
            yield taken
    while window:
        yield _take(window, rng)


def _take(window: list[_Item], rng: np.random.Generator) -> _Item:
    chosen = int(rng.integers(len(window)))
    window[chosen], window[-1] = window[-1], window[chosen]
    return window.pop()
