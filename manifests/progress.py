"""Progress of long work on standard error: what a command is doing, from the first second.

A terminal has one line, which is drawn again several times a second and erased at the end. A log gets a line as soon as
the work has lasted most of a second, then one every ten seconds, and one a minute after two minutes. Each begins with
the time since the outermost work began, in brackets: `[0:10] encoding: 12 of 24 chunks, 2.3x real time, 0:10 left`.
"""

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, RLock, Thread
from types import TracebackType
from typing import IO, Any, Self

_FIRST_LINE_S = 0.7
_REDRAW_S = 0.25
_INTERVAL_S, _LATER_INTERVAL_S, _LATER_S = 10.0, 60.0, 120.0
_BAR_WIDTH = 16
_MIN_WINDOW_S, _NUM_SEEN = 60.0, 100
_lock = RLock()
_shown: list["Activity"] = []  # the innermost is the last


class Activity:
    """Context manager that shows what is being done until its block ends; an inner one hides an outer one.

    Args:
        what: a participle and what is worked on, such as "looking at 1,000 videos".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._details: str | Callable[[], str] = ""
        self._share: float | None = None
        self._begin_s = time.monotonic()
        self._line_s: float | None = None  # time of its last line in a log
        self._has_ended = Event()
        self._ticker = Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        with _lock:
            self._begin_s = time.monotonic()
            if not _shown and is_terminal(sys.stderr):
                _line.open()
            _shown.append(self)
            self._draw()
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._ticker.join()
        with _lock:
            _shown.remove(self)
            if not _shown:
                _line.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the block was entered."""
        return time.monotonic() - self._begin_s

    def say(self, details: str | Callable[[], str], *, what: str | None = None, share: float | None = None) -> None:
        """Set what is shown behind the colon.

        Args:
            details: the text, or a function that returns it at the time it is shown.
            what: replaces the description of the work.
            share: share of the work that is done, from 0 to 1, for the bar; None if unknown.
        """
        self._what, self._details, self._share = what or self._what, details, share

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Return a function of (number done, total) that shows them, with the rate and the time left.

        Args:
            what: what is shown in place of the description of the work until all are done.
        """
        outer, pace = self._what, Pace()

        def show(done: int, total: int) -> None:
            if done >= total:
                self.say("", what=outer)
                return
            pace.add(done)
            self.say(lambda: f"{done:,} of {total:,}{pace.text(total)}", what=what, share=done / total)

        return show

    def _tick(self) -> None:
        while not self._has_ended.wait(_REDRAW_S if _line.is_open else _FIRST_LINE_S / 2):
            with _lock:
                self._draw()

    def _draw(self) -> None:
        if self._has_ended.is_set() or _shown[-1] is not self:
            return
        if _line.is_open:
            _line.show(f"{self._bar()}{self._text()} ({clock(_shown[0].elapsed_s)})")
        elif (now_s := time.monotonic()) >= self._due_s():
            self._line_s = now_s
            with suppress(OSError, ValueError):  # a closed stream must not end the work
                print(f"[{clock(_shown[0].elapsed_s)}] {self._text()}", file=sys.stderr, flush=True)

    def _due_s(self) -> float:
        """Return when the next line of a log is due."""
        if self._line_s is None:
            return self._begin_s + _FIRST_LINE_S
        return self._line_s + (_INTERVAL_S if _shown[0].elapsed_s < _LATER_S else _LATER_INTERVAL_S)

    def _text(self) -> str:
        details = self._details if isinstance(self._details, str) else self._details()
        return f"{self._what}: {details}" if details else self._what

    def _bar(self) -> str:
        if self._share is None:
            return ""
        filled = round(min(max(self._share, 0.0), 1.0) * _BAR_WIDTH)
        return f"{'━' * filled}{'┄' * (_BAR_WIDTH - filled)} "


def is_terminal(stream: IO[str]) -> bool:
    """Return True if a stream is a terminal that can erase a line."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds, or as hours, minutes and seconds: 0:42, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Pace:
    """How fast work proceeds: over the second half of the time so far, at least the last minute.

    The first half holds what happens once, such as starting workers and loading a model.
    """

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._seen = deque([(self._begin_s, 0.0)])

    def add(self, done: float) -> None:
        """Note how much is done now, in any unit."""
        now_s = time.monotonic()
        window_s = max(_MIN_WINDOW_S, (now_s - self._begin_s) / 2)
        if len(self._seen) > 1 and now_s - self._seen[-2][0] < window_s / _NUM_SEEN:
            self._seen.pop()
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > window_s:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        """Amount done per second; 0 while it is unknown."""
        (begin_s, before), (end_s, done) = self._seen[0], self._seen[-1]
        return (done - before) / (end_s - begin_s) if end_s - begin_s >= 1 else 0.0

    def left(self, total: float) -> str:
        """Return `, 0:42 left`, or nothing while it is unknown."""
        end_s, done = self._seen[-1]
        if self.per_s <= 0 or done >= total:
            return ""
        return f", {clock(max(0.0, (total - done) / self.per_s - (time.monotonic() - end_s)))} left"

    def text(self, total: float) -> str:
        """Return `, 12/s, 0:42 left`, or nothing while the pace is unknown."""
        rate = self.per_s
        if rate <= 0:
            return ""
        shown = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s" if rate >= 1 else f"{rate * 60:.1f}/min"
        return f", {shown}{self.left(total)}"


class _Line:
    """The line of the terminal. While it is open, other output of this process erases it first."""

    def __init__(self) -> None:
        self.is_open = False
        self.is_within_line = False  # of other output, which must not be erased
        self._is_drawn = False
        self._streams: tuple[IO[str], IO[str]] | None = None

    def open(self) -> None:
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Above(sys.stdout), _Above(sys.stderr)  # type: ignore[assignment]
        self.is_open = True

    def close(self) -> None:
        if self._streams is not None:
            self.erase()
            sys.stdout, sys.stderr = self._streams
            self._streams, self.is_open, self.is_within_line = None, False, False

    def show(self, text: str) -> None:
        if self._streams is None or self.is_within_line:
            return
        width = shutil.get_terminal_size().columns - 1
        text = text if len(text) <= width else f"{text[: max(0, width - 1)]}…"
        with suppress(OSError, ValueError):
            self._streams[1].write(f"\r\x1b[K{text}")
            self._streams[1].flush()
            self._is_drawn = True

    def erase(self) -> None:
        if self._is_drawn and self._streams is not None:
            self._is_drawn = False
            with suppress(OSError, ValueError):
                self._streams[1].write("\r\x1b[K")
                self._streams[1].flush()


class _Above:
    """A text stream that erases the line of the terminal before anything is written to it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _lock:
            _line.erase()
            _line.is_within_line = not text.endswith("\n") if text else _line.is_within_line
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_line = _Line()
