"""Console output of a run: a progress bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 5.0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Continue without output if the reader is gone; rich would exit."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """A tracker that shows the steps of a run on stdout, or nothing if `is_quiet`, as on all ranks but the first."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._console = _Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=is_quiet)
        self._bar: RichProgress | None = None
        self._last_line = 0.0
        self._num_steps = 0

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False)

    def begin(self, step: int, num_steps: int) -> None:
        """Begin with step `step` + 1 of `num_steps`."""
        self._num_steps = num_steps
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=self._console)
            self._bar.add_task("", total=num_steps, completed=step)
            self._bar.start()

    def log(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl; without a terminal only the first, the last, and one every few seconds.

        Evaluation metrics are always shown, on a separate line.
        """
        text, place = describe(line), f"step {line['step']}/{self._num_steps}"
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=line["step"], description=text)
        elif line["step"] in (1, self._num_steps) or now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.say(f"{place}  {text}")
        if found := evaluated(line):
            self.say(f"{place}  {found}")

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def evaluated(line: dict[str, Any]) -> str:
    """Format the evaluation metrics of a line by split; empty if there are none."""
    metrics: dict[str, list[str]] = {}
    for key, value in line.items():
        split, slash, name = key.partition("/")
        if slash:
            metrics.setdefault(split, []).append(f"{name} {value:.4g}")
    return "  ".join(f"{split}: {'  '.join(its)}" for split, its in metrics.items())


def describe(line: dict[str, Any]) -> str:
    """Format the training metrics shown on the console."""
    text = (
        f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  {line['samples_per_s']:.1f} samples/s"
        f"  data wait {line['data_wait_s'] / line['step_s']:.0%}"
    )
    if "gpu_memory_gb" in line:
        text += f"  {line['gpu_memory_gb']:.1f} GB"
    if "mfu" in line:
        text += f"  MFU {line['mfu']:.0%}"
    return f"{text}  {line['num_failed']} failed" if line["num_failed"] else text
