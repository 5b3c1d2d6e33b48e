"""Progress reports of long work on standard error, from the first second.

A terminal shows one line. rich redraws the line several times a second, and erases it at the end. A log gets its first
line once the work has lasted half a second, then a line every ten seconds, and after two minutes a line every minute.
Each line begins with the time in UTC, followed in brackets by the time since the program started:
`2027-01-31T09:30:10Z [0:10] encoding: 12 of 24 chunks, 2.3x real time, 0:10 left`.

If several processes are launched together, only the first process, according to RANK, shows progress.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, RLock, Thread
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from clipmill.manifests.formatting import clock, rate_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_FIRST_LINE_S = 0.5
_REDRAW_S = 0.25
_INTERVAL_S, _LATER_INTERVAL_S, _LATER_S = 10.0, 60.0, 120.0
_BAR_WIDTH = 16
_MIN_WINDOW_S, _NUM_SAMPLES = 60.0, 100
_PROGRAM_BEGIN_S = time.monotonic()  # start of the program: `prep` and `train` import this module first
_lock = RLock()
_activities: list["Activity"] = []  # current activities, the innermost activity last
_close: Callable[[], object]  # function that ends the display


class Activity:
    """Context manager that shows the current work until its block ends. An inner activity hides the outer activity.

    Args:
        what: Description of the work, such as "looking at 1,000 videos".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._details: str | Callable[[], str] = ""
        self._share: float | None = None
        self._begin_s = time.monotonic()
        self._line_s: float | None = None  # time of the last line in a log

    def __enter__(self) -> Self:
        global _close
        with _lock:
            self._begin_s = time.monotonic()
            _activities.append(self)
            if len(_activities) == 1:
                _close = _show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _activities.remove(self)
            if not _activities:
                _close()

    def say(self, details: str | Callable[[], str], *, what: str | None = None, share: float | None = None) -> None:
        """Set the details to show after the colon.

        Args:
            details: Text, or a function that is called to return the text when it is shown.
            what: New description of the work.
            share: Fraction of the work that is done, from 0 to 1, for the bar; None if unknown.
        """
        self._what, self._details, self._share = what or self._what, details, share

    def counter(self, what: str, *, unit: str = "") -> Callable[[int, int | None], None]:
        """Return a function that takes the number done and the total (or None), and shows them with rate and time left.

        Args:
            what: Text to show instead of the description until all units are done.
            unit: Singular noun for the units.
        """
        outer, pace = self._what, ProgressRate()

        def show(done: int, total: int | None) -> None:
            if total is not None and done >= total:
                self.say("", what=outer)
                return
            pace.add(done)
            share = None if total is None else done / total
            self.say(
                lambda: join_parts(amount_text(done, total, unit), pace.rate(), pace.time_left(total)),
                what=what,
                share=share,
            )

        return show

    def adder(self, total: int | None, *, unit: str) -> Callable[[int], None]:
        """Return a function that takes a number of newly finished units, and shows their sum as `counter` does."""
        show, num_done = self.counter(self._what, unit=unit), 0

        def add(count: int) -> None:
            nonlocal num_done
            num_done += count
            show(num_done, total)

        return add

    def text(self) -> str:
        """Return the description and the details."""
        details = self._details if isinstance(self._details, str) else self._details()
        return f"{self._what}: {details}" if details else self._what

    def render(self) -> "RenderableType":
        """Return the line to show on a terminal."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = Text(f"{self.text()} ({_program_clock()})", no_wrap=True, overflow="ellipsis")
        if self._share is None:
            return text
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(ProgressBar(total=1.0, completed=self._share, width=_BAR_WIDTH), text)
        return line

    def log(self) -> None:
        """Write a line to the log if a line is due."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._begin_s
        if elapsed_s < _FIRST_LINE_S if self._line_s is None else now_s - self._line_s < log_interval(elapsed_s):
            return
        self._line_s = now_s
        with suppress(OSError, ValueError):  # a closed stream must not end the work
            print(f"{line_time(sys.stderr)}[{_program_clock()}] {self.text()}", file=sys.stderr, flush=True)


