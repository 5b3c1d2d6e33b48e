"""Registry of tasks: a row for each task of clipmill, and the tasks of installed packages (docs/plugins.md)."""

from collections.abc import Callable
from functools import partial

from clipmill.manifests.plugins import Parts
from clipmill.train.spec import EvaluationSpec, Tasks, TaskSpec

# Import paths of the commands that tasks provide in addition to training, evaluation and export.
COMMANDS = {
    "caption-video": "clipmill.train.tasks.caption.commands:caption_video",
    "caption-chunks": "clipmill.train.tasks.caption.commands:caption_chunks",
}
# Import paths of the specs of tasks. A spec is imported on request, so a run imports only its own task.
TASKS = Parts(
    "task",
    group="tasks",
    kind=TaskSpec,
    builtin={
        "dual-encoder": "clipmill.train.tasks.dual_encoder.spec:TASK",
        "classify": "clipmill.train.tasks.classify.spec:TASK",
        "mae": "clipmill.train.tasks.mae.spec:TASK",
        "caption": "clipmill.train.tasks.caption.spec:TASK",
    },
    reserved_names=(*COMMANDS, "bench", "doctor", "embed", "eval", "export", "overview", "quickstart", "search"),
)
DEFAULT = "dual-encoder"  # task of `train bench`, and of a run whose run.json does not contain a task


def task_names() -> tuple[str, ...]:
    """Return the names of all tasks."""
    return tuple(TASKS)


def tasks() -> tuple[TaskSpec, ...]:
    """Return all tasks whose packages can be imported. The others are reported on standard error."""
    return tuple(TASKS.list_usable())


def find_task(name: str) -> TaskSpec:
    """Return the task with a name from `task_names`.

    Raises:
        UnusablePart: The package of the task cannot be imported, or its task is invalid.
    """
    return TASKS[name]


def tasks_where(condition: Callable[[TaskSpec], bool] = lambda spec: True) -> Tasks:
    """Return the import functions of the tasks that meet a condition (default: all tasks), keyed by task name."""
    return {task.name: partial(find_task, task.name) for task in tasks() if condition(task)}


def evaluations() -> dict[str, EvaluationSpec]:
    """Return the evaluations of all tasks, keyed by name."""
    return {evaluation.name: evaluation for task in tasks() for evaluation in task.evaluations}


def evaluations_of(task: str) -> tuple[EvaluationSpec, ...]:
    """Return the evaluations of a task. If the task is unknown, return the evaluations of all tasks."""
    return tuple(find_task(task).evaluations if task in TASKS else evaluations().values())
