"""A case: one thing that goes wrong, and what must hold nevertheless."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Broken(Exception):
    """What must hold does not; the message says what was found, and in which file or output."""


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong.

    Attributes:
        name: `part/subject/...`: unique, the same whenever the case is drawn again, and readable.
        fault: what goes wrong, in a word; a column of the table of counts.
        run: tries it in an empty folder of its own; raises `Broken` when what must hold does not.
    """

    name: str
    fault: str
    run: Callable[[Path], None]

    @property
    def part(self) -> str:
        return self.name.split("/")[0]

    @property
    def subject(self) -> str:
        return self.name.split("/")[1]


def drawn(things: list[T], *, seed: str, kind: Callable[[T], str]) -> Iterator[T]:
    """All of `things` in an order that `seed` decides, where rare kinds come as early as frequent ones."""
    random = Random(seed)
    kinds: dict[str, list[T]] = {}
    for thing in random.sample(things, len(things)):
        kinds.setdefault(kind(thing), []).append(thing)
    yield from taken_in_turns([iter(those) for those in kinds.values()])


def taken_in_turns(iterators: list[Iterator[T]]) -> Iterator[T]:
    """One of each, again and again, until all are exhausted."""
    waiting = list(iterators)
    while waiting:
        still = []
        for iterator in waiting:
            try:
                thing = next(iterator)
            except StopIteration:
                continue
            still.append(iterator)
            yield thing
        waiting = still
