"""Worker threads whose results come in the order of the work, and which a thread that never comes back cannot stop.

Threads, not processes: decoding, checking and resizing leave the interpreter's lock, and nothing needs to be copied.
They are daemons, so that one that hangs in a decoder or in a dead file system does not keep the program from ending.
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
_GOODBYE_S = 5.0


@dataclass(frozen=True)
class Stuck:
    """Stands for the result of work that has not come back in time."""

    after_s: float


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
        """Waits no longer for `tasks`; a new thread takes the place of each one's."""
        for task in tasks:
            task.abandoned.set()
            self.add_thread()

    def close(self, waiting: "Iterable[_Task[_Item, _Result]]") -> None:
        """Ends the threads; those that are stuck are left to themselves."""
        for task in waiting:
            task.abandoned.set()
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + _GOODBYE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if task.abandoned.is_set():
                continue
            task.began_s = time.monotonic()
            try:
                task.results.append(self._work(task.item))
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whose it is
                task.error = error
            task.done.set()
            if task.abandoned.is_set():
                return  # another thread has taken this one's place


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
    """(item, work(item)) in the order of `items`; threads run ahead of the caller by at most `num_ahead` items.

    Where items have sizes, those ahead of the caller hold at most `max_bytes` together, or are one alone.

    A caller that uses results only in groups says so by `num_together`: when it has to wait, it is woken once the last
    of so many results is there, not once for each. Every wake-up takes the interpreter lock away from the threads.

    Work that takes longer than `stuck_after_s` gives a `Stuck` in place of its result. Its thread cannot be stopped: it
    is left behind, and a new one takes its place.

    Raises:
        Exception: what `work` raised, when its turn comes.
    """
    pool = _Pool(work, num_threads=num_threads)
    waiting: deque[_Task[_Item, _Result]] = deque()
    held_bytes = 0

    def wait_for(task: _Task[_Item, _Result]) -> None:
        while not (task.done.wait(min(_POLL_S, stuck_after_s)) or task.abandoned.is_set()):
            # All that run are looked at: the task may be waiting for threads that are stuck with others.
            pool.abandon([other for other in waiting if other.is_late(stuck_after_s)])

    def first() -> tuple[_Item, _Result | Stuck]:
        task = waiting[0]
        if not task.done.is_set():
            # Earlier ones may take longer than the last, so the first is waited for as well.
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
