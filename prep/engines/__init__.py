"""Where shards are made: the seam between the work, which knows nothing of distribution, and the machines that do it.

An engine applies a function to tasks, a bounded number at a time, and yields an `Outcome` for each in the order in
which they end. Between outcomes it yields None at least once a second, so that the caller can show progress. A task
whose worker dies is tried again; when workers keep dying under it, its outcome has no result. An exception in the
function itself is a bug, and ends the run. However a run ends, no worker outlives it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_TRIES = 3  # of a task whose worker is lost
TICK_S = 0.5


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """How a task ended: with a result, or with the reason why its workers were lost."""

    task: T
    result: R | None
    lost: str | None = None


class Engine(Protocol):
    """Runs a function over tasks."""

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[Outcome[T, R] | None]:
        """Applies `function` to each of `tasks`, which are taken one by one, in order, as there is room for them."""
        ...
