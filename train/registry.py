"""The tasks that the commands know: one row each.

A task from outside of clipmill is a row too: a program of its own registers the task's spec and then becomes `train`.

    from frame_order.task import TASK

    register(TASK)

    from clipmill.train.cli import main

    main()
"""

import importlib
import re
from collections.abc import Callable
from functools import partial

from clipmill.train.spec import EvaluationSpec, Tasks, TaskSpec

# The module of each task's spec, which is loaded when it is asked for: a run loads no other task.
_TASKS: dict[str, str | TaskSpec] = {
    "dual-encoder": "clipmill.train.tasks.dual_encoder.spec",
    "classify": "clipmill.train.tasks.classify.spec",
    "mae": "clipmill.train.tasks.mae.spec",
    "caption": "clipmill.train.tasks.caption.spec",
}
# Commands of tasks besides training, evaluations and export, by their import paths.
COMMANDS = {
    "caption-video": "clipmill.train.tasks.caption.videos.flags:caption_video",
    "caption-chunks": "clipmill.train.tasks.caption.chunks.flags:caption_chunks",
}
DEFAULT = "dual-encoder"  # the task of runs that do not name theirs


def register(task: TaskSpec) -> None:
    """Add a task; call it before `clipmill.train.cli` is imported, which lists the tasks.

    Raises:
        ValueError: the name is taken or not valid.
    """
    if task.name in _TASKS or re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", task.name) is None:
        raise ValueError(f"{task.name!r} is taken, or not a valid name of a task: lower-case letters, digits and -")
    _TASKS[task.name] = task


def task_names() -> tuple[str, ...]:
    """Names of all tasks."""
    return tuple(_TASKS)


def task_named(name: str) -> TaskSpec:
    """The task of a name that `task_names` has."""
    found = _TASKS[name]
    if isinstance(found, str):
        task: TaskSpec = importlib.import_module(found).TASK
        found = _TASKS[name] = task
    return found


def tasks_where(holds: Callable[[TaskSpec], bool] = lambda spec: True) -> Tasks:
    """The tasks of which something holds; all by default."""
    return {name: partial(task_named, name) for name in task_names() if holds(task_named(name))}


def evaluations() -> dict[str, EvaluationSpec]:
    """The evaluations of all tasks by name."""
    return {one.name: one for name in _TASKS for one in task_named(name).evaluations}


def evaluations_of(task: str) -> tuple[EvaluationSpec, ...]:
    """The evaluations of a task; all there are for a task that is not known here."""
    return tuple(task_named(task).evaluations if task in _TASKS else evaluations().values())
