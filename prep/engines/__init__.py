"""Interface of engines, which distribute tasks over workers, on this machine or on a cluster.

An engine applies a function to tasks, a bounded number at a time, and yields an `Outcome` for each, in order of
completion. Between outcomes it yields None at least once a second, so that the caller can update its progress bar. A
task whose worker dies is tried again; if its workers keep dying, its outcome has no result. An exception in the
function itself is a bug and ends the run. No worker outlives the run, however the run ends.

Each worker is checked before its first task. A node (or this machine) whose workers fail the check gets no tasks: it is
yielded once as `Refused`, and the run continues on other nodes, or ends if no node is left.

A result may have an attribute `machine_fault`: a failure that the machine may have caused (`MachineFault`), such as a
full disk. Such a task is tried on other nodes, and so is a task whose worker died. A node that fails tasks which other
nodes can do gets no further tasks: it is also yielded as `Refused`, and so is a lost node. If no other node can try a
task, its result is yielded.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from clipmill.manifests.errors import StorageReason, StorageRefused, UserError

T = TypeVar("T")
R = TypeVar("R")

MAX_TRIES = 3  # maximum number of attempts at a task whose workers are lost
TICK_S = 0.5
THREADS_VARIABLE = "CLIPMILL_WORKER_THREADS"  # set by an engine in workers on machines that the driver does not know
_PR_SET_PDEATHSIG = 1
# Signals with which the kernel, or the program itself, ends a faulty program. All other signals come from outside.
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})

Check = Callable[[], str | None]  # called in a worker: returns the reason why it must not work, or None


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """Result of a task, or the reason why its workers were lost."""

    task: T
    result: R | None
    lost: str | None = None
    crashed: bool = False  # True if the lost worker crashed, and was not killed from outside


@dataclass(frozen=True)
class MachineFault:
    """A failure that the machine of a worker may have caused.

    Attributes:
        reason: Failure, for messages.
        is_doubtful: True if the inputs of the task are an equally likely cause. Then only a few nodes try the task.
    """

    reason: str
    is_doubtful: bool = False


@dataclass(frozen=True)
class Refused:
    """A node, or this machine, that gets no further tasks, and the reason."""

    node: str
    reason: str

    def values(self) -> dict[str, str]:
        """Return the entry in the `--json` output."""
        return {"place": self.node, "reason": self.reason}


class Engine(Protocol):
    """Applies a function to tasks."""

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """Apply `function` to each of `tasks`, which are taken in order as workers become available.

        Args:
            check: Function that is called in every worker before its first task.
            name: Function task -> name of the task in the engine's own lists, such as "chunk 000123".

        Raises:
            UserError: No worker has passed the check.
        """
        ...


def no_worker_left(refused: Iterable[Refused]) -> UserError:
    """Return the error for a run whose workers were all refused."""
    nodes = [*refused]
    message = f"no usable workers: {'; '.join(f'{node.node}: {node.reason}' for node in nodes)}"
    if any(isinstance(node.reason, StorageReason) for node in nodes):
        return StorageRefused(message, hint="give each node valid credentials, and run the same command again")
    return UserError(
        message,
        hint="each node needs the same clipmill and ffmpeg as this command, and the data folder at the same path",
    )


def worker_threads() -> int:
    """Return the number of threads that the engine has assigned to this worker; 1 by default."""
    return int(os.environ.get(THREADS_VARIABLE, "1"))


def exit_reason(exit_code: int | None) -> str:
    """Return a text for messages about how a process ended: its exit status, or the signal that killed it."""
    if exit_code is None or exit_code >= 0:
        return f"exit status {exit_code}"
    number = -exit_code
    if number == signal.SIGKILL:
        return f"signal {number} (out of memory?)"
    return f"signal {number} ({signal.Signals(number).name})" if number in CRASH_SIGNALS else f"signal {number}"


_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def die_with_parent() -> None:
    """Request that the kernel (Linux) kill this process when its parent dies.

    This function takes no locks, because it may run between fork and exec.
    """
    if _libc is not None and hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_driver() -> None:
    """Request that the kernel kill this process when its parent dies; exit if the parent has died already.

    Processes started by `multiprocessing` call this function after their imports, during which the parent may have
    died unnoticed.
    """
    die_with_parent()
    driver = multiprocessing.parent_process()
    if driver is not None and not driver.is_alive():
        os._exit(1)
