"""Interface of engines, which distribute tasks over workers on this machine or on a cluster.

An engine applies a function to tasks, a bounded number at a time, and yields one `Outcome` per task, in order of
completion. While no task completes, it yields None at least once a second, so that the caller can update its progress
bar. If a worker dies, its task is retried; if all retries fail, the outcome of the task has no result. An exception in
the function is a bug and ends the run. No worker outlives the run, however the run ends.

Each worker is checked before its first task. If a worker fails the check, its node (or this machine) gets no tasks. The
engine yields the node once as `RefusedNode`, and continues on the other nodes; the run ends if no node is left.

A result may have an attribute `machine_fault`: a failure that the machine may have caused (`MachineFault`), such as a
full disk. The engine then tries the task on other nodes, as it does after the death of a worker. If other nodes
complete the tasks that a node fails, that node gets no further tasks, and is yielded as a `RefusedNode`. A lost node is
yielded in the same way. If no other node can try a task, the result of the task is yielded with the fault.
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
THREADS_VARIABLE = "CLIPMILL_WORKER_THREADS"  # environment variable that the Ray engine sets in its workers
_PR_SET_PDEATHSIG = 1
# Signals that a faulty program receives from the kernel or sends to itself. Other signals come from other programs.
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_PROBABLE_CAUSES = {
    signal.SIGKILL.value: "out of memory?",
    signal.SIGXFSZ.value: "SIGXFSZ: the file size limit of the shell, see `ulimit -f`",
}

Check = Callable[[], str | None]  # called in a worker; returns the reason why the worker must not get tasks, or None


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """Result of a task, or the reason why its workers were lost.

    Attributes:
        result: Return value of the function; None if the workers were lost.
        lost: Reason why the last worker was lost; None if there is a result.
        crashed: True if a signal in `CRASH_SIGNALS` ended the last worker; always False with Ray, which hides the
            signal.
    """

    task: T
    result: R | None
    lost: str | None = None
    crashed: bool = False


@dataclass(frozen=True)
class MachineFault:
    """A failure that the machine of a worker may have caused.

    Attributes:
        reason: Description of the failure for messages.
        is_doubtful: True if the inputs of the task are an equally likely cause, so that only a few nodes try the task.
    """

    reason: str
    is_doubtful: bool = False


@dataclass(frozen=True)
class RefusedNode:
    """A node (or this machine) that gets no further tasks, and the reason."""

    node: str
    reason: str

    def values(self) -> dict[str, str]:
        """Return the description of the node for the `--json` output."""
        return {"place": self.node, "reason": self.reason}


class Engine(Protocol):
    """Engine that applies a function to tasks."""

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
    ) -> Iterator[Outcome[T, R] | RefusedNode | None]:
        """Apply `function` to each task. Tasks are taken from `tasks` in order, as workers become available.

        Args:
            check: Function that is called in every worker before its first task.
            name: Function that takes a task and returns its name, such as "chunk 000123", for Ray's lists of tasks.

        Raises:
            UserError: No worker passed the check.
            FailedWork: Ray did not start, or the Ray cluster was lost.
        """
        ...


def no_nodes_error(refused_nodes: Iterable[RefusedNode]) -> UserError:
    """Return the error for a run whose nodes were all refused."""
    nodes = [*refused_nodes]
    message = f"no usable workers: {'; '.join(f'{node.node}: {node.reason}' for node in nodes)}"
    if any(isinstance(node.reason, StorageReason) for node in nodes):
        return StorageRefused(message, hint="set valid credentials on each node, and run the same command again")
    return UserError(
        message,
        hint="install the same versions of clipmill and ffmpeg on each node as on this machine, and mount the data "
        "folder at the same path",
    )


def worker_threads() -> int:
    """Return the number of threads that the Ray engine assigned to this worker; 1 with other engines."""
    return int(os.environ.get(THREADS_VARIABLE, "1"))


def exit_reason(exit_code: int | None) -> str:
    """Describe how a process ended, for messages: its exit status, or the signal that killed it."""
    if exit_code is None or exit_code >= 0:
        return f"exit status {exit_code}"
    number = -exit_code
    names = {named.value: named.name for named in signal.Signals}
    return f"signal {number} ({_PROBABLE_CAUSES.get(number) or names.get(number, 'no name')})"


_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies (Linux only).

    The function takes no locks, because it may run between fork and exec.
    """
    if _libc is not None and hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_driver() -> None:
    """Make the kernel kill this process when its parent dies; exit if the parent has died already.

    Processes started by `multiprocessing` call this function after their imports. The parent may have died while they
    were importing.
    """
    die_with_parent()
    driver = multiprocessing.parent_process()
    if driver is not None and not driver.is_alive():
        os._exit(1)
