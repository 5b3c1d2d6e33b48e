"""`train TASK`: the commands of the tasks. Training itself is loaded when one of them runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from train.commands.arguments import docstring
from train.registry import task_named, task_names
from train.run.folder import Resume


def training_command(name: str) -> Callable[..., None]:
    """The command of a task as cyclopts reads it: its flags are the fields of the task's settings."""
    spec = task_named(name)
    kind = spec.settings
    default = kind()

    def command(
        settings: kind = default,  # type: ignore[valid-type]
        *,
        preset: Annotated[str | None, Parameter(group="Where")] = None,
        config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
        resume: Annotated[Resume, Parameter(group="Where", negative="")] = False,
    ) -> None:
        from train.commands.launch import launch

        launch(spec, settings, resume=resume)

    command.__doc__ = docstring(
        spec.help,
        example=spec.example,
        preset="Settings by name; flags and --config override them.",
        config="YAML file of settings, keys spelled as the flags; a later file overrides an earlier one.",
        resume="Continue the run in --out from its latest checkpoint; auto: start a new run if there is none.",
    )
    return command


def __getattr__(name: str) -> Callable[..., None]:
    """The command of a task, by the import path under which `train.cli` knows it."""
    if (task := name.replace("_", "-")) in task_names():
        return training_command(task)
    raise AttributeError(name)
