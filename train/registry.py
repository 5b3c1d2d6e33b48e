"""The tasks that the commands know: one row each.

A task from outside of clipmill is a row too: a program of its own registers the task's spec and then becomes `train`.

    from train.registry import register
    from frame_order.task import TASK

    register(TASK)

    from train.cli import main

    main()
"""

import importlib
import re
from dataclasses import dataclass

from train.spec import EvaluationSpec, TaskSpec


@dataclass(frozen=True)
class _Row:
    """Where a spec is, which is loaded when it is asked for (a run loads no other task), and the command's summary."""

    module: str
    summary: str


_TASKS: dict[str, _Row | TaskSpec] = {
    "dual-encoder": _Row("train.tasks.dual_encoder.spec", "Train a CLIP-style dual encoder with a contrastive loss."),
    "classify": _Row("train.tasks.classify.spec", "Fine-tune a video tower to classify clips."),
    "mae": _Row("train.tasks.mae.spec", "Pre-train a video tower as a masked autoencoder (VideoMAE)."),
    "caption": _Row("train.tasks.caption.spec", "Train a captioner: a video tower and a GPT-2 that attends to it."),
}
# Commands of tasks besides training, evaluations and export.
COMMANDS = {"caption-video": _Row("train.tasks.caption.videos.flags:caption_video", "Caption video files.")}
DEFAULT = "dual-encoder"  # the task of runs that do not name theirs


def register(task: TaskSpec) -> None:
    """Adds a task; call it before `train.cli` is imported, which lists the tasks.

    Raises:
        ValueError: there is a task of that name, or the name is none.
    """
    if task.name in _TASKS or re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", task.name) is None:
        raise ValueError(f"{task.name!r} is taken, or is no name of a task: lower-case letters, digits and -")
    _TASKS[task.name] = task


def task_names() -> tuple[str, ...]:
    """Names of all tasks."""
    return tuple(_TASKS)


def task_named(name: str) -> TaskSpec:
    """The task of a name that `task_names` has."""
    found = _TASKS[name]
    if isinstance(found, _Row):
        task: TaskSpec = importlib.import_module(found.module).TASK
        found = _TASKS[name] = task
    return found


def summary_of(name: str) -> str:
    """One line about a task; it is not loaded for that."""
    found = _TASKS[name]
    return found.summary if isinstance(found, _Row) else found.help.partition("\n")[0]


def evaluations() -> dict[str, EvaluationSpec]:
    """The evaluations of all tasks by name."""
    return {one.name: one for name in _TASKS for one in task_named(name).evaluations}


def evaluations_of(task: str) -> tuple[EvaluationSpec, ...]:
    """The evaluations of a task; all there are for a task that is not known here."""
    return tuple(task_named(task).evaluations if task in _TASKS else evaluations().values())