def is_terminal(stream: IO[str]) -> bool:
    """Return True if a stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def is_first_process() -> bool:
    """Return True unless a launcher has assigned this process a rank other than the first."""
    return os.environ.get("RANK", "0") == "0"


def log_time() -> str:
    """Return the current time in UTC for logs: `2027-01-31T09:30:10Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def line_time(stream: IO[str]) -> str:
    """Return the time at the start of a progress line; empty for a terminal, and for a log that adds times itself."""
    return "" if stream.isatty() or getattr(stream, "has_times", False) else f"{log_time()} "


def log_interval(elapsed_s: float) -> float:
    """Return the interval in seconds between two log lines about work that has lasted `elapsed_s` seconds."""
    return _INTERVAL_S if elapsed_s < _LATER_S else _LATER_INTERVAL_S


def join_parts(*parts: str) -> str:
    """Join the non-empty parts with commas."""
    return ", ".join(filter(None, parts))


def amount_text(done: float, total: int | None, unit: str) -> str:
    """Format an amount of `unit`, a singular noun: `12 of 24 chunks`, or `12 chunks` if the total is unknown."""
    amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    ending = "" if not unit or (done if total is None else total) == 1 else "s"
    return f"{amount} {unit}{ending}".rstrip()


class ProgressRate:
    """The speed of work over the second half of the elapsed time, or over the last minute if that is longer.

    The first half includes work that happens only once, such as starting workers and loading a model.

    Args:
        done: Amount of work that is already done.
    """

    def __init__(self, done: float = 0.0) -> None:
        self._begin_s = time.monotonic()
        self._samples = deque([(self._begin_s, done)])

    def add(self, done: float) -> None:
        """Record the total amount that has been done, in any unit."""
        now_s = time.monotonic()
        window_s = max(_MIN_WINDOW_S, (now_s - self._begin_s) / 2)
        if len(self._samples) > 1 and now_s - self._samples[-2][0] < window_s / _NUM_SAMPLES:
            self._samples.pop()
        self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > window_s:
            self._samples.popleft()

    @property
    def per_s(self) -> float:
        """Amount done per second; 0 if unknown."""
        (begin_s, first_done), (end_s, done) = self._samples[0], self._samples[-1]
        return (done - first_done) / (end_s - begin_s) if end_s - begin_s >= 1 else 0.0

    def rate(self) -> str:
        """Return the rate as text, such as `12/s`; empty if unknown."""
        return rate_text(self.per_s) if self.per_s > 0 else ""

    def time_left(self, total: float | None) -> str:
        """Return the remaining time as text, such as `0:42 left`; empty if unknown."""
        end_s, done = self._samples[-1]
        if total is None or self.per_s <= 0 or done >= total:
            return ""
        return f"{clock(max(0.0, (total - done) / self.per_s - (time.monotonic() - end_s)))} left"


def _program_clock() -> str:
    return clock(time.monotonic() - _PROGRAM_BEGIN_S)


def _show() -> Callable[[], object]:
    """Start displaying the innermost activity; return a function that ends the display."""
    if not is_first_process():
        return lambda: None
    return _show_on_terminal() if is_terminal(sys.stderr) else _show_in_log()


def _show_on_terminal() -> Callable[[], object]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stderr, force_terminal=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    live = Live(
        get_renderable=lambda: next((activity.render() for activity in _activities[-1:]), ""),
        console=console,
        refresh_per_second=1 / _REDRAW_S,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # piped output must not reach the terminal
    )

    def close() -> None:
        with suppress(OSError, ValueError):  # the terminal may have been closed
            live.stop()

    with suppress(OSError, ValueError):
        live.start(refresh=True)
    return close


def _show_in_log() -> Callable[[], object]:
    has_ended = Event()

    def write_lines() -> None:
        while not has_ended.wait(_FIRST_LINE_S / 2):
            for innermost in _activities[-1:]:
                innermost.log()

    def close() -> None:
        has_ended.set()
        thread.join()

    thread = Thread(target=write_lines, name="progress", daemon=True)
    thread.start()
    return close
