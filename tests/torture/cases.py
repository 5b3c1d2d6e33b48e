"""Test case of the campaign: one fault, and the invariants that must hold nevertheless."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Broken(Exception):
    """Violation of an invariant; the message states the observation, and the file or output concerned."""


@dataclass(frozen=True)
class Case:
    """One fault injection.

    Attributes:
        name: Unique, readable name `part/subject/...`, which stays the same whenever the case is drawn again.
        fault: Kind of fault in one word; a column of the table of counts.
        run: Function that runs the case in an empty folder and raises `Broken` if an invariant is violated.
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


def draw(things: list[T], *, seed: str, kinds: Sequence[Callable[[T], str]]) -> Iterator[T]:
    """Yield all of `things` in a random order determined by `seed`, with rare kinds as early as frequent ones.

    Args:
        kinds: Functions that return the kind of a thing, the kind of that thing within its kind, and so on.
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
    """Iterate round-robin over several iterators until all are exhausted."""
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
