"""Where shards are made: the seam between the work, which knows nothing of distribution, and the machines that do it.

An engine applies a function to tasks, a bounded number at a time, and yields an `Outcome` for each in the order in
which they end. Between outcomes it yields None at least once a second, so that the caller can show progress. A task
whose worker dies is tried again; when workers keep dying under it, its outcome has no result. An exception in the
function itself is a bug, and ends the run. However a run ends, no worker outlives it.

Before its first task a worker is checked. A place whose workers do not pass gets no work; it is yielded as `Refused`
once, and the run goes on elsewhere, or ends when there is no other place.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from manifests.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

MAX_TRIES = 3  # of a task whose worker is lost
TICK_S = 0.5
_PR_SET_PDEATHSIG = 1

Check = Callable[[], str | None]  # called in a worker: why it must not work, or None


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """How a task ended: with a result, or with the reason why its workers were lost."""

    task: T
    result: R | None
    lost: str | None = None


@dataclass(frozen=True)
class Refused:
    """A place (a node, or this machine) that gets no work, and why."""

    place: str
    reason: str


class Engine(Protocol):
    """Runs a function over tasks."""

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """Applies `function` to each of `tasks`, which are taken one by one, in order, as there is room for them.

        Args:
            check: of every worker before its first task.

        Raises:
            UserError: no worker passes the check.
        """
        ...


def no_place_left(refused: Iterable[Refused]) -> UserError:
    """The error of a run whose workers were all refused."""
    return UserError(
        f"no worker can be used: {'; '.join(f'{found.place}: {found.reason}' for found in refused)}",
        hint="each node needs the same clipmill and ffmpeg as this command, and the data folder under the same path",
    )


_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when its parent dies.

    Takes no lock, since it may run between fork and exec.
    """
    if _libc is not None and hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
