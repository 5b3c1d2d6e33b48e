"""What a run says while it goes on: a bar on a terminal, plain lines elsewhere."""

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
        """Whoever read has gone: the run goes on and says nothing, rather than end (rich's own way)."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Shows the steps of a run on stdout.

    Args:
        is_quiet: says nothing, as all ranks but the first.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._console = _Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=is_quiet)
        self._bar: RichProgress | None = None
        self._last_line = 0.0
        self._num_steps = 0

    def say(self, text: str) -> None:
        """Prints a line as it is."""
        self._console.print(text, markup=False)

    def begin(self, step: int, num_steps: int) -> None:
        """Steps `step` + 1 to `num_steps` are to come."""
        self._num_steps = num_steps
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=self._console)
            self._bar.add_task("", total=num_steps, completed=step)
            self._bar.start()

    def show(self, line: dict[str, Any]) -> None:
        """Shows one line of metrics.jsonl; without a terminal the first, the last, and one every few seconds.

        The numbers of an evaluation are always shown, on a line of their own.
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

    def end(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def evaluated(line: dict[str, Any]) -> str:
    """The numbers of an evaluation, behind the name of its split; nothing where the line has none."""
    numbers: dict[str, list[str]] = {}
    for key, value in line.items():
        split, slash, name = key.partition("/")
        if slash:
            numbers.setdefault(split, []).append(f"{name} {value:.4g}")
    return "  ".join(f"{split}: {'  '.join(its)}" for split, its in numbers.items())


def describe(line: dict[str, Any]) -> str:
    """The numbers that a person follows."""
    text = (
        f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  {line['samples_per_s']:.1f} samples/s"
        f"  data wait {line['data_wait_s'] / line['step_s']:.0%}"
    )
    if "gpu_memory_gb" in line:
        text += f"  {line['gpu_memory_gb']:.1f} GB"
    if "mfu" in line:
        text += f"  MFU {line['mfu']:.0%}"
    return f"{text}  {line['num_failed']} failed" if line["num_failed"] else text
