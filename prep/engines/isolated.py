"""Run an engine in a separate process.

The libraries of the engine then cannot print to the command's output or terminate the command. Ray, for example,
terminates its process when it loses the cluster; the command keeps running and reports the loss.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from clipmill.manifests.errors import ClipmillError, FailedWork
from clipmill.manifests.progress import Activity
from clipmill.prep.engines import TICK_S, Check, Outcome, R, Refused, T, die_with_driver, exit_reason

_CONTEXT = multiprocessing.get_context("spawn")
_GRACE_S = 15.0  # time limit for the engine to stop the processes that it started


class NotifyingEngine(Protocol):
    """An engine that sends lines for the user."""

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
        notify: Callable[[str], None] = ...,
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `clipmill.prep.engines.Engine`."""
        ...


class IsolatedEngine:
    """Engine that runs a picklable engine in a separate process, and prints its lines for the user.

    Args:
        name: Name of the program in the process for the message about its unexpected end.
        starting: Text to show until the engine takes the first task; None to show nothing.
        start_limit_s: Time limit in seconds for the engine to take the first task; None for no limit.
    """

    def __init__(
        self,
        engine: NotifyingEngine,
        *,
        name: str,
        starting: str | None = None,
        start_limit_s: float | None = None,
    ) -> None:
        self._engine, self._name, self._starting = engine, name, starting
        self._start_limit_s = start_limit_s

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
    ) -> Iterator[Outcome[T, R] | Refused | None]:
        """See `clipmill.prep.engines.Engine`."""
        waiting = enumerate(tasks)
        given = dict[int, T]()
        starting = ExitStack()
        if self._starting is not None:
            starting.enter_context(Activity(self._starting))
        process, ours = _start_process(_serve, self._engine, function, check, name is not None)
        deadline_s = None if self._start_limit_s is None else time.monotonic() + self._start_limit_s
        try:
            while True:
                if not ours.poll(TICK_S):
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        process.kill()  # the process may be waiting for Ray without reading the pipe
                        raise _start_failure(self._name, f"within {self._start_limit_s:g} s")
                    yield None
                    continue
                kind, value = _receive(ours, process, name=self._name, is_starting=deadline_s is not None)
                if kind == "next":
                    starting.close()
                    deadline_s = None
                    item = next(waiting, None)
                    if item is not None:
                        given[item[0]] = item[1]
                    ours.send(item and (*item, name(item[1]) if name is not None else None))
                elif kind == "outcome":
                    number, *rest = value
                    yield Outcome(given.pop(number), *rest)
                elif kind == "refused":
                    yield value
                elif kind == "notice":
                    sys.stderr.write(f"{value}\n")
                elif kind == "error":
                    raise value
                elif kind == "end":
                    return
        finally:
            starting.close()
            ours.close()  # the other process detects this and stops its workers
            _end(process)


def call_isolated(function: Callable[..., Any], *arguments: object, name: str) -> Any:
    """Call `function(*arguments)` in a separate process, and return its result.

    Args:
        name: Name of the program in the process for the message about its unexpected end.

    Raises:
        FailedWork: The process ended without a result.
        Exception: Exception that the function raised.
    """
    process, ours = _start_process(_serve_call, function, arguments)
    try:
        kind, value = _receive(ours, process, name=name)
    finally:
        ours.close()
        _end(process)
    if kind == "error":
        raise value
    return value


def _start_process(target: Callable[..., None], *arguments: object) -> tuple[SpawnProcess, Connection]:
    """Start `target(*arguments, pipe)` in a new process; return the process and this process's end of the pipe."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()  # so that the end of the other process closes the pipe
    return process, ours


def _end(process: SpawnProcess) -> None:
    process.join(_GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()


def _start_failure(name: str, reason: str) -> FailedWork:
    return FailedWork(f"{name} did not start {reason}; run the same command again, or with --engine processes")


def _receive(pipe: Connection, process: SpawnProcess, *, name: str, is_starting: bool = False) -> tuple[str, Any]:
    """Return the next message from the process: its kind and its value."""
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        if is_starting:
            raise _start_failure(name, f"({exit_reason(process.exitcode)})") from None
        raise FailedWork(
            f"{name} is lost ({exit_reason(process.exitcode)}); finished work is kept; "
            "run the same command again to resume"
        ) from None
    return kind, value


class _Disconnected(Exception):
    """The command has exited, or stopped reading results."""


def _serve(
    engine: NotifyingEngine, function: Callable[[Any], Any], check: Check | None, is_named: bool, pipe: Connection
) -> None:
    _detach()
    with suppress(_Disconnected):
        try:
            for outcome in engine.run(
                _Numbered(function),
                _tasks(pipe),
                check=check,
                name=(lambda task: task[2]) if is_named else None,
                notify=lambda line: _send(pipe, "notice", line),
            ):
                if isinstance(outcome, Outcome):
                    _send(pipe, "outcome", (outcome.task[0], outcome.result, outcome.lost, outcome.crashed))
                elif outcome is not None:
                    _send(pipe, "refused", outcome)
                elif pipe.poll():  # the command sends only what was requested, so the pipe was closed
                    raise _Disconnected
            _send(pipe, "end", None)
        except _Disconnected:
            raise
        except Exception as error:  # noqa: BLE001 - raised again by the command
            _send_error(pipe, error)


def _serve_call(function: Callable[..., Any], arguments: tuple[object, ...], pipe: Connection) -> None:
    _detach()
    with suppress(_Disconnected):
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001 - raised again by the command
            _send_error(pipe, error)
        else:
            _send(pipe, "result", result)


def _detach() -> None:
    die_with_driver()
    # Ctrl-C is sent to the complete process group; the command decides what happens to this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)


class _Numbered:
    """Wrapper that applies a function to the second element of its argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", "task")

    def __call__(self, task: tuple[int, Any, str]) -> Any:
        return self._function(task[1])


def _tasks(pipe: Connection) -> Iterator[tuple[int, Any, str]]:
    """Yield the command's tasks with numbers and names; each task is requested from the command when it is needed."""
    while True:
        _send(pipe, "next", None)
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            raise _Disconnected from None
        if item is None:
            return
        yield item


def _send_error(pipe: Connection, error: Exception) -> None:
    if not isinstance(error, ClipmillError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        _send(pipe, "error", error)
    except (AttributeError, TypeError, ValueError):  # the error cannot be pickled
        _send(pipe, "error", RuntimeError("".join(traceback.format_exception(error))))


def _send(pipe: Connection, kind: str, value: Any) -> None:
    try:
        pipe.send((kind, value))
    except OSError:
        raise _Disconnected from None
