"""Flags of `train quickstart` that override proposed values."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.train.config.training import Device
from clipmill.train.registry import tasks

OFFERED_TASKS = tuple(task.name for task in tasks() if task.first_run is not None)
if TYPE_CHECKING:
    Task = str
else:
    Task = Literal[OFFERED_TASKS]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Request:
    """Values that the user set; None for each value that quickstart proposes."""

    task: Task | None = None
    """Task to train. Default: dual-encoder on data with captions, otherwise mae."""

    label: str | None = None
    """Label to classify, with --task classify. Default: the only label."""

    preset: str | None = None
    """Preset of the task. Default: the largest preset that suits this machine."""

    weights: Annotated[str | None, Parameter(name="--init.weights")] = None
    """Initial weights: file, folder, run or NAME:TAG, as for the training commands. Default: random."""

    minutes: float | None = None
    """Time limit of the run in minutes; determines the maximum number of steps. Default: 10 on a CPU, 60 on GPUs."""

    out: Path | None = None
    """Run folder. Default: a new folder, runs/quickstart."""

    device: Device = "auto"
    """Device to train on."""
