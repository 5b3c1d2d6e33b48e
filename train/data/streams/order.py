"""The order in which clips of many tars come: tars shuffled, then clips within a window, by (seed, epoch)."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from train.data.order import permute

_WINDOW = 256
_Item = TypeVar("_Item")


def shuffled(
    tars: Sequence[str], items_of: Callable[[str], Iterator[_Item]], *, seed: int, epoch: int
) -> Iterator[_Item]:
    """Everything that the tars hold, once: each item leaves a window of `_WINDOW` items at a random moment."""
    rng = np.random.default_rng((seed, epoch))
    window: list[_Item] = []
    for number in permute(np.arange(len(tars)), len(tars), seed=seed, epoch=epoch).tolist():
        for item in items_of(tars[number]):
            window.append(item)
            if len(window) > _WINDOW:
                yield _take(window, rng)
    while window:
        yield _take(window, rng)


def _take(window: list[_Item], rng: np.random.Generator) -> _Item:
    chosen = int(rng.integers(len(window)))
    window[chosen], window[-1] = window[-1], window[chosen]
    return window.pop()
