"""What a command is doing, on standard error: a line that is updated on a terminal, and lines now and then in a log.

Work that is over within half a second is not mentioned. This module imports nothing that takes long, so that a command
can say that it imports torch.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from train.data.outcomes import LoadedBatch

_FIRST_S = 0.5
_ON_TERMINAL_S = 0.5
_IN_LOG_S, _LONGEST_S = 5.0, 60.0  # between lines of a log: of a long work, a twentieth of its time
_LOG_SHARE = 0.05
_WORTH_SAYING_S = 2.0
_ERASE = "\r\x1b[K"
_is_counting: ContextVar[bool] = ContextVar("is_counting", default=False)


def clock(seconds: float) -> str:
    """A duration as on a clock: 0:34, 12:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def log_interval(elapsed_s: float) -> float:
    """Seconds between two lines of a log, after so much time."""
    return min(max(_IN_LOG_S, _LOG_SHARE * elapsed_s), _LONGEST_S)


class Doing:
    """Work that may take long, as a context manager; only the first process of a launch speaks.

    Args:
        what: such as "importing torch".
        total: number of things to do; None if it is not known.
        unit: what is counted, such as "clips".
    """

    def __init__(self, what: str, *, total: int | None = None, unit: str = "") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._num_done = 0
        self._begin_s = time.monotonic()
        self._is_over = threading.Event()
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = False
        self._thread = threading.Thread(target=self._show_now_and_then, name="doing", daemon=True)

    def add(self, count: int) -> None:
        """Note that `count` more things are done."""
        self._num_done += count

    def text(self) -> str:
        """The line to show: what is done, how much of it, how fast, and how long it still takes."""
        elapsed_s = time.monotonic() - self._begin_s
        if not self._num_done:
            of = f" {self._total:,} {self._unit}" if self._total else ""
            return f"{self._what}{of} ..." + (f" {clock(elapsed_s)}" if elapsed_s >= _WORTH_SAYING_S else "")
        rate = self._num_done / elapsed_s
        if not self._total:
            return f"{self._what}: {self._num_done:,} {self._unit}  {rate:,.1f}/s"
        left = clock(max(0, self._total - self._num_done) / rate)
        return f"{self._what}: {self._num_done:,}/{self._total:,} {self._unit}  {rate:,.1f}/s  {left} left"

    def __enter__(self) -> Self:
        if os.environ.get("RANK", "0") == "0":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """The work is over; may be called again."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._is_terminal and self._is_shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()
            self._is_shown = False

    def _show_now_and_then(self) -> None:
        wait_s = _FIRST_S
        while not self._is_over.wait(wait_s):
            line = f"{_ERASE}{self.text()}" if self._is_terminal else f"{self.text()}\n"
            try:
                sys.stderr.write(line)
                sys.stderr.flush()
            except (OSError, ValueError):
                return  # nobody reads it
            self._is_shown = True
            elapsed_s = time.monotonic() - self._begin_s
            wait_s = _ON_TERMINAL_S if self._is_terminal else log_interval(elapsed_s)


@contextmanager
def counting_batches() -> Iterator[None]:
    """Let `counted_batches` show its progress within the block: a command shows it, and a training loop does not."""
    token = _is_counting.set(True)
    try:
        yield
    finally:
        _is_counting.reset(token)


def counted_batches(batches: "Iterable[LoadedBatch]", what: str, *, total: int | None) -> "Iterator[LoadedBatch]":
    """The batches; their samples are counted and shown within `counting_batches`.

    Args:
        what: is done with them, such as "embedding".
        total: number of samples in all batches; None if it is not known.
    """
    if not _is_counting.get():
        yield from batches
        return
    with Doing(what, total=total, unit="clips") as doing:
        for loaded in batches:
            yield loaded
            doing.add(len(loaded.batch.get("position", ())) + len(loaded.failed))
