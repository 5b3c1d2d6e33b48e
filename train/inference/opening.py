"""Open trained weights with whichever task they are of."""

from functools import partial
from pathlib import Path
from typing import Any

from train.evaluation.opening import Tasks, open_weights_as
from train.evaluation.runner import OpenedRun
from train.registry import task_named, task_names


def tasks_having(evaluation: str | None = None) -> Tasks:
    """The tasks that have an evaluation, or all."""
    names = task_names()
    if evaluation is not None:
        names = tuple(name for name in names if evaluation in (one.name for one in task_named(name).evaluations))
    return {name: partial(task_named, name) for name in names}


def open_weights_for_use(weights: str | Path, **how: Any) -> OpenedRun:
    """`train.evaluation.opening.open_weights_as` any task."""
    return open_weights_as(tasks_having(), weights, **how)
