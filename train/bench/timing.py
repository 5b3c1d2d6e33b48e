"""Repeating a piece of work for a given time: a round to warm up, then rounds that count."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class Rate:
    """How fast a link is, over `num_rounds` rounds."""

    items_per_s: float
    num_rounds: int


class Rounds:
    """Seconds an item of the rounds so far, of one link."""

    def __init__(self) -> None:
        self.seconds_an_item: list[float] = []
        self.total_s = 0.0

    def add(self, seconds: float, *, num_items: int) -> None:
        """Counts one round."""
        self.total_s += seconds
        self.seconds_an_item.append(seconds / num_items)

    @property
    def median_rate(self) -> Rate:
        """Of rounds that do not depend on one another."""
        return Rate(1 / median(self.seconds_an_item), len(self.seconds_an_item))

    @property
    def mean_rate(self) -> Rate:
        """Of rounds that take from a queue, where a quick one only means that others have waited."""
        return Rate(1 / fmean(self.seconds_an_item), len(self.seconds_an_item))


def repeat(work: Callable[[], object], *, num_items: int, seconds: float) -> Rate:
    """The rate of `work`, which handles `num_items` each time and returns when all of it is done."""
    work()
    rounds = Rounds()
    while rounds.total_s < seconds:
        began = time.perf_counter()
        work()
        rounds.add(time.perf_counter() - began, num_items=num_items)
    return rounds.median_rate
