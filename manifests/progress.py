"""Show the progress of long-running work on standard error.

A terminal shows one line, which rich redraws several times a second and erases at the end. A log gets its first line
after half a second of work, then a line every ten seconds, and a line every minute after two minutes. Each line of a
log contains the time in UTC, and in brackets the time since the start of the program:
`2027-01-31T09:30:10Z [0:10] encoding: 12 of 24 chunks, 2.3x real time, 0:10 left`.

If several processes are launched together, only the process with RANK 0 shows progress.
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
_PROGRAM_START_S = time.monotonic()  # `prep` and `train` import this module when they start
_lock = RLock()
_activities: list["Activity"] = []  # current activities, with the innermost activity last
_close: Callable[[], object]  # function that ends the display


class Activity:
    """Context manager that shows what a program is doing until the block ends. An inner activity hides an outer one.

    Args:
        work: Description of the work, such as "looking at 1,000 videos".
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._details: str | Callable[[], str] = ""
        self._fraction: float | None = None
        self._start_s = time.monotonic()
        self._line_s: float | None = None  # time of the last line in a log

    def __enter__(self) -> Self:
        global _close
        with _lock:
            self._start_s = time.monotonic()
            _activities.append(self)
            if len(_activities) == 1:
                show = _show_on_terminal if is_terminal(sys.stderr) else _show_in_log
                _close = show() if is_first_process() else lambda: None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _activities.remove(self)
            if not _activities:
                _close()

    def say(self, details: str | Callable[[], str], *, work: str | None = None, fraction: float | None = None) -> None:
        """Set the details to show after the description of the work.

        Args:
            details: Text, or a function without arguments that returns the text each time it is shown.
            work: New description of the work.
            fraction: Fraction of the work that is done, from 0 to 1, for the bar. None shows no bar.
        """
        self._work, self._details, self._fraction = work or self._work, details, fraction

    def counter(self, work: str, *, unit: str = "") -> Callable[[int, int | None], None]:
        """Return a function that shows how many units are done, with their rate and the remaining time.

        Args:
            work: Description of the work, which is shown until all units are done.
            unit: Singular noun for the units.

        Returns:
            A function `show(done, total)`, where `total` is None if it is unknown.
        """
        previous_work, pace = self._work, ProgressRate()

        def show(done: int, total: int | None) -> None:
            if total is not None and done >= total:
                self.say("", work=previous_work)
                return
            pace.add(done)
            self.say(
                lambda: join_parts(amount_text(done, total, unit), pace.rate(), pace.time_left(total)),
                work=work,
                fraction=None if total is None else done / total,
            )

        return show

    def adder(self, total: int | None, *, unit: str) -> Callable[[int], None]:
        """Return a function that takes the number of newly finished units, and shows their total like `counter`."""
        show, num_done = self.counter(self._work, unit=unit), 0

        def add(count: int) -> None:
            nonlocal num_done
            num_done += count
            show(num_done, total)

        return add

    def text(self) -> str:
        """Return the description of the work, with the details."""
        details = self._details if isinstance(self._details, str) else self._details()
        return f"{self._work}: {details}" if details else self._work

    def render(self) -> "RenderableType":
        """Return the line to show on a terminal."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        text = Text(f"{self.text()} ({_program_clock()})", no_wrap=True, overflow="ellipsis")
        if self._fraction is None:
            return text
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(ProgressBar(total=1.0, completed=self._fraction, width=_BAR_WIDTH), text)
        return line

    def log(self) -> None:
        """Write a line to the log if a line is due."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._start_s
        if elapsed_s < _FIRST_LINE_S if self._line_s is None else now_s - self._line_s < log_interval(elapsed_s):
            return
        self._line_s = now_s
        with suppress(OSError, ValueError):  # a closed stream must not end the work
            print(f"{line_time(sys.stderr)}[{_program_clock()}] {self.text()}", file=sys.stderr, flush=True)


def is_terminal(stream: IO[str]) -> bool:
    """Return True if a stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def is_first_process() -> bool:
    """Return True unless a launcher has assigned a rank other than 0 to this process."""
    return os.environ.get("RANK", "0") == "0"


def log_time() -> str:
    """Return the current time in UTC in the form `2027-01-31T09:30:10Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def line_time(stream: IO[str]) -> str:
    """Return the time for the start of a line, or "" for a terminal and for a log that adds the time itself."""
    return "" if stream.isatty() or getattr(stream, "has_times", False) else f"{log_time()} "


def log_interval(elapsed_s: float) -> float:
    """Return the time in seconds between two log lines about work that has lasted `elapsed_s` seconds."""
    return _INTERVAL_S if elapsed_s < _LATER_S else _LATER_INTERVAL_S


def join_parts(*parts: str) -> str:
    """Join the parts that are not empty with commas."""
    return ", ".join(filter(None, parts))


def amount_text(done: float, total: int | None, unit: str) -> str:
    """Format the amount of finished work, as in `12 of 24 chunks`, or `12 chunks` if the total is unknown.

    Args:
        unit: Singular noun for the units; may be empty.
    """
    amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    plural_s = "" if not unit or (done if total is None else total) == 1 else "s"
    return f"{amount} {unit}{plural_s}".rstrip()


class ProgressRate:
    """Measure the speed of work over the second half of the elapsed time, or over the last minute if that is longer.

    The first half is omitted because it includes one-time work, such as starting workers and loading a model.

    Args:
        done: Amount of work that was done before the measurement.
    """

    def __init__(self, done: float = 0.0) -> None:
        self._start_s = time.monotonic()
        self._samples = deque([(self._start_s, done)])

    def add(self, done: float) -> None:
        """Record the total amount of work that has been done, in any unit."""
        now_s = time.monotonic()
        window_s = max(_MIN_WINDOW_S, (now_s - self._start_s) / 2)
        if len(self._samples) > 1 and now_s - self._samples[-2][0] < window_s / _NUM_SAMPLES:
            self._samples.pop()
        self._samples.append((now_s, done))
        while len(self._samples) > 2 and now_s - self._samples[1][0] > window_s:
            self._samples.popleft()

    @property
    def per_s(self) -> float:
        """Amount of work done per second; 0 if it is unknown."""
        (begin_s, first_done), (end_s, done) = self._samples[0], self._samples[-1]
        return (done - first_done) / (end_s - begin_s) if end_s - begin_s >= 1 else 0.0

    def rate(self) -> str:
        """Return the rate as text, such as `12/s`, or "" if it is unknown."""
        return rate_text(self.per_s) if self.per_s > 0 else ""

    def time_left(self, total: float | None) -> str:
        """Return the remaining time as text, such as `0:42 left`, or "" if it is unknown."""
        end_s, done = self._samples[-1]
        if total is None or self.per_s <= 0 or done >= total:
            return ""
        return f"{clock(max(0.0, (total - done) / self.per_s - (time.monotonic() - end_s)))} left"


def _program_clock() -> str:
    return clock(time.monotonic() - _PROGRAM_START_S)


def _show_on_terminal() -> Callable[[], object]:
    """Start displaying the innermost activity on a terminal, and return a function that ends the display."""
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
    """Start writing lines about the innermost activity to a log, and return a function that stops the writing."""
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
