"""A case: one thing that goes wrong, and what must hold nevertheless."""

from collections.abc import Callable, Iterator, Sequence
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


def drawn(things: list[T], *, seed: str, kinds: Sequence[Callable[[T], str]]) -> Iterator[T]:
    """All of `things` in an order that `seed` decides, where rare kinds come as early as frequent ones.

    Args:
        kinds: of a thing: its kind, and within that its kind, and so on.
    """
    yield from _in_turns(things, Random(seed), list(kinds))


def _in_turns(things: list[T], random: Random, kinds: list[Callable[[T], str]]) -> Iterator[T]:
    if not kinds:
        return iter(random.sample(things, len(things)))
    groups: dict[str, list[T]] = {}
    for thing in things:
        groups.setdefault(kinds[0](thing), []).append(thing)
    names = sorted(groups)
    random.shuffle(names)
    return taken_in_turns([_in_turns(groups[name], random, kinds[1:]) for name in names])


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
