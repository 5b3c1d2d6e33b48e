"""Progress of a run on standard error: a progress bar on a terminal, otherwise a plain line from time to time."""

import sys
import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from prep.engines import Refused

_PLAIN_INTERVAL_S = 10.0


class ChunkProgress:
    """Progress bar with chunks done, chunks per second, speed relative to real time, failures by code and time left.

    Args:
        num_chunks: number of chunks that the run will make.
        chunk_s: seconds of video in a chunk; None to omit the speed.
    """

    def __init__(self, *, num_chunks: int, chunk_s: float | None) -> None:
        self._num_chunks, self._chunk_s = num_chunks, chunk_s
        self._failures: Counter[str] = Counter()
        self._begin_s = self._line_s = time.monotonic()
        self._done = 0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("chunks"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[rates]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar_task = self._bar.add_task("", total=num_chunks, rates="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def fail(self, code: str) -> None:
        """Count one failure."""
        self._failures[code] += 1

    def show(self, num_done: int) -> None:
        """Show that `num_done` chunks are done, including those of running shards."""
        self._done = max(self._done, min(num_done, self._num_chunks))
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=self._done, rates=self._rates())
        elif (now_s := time.monotonic()) - self._line_s >= _PLAIN_INTERVAL_S:
            self._line_s = now_s
            print(f"chunks {self._done}/{self._num_chunks} {self._rates()}", file=sys.stderr, flush=True)

    def _rates(self) -> str:
        elapsed_s = time.monotonic() - self._begin_s
        rate = self._done / elapsed_s if elapsed_s > 0 else 0.0
        parts = [f"{rate:.2f} chunks/s"]
        if self._chunk_s is not None:
            parts.append(f"{rate * self._chunk_s:.1f}x real time")
        if rate > 0:
            parts.append(f"{_clock((self._num_chunks - self._done) / rate)} left")
        parts += [f"{count} x {code}" for code, count in sorted(self._failures.items())]
        return ", ".join(parts)


class CountProgress:
    """Progress of countable work, shown only if it takes long.

    Args:
        what: description of the work, for example "probing sources".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._line_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._line_s >= _PLAIN_INTERVAL_S / 5:
            self._line_s = now_s
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{self._what} {done}/{total}", file=sys.stderr, end=end, flush=True)


def warn_refused(refused: Refused) -> None:
    """Print that a node was excluded, and why."""
    print(f"warning: {refused.node} is excluded from the run: {refused.reason}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
