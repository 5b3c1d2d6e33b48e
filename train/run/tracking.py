"""All who get the numbers of a run, behind one door: metrics.jsonl, the console, TensorBoard, Weights & Biases."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from manifests.errors import UserError
from train.config.tracking_settings import TrackSettings
from train.config.training import TrainingSettings
from train.run.folder import RunFolder, append_lines, keep_lines
from train.run.progress import Progress

_SPEED = frozenset(
    {"samples_per_s", "step_s", "data_wait_s", "data_wait_share", "gpu_memory_gb", "tflops", "mfu", "num_failed"}
)


class Tracker(Protocol):
    """One who gets the lines of metrics.jsonl, in the order of steps."""

    def log(self, line: dict[str, Any]) -> None:
        """Takes the line of a step; keys as in metrics.jsonl, with a slash where they name an evaluation."""
        ...

    def close(self) -> None:
        """Writes what is not yet written; nothing follows."""
        ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, line: dict[str, Any]) -> None:
        """Gives everyone the line of a step."""
        for tracker in self._trackers:
            tracker.log(line)

    def close(self) -> None:
        """Closes all, the last one first."""
        for tracker in reversed(self._trackers):
            tracker.close()


class JsonLines:
    """metrics.jsonl; what it has of later steps than `step`, which are taken once more, is dropped."""

    def __init__(self, run: RunFolder, *, step: int) -> None:
        self._path = run.metrics
        keep_lines(run.metrics, lambda line: line["step"] <= step)

    def log(self, line: dict[str, Any]) -> None:
        """Appends the line."""
        append_lines(self._path, [line])

    def close(self) -> None:
        """Every line is in the file already."""


class Console:
    """A bar or plain lines (train.run.progress)."""

    def __init__(self, progress: Progress, *, step: int, num_steps: int) -> None:
        self._progress = progress
        progress.begin(step, num_steps)

    def log(self, line: dict[str, Any]) -> None:
        """Shows the line, where it is time for one."""
        self._progress.show(line)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._progress.end()


def check_tracking(settings: TrackSettings) -> None:
    """Looks for the packages that tracking needs, before anything is made.

    Raises:
        UserError: one is missing.
    """
    for flag, module, asked in (
        ("--track.tensorboard", "tensorboard", settings.tensorboard),
        (f"--track.wandb {settings.wandb}", "wandb", settings.wandb != "off"),
    ):
        if asked and find_spec(module) is None:
            raise UserError(f"{flag} needs {module}", hint="pip install 'clipmill[track]'")


def open_trackers(settings: TrainingSettings, *, run: RunFolder, progress: Progress, step: int) -> Trackers:
    """Everyone that `settings` name, for the steps after `step`; of several ranks the first one calls it.

    A run that goes on from a checkpoint has each step once, in the event files and the W&B run that it began with.
    """
    # Before metrics.jsonl is cut: its last line tells what W&B, which forgets nothing, has been told.
    trackers: list[Tracker] = []
    if settings.track.wandb != "off":
        from train.run.weights_and_biases import WeightsAndBiases

        trackers.append(WeightsAndBiases(settings, run=run, step=step))
    if settings.track.tensorboard:
        from train.run.tensor_board import TensorBoard

        trackers.append(TensorBoard(settings, run=run, step=step))
    return Trackers(
        [JsonLines(run, step=step), Console(progress, step=step, num_steps=settings.steps), *reversed(trackers)]
    )


def tagged(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that charts have: train/loss, speed/mfu, and those of evaluations."""
    found = {}
    for key, value in line.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            continue
        room = "" if "/" in key else "speed/" if key in _SPEED else "train/"
        found[room + key] = float(value)
    return found
