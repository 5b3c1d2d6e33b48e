"""A case: one fault, and the invariants that must hold nevertheless."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Broken(Exception):
    """An invariant is violated; the message says what was found, and in which file or output."""


@dataclass(frozen=True)
class Case:
    """One fault injection.

    Attributes:
        name: `part/subject/...`: unique, readable, and the same whenever the case is drawn again.
        fault: kind of fault, in one word; a column of the table of counts.
        run: runs the case in an empty folder; raises `Broken` if an invariant is violated.
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
    """Yield all of `things` in a random order determined by `seed`, in which rare kinds come as early as frequent ones.

    Args:
        kinds: functions that return the kind of a thing, its kind within that kind, and so on.
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
