"""Open trained weights with whichever task they are of."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from train.evaluation.opening import Tasks, open_weights_as
from train.evaluation.runner import OpenedRun
from train.registry import task_named, task_names
from train.spec import TaskSpec


def tasks_where(holds: Callable[[TaskSpec], bool] = lambda spec: True) -> Tasks:
    """The tasks of which something holds; all by default."""
    return {name: partial(task_named, name) for name in task_names() if holds(task_named(name))}


def open_weights_for_use(weights: str | Path, **how: Any) -> OpenedRun:
    """`train.evaluation.opening.open_weights_as` any task."""
    return open_weights_as(tasks_where(), weights, **how)
