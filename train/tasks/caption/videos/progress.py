"""How far the captioning of videos is: a bar on a terminal, a plain line now and then elsewhere; on standard error."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from train.data.frame_sampling import US_PER_S
from train.tasks.caption.videos.captioning import CaptionedWindow, VideoEnd
from train.tasks.caption.videos.files import shown_name

_PLAIN_INTERVAL_S = 10.0


class VideoProgress:
    """Videos done and seconds of video captioned; failures are said at once.

    Args:
        num_videos: that are to be captioned.
    """

    def __init__(self, *, num_videos: int) -> None:
        self._num_videos, self._num_done, self._num_failed = num_videos, 0, 0
        self._before_us = self._now_us = 0
        self._begin_s = self._line_s = time.monotonic()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("videos"),
                BarColumn(),
                TextColumn("{task.completed:.1f}/{task.total:.0f} {task.description}", markup=False),
                TimeRemainingColumn(),
            )
            # Captions that go into a pipe must not be turned to the terminal.
            has_both = sys.stdout.isatty()
            self._bar = Progress(*columns, console=self._console, redirect_stdout=has_both)
            self._task = self._bar.add_task("", total=num_videos)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: CaptionedWindow | VideoEnd) -> None:
        """Shows that a window is captioned, or that a video is done."""
        share = 0.0
        if isinstance(event, CaptionedWindow):
            self._now_us, share = event.end_us, event.end_us / event.video_us
        else:
            self._num_done += 1
            self._before_us, self._now_us = self._before_us + self._now_us, 0
            if event.failure is not None:
                self._num_failed += 1
                self._console.print(f"{shown_name(event.video)}: {event.failure}", markup=False)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._num_done + min(share, 1.0), description=self._rates())
        elif (now_s := time.monotonic()) - self._line_s >= _PLAIN_INTERVAL_S:
            self._line_s = now_s
            print(f"videos {self._num_done}/{self._num_videos} {self._rates()}", file=sys.stderr, flush=True)

    def _rates(self) -> str:
        video_s = (self._before_us + self._now_us) / US_PER_S
        elapsed_s = max(time.monotonic() - self._begin_s, 1e-9)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{video_s:.0f} s of video, {video_s / elapsed_s:.1f}x real time{failed}"
