"""Worker threads that return results in the order of the work items and tolerate threads that never return.

Threads, not processes: decoding, checksums and resizing release the interpreter lock, and nothing is copied between
processes. They are daemon threads, so that one blocked in a decoder or on a dead file system does not keep the program
from exiting.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_POLL_S = 1.0
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Stuck:
    """Takes the place of a result that was not ready in time; its text is the detail of the failure."""

    after_s: float

    def __str__(self) -> str:
        return f"it was not ready after {self.after_s:g} s and is no longer waited for"


@dataclass
class _Task(Generic[_Item, _Result]):
    item: _Item
    done: threading.Event = field(default_factory=threading.Event)
    began_s: float | None = None
    results: list[_Result] = field(default_factory=list)  # one, once there is one
    error: BaseException | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)

    def is_late(self, after_s: float) -> bool:
        is_running = self.began_s is not None and not self.done.is_set() and not self.abandoned.is_set()
        return is_running and time.monotonic() - (self.began_s or 0.0) > after_s

    def outcome(self) -> _Result:
        if self.error is not None:
            raise self.error
        return self.results[0]


class _Pool(Generic[_Item, _Result]):
    def __init__(self, work: Callable[[_Item], _Result], *, num_threads: int) -> None:
        self._work = work
        self._queue: SimpleQueue[_Task[_Item, _Result] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self.add_thread()

    def add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, item: _Item) -> "_Task[_Item, _Result]":
        task: _Task[_Item, _Result] = _Task(item)
        self._queue.put(task)
        return task

    def abandon(self, tasks: "Iterable[_Task[_Item, _Result]]") -> None:
        """Stop waiting for `tasks`, and start a new thread in place of each one's."""
        for task in tasks:
            task.abandoned.set()
            self.add_thread()

    def close(self, waiting: "Iterable[_Task[_Item, _Result]]") -> None:
        """End the threads, without waiting for blocked ones beyond a time limit."""
        for task in waiting:
            task.abandoned.set()
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():  # in which the garbage collector may close a generator
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if task.abandoned.is_set():
                continue
            task.began_s = time.monotonic()
            try:
                task.results.append(self._work(task.item))
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                task.error = error
            task.done.set()
            if task.abandoned.is_set():
                return  # another thread has replaced this one


def in_order(
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    num_threads: int,
    num_ahead: int,
    stuck_after_s: float,
    size_of: Callable[[_Item], int] = lambda item: 0,
    max_bytes: int = 0,
    num_together: int = 1,
) -> Generator[tuple[_Item, _Result | Stuck], None, None]:
    """Yield (item, work(item)) in the order of `items`; threads run at most `num_ahead` items ahead of the caller.

    Args:
        stuck_after_s: work that takes longer yields a `Stuck` in place of its result. Its thread cannot be stopped: it
            is abandoned and replaced by a new one.
        size_of: size of an item in bytes.
        max_bytes: maximum total size of the items ahead of the caller, unless a single item is larger; 0 for no limit.
        num_together: results that the caller uses together. A caller that has to wait is woken when the last of them is
            ready, not once for each: every wake-up takes the interpreter lock from the threads.

    Raises:
        Exception: what `work` raised for an item, when its turn comes.
    """
    pool = _Pool(work, num_threads=num_threads)
    waiting: deque[_Task[_Item, _Result]] = deque()
    held_bytes = 0

    def wait_for(task: _Task[_Item, _Result]) -> None:
        while not (task.done.wait(min(_POLL_S, stuck_after_s)) or task.abandoned.is_set()):
            # All running tasks are checked: this one may be queued behind threads that are stuck with others.
            pool.abandon([other for other in waiting if other.is_late(stuck_after_s)])

    def first() -> tuple[_Item, _Result | Stuck]:
        task = waiting[0]
        if not task.done.is_set():
            # Earlier tasks may take longer than the last one, so the first is waited for as well.
            wait_for(waiting[min(num_together, len(waiting)) - 1])
            wait_for(task)
        nonlocal held_bytes
        waiting.popleft()
        held_bytes -= size_of(task.item)
        return task.item, Stuck(stuck_after_s) if task.abandoned.is_set() else task.outcome()

    try:
        for item in items:
            while waiting and held_bytes + size_of(item) > max_bytes > 0:
                yield first()
            waiting.append(pool.submit(item))
            held_bytes += size_of(item)
            if len(waiting) >= num_ahead:
                yield first()
        while waiting:
            yield first()
    finally:
        pool.close(waiting)
