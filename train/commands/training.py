"""`train TASK`: the commands of the tasks. Training itself is loaded when one of them runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from train.commands.arguments import docstring
from train.config import groups
from train.config.groups import FIRST_RUN
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
        preset: Annotated[str | None, groups.WHERE, FIRST_RUN] = None,
        config: Annotated[list[Path] | None, groups.WHERE, FIRST_RUN, Parameter(negative="")] = None,
        resume: Annotated[
            Resume,
            groups.WHERE,
            FIRST_RUN,
            Parameter(negative="", metavar="[auto]", show_choices=False, show_default=False),
        ] = False,
    ) -> None:
        from train.commands.launch import launch

        launch(spec, settings, resume=resume)

    command.__doc__ = docstring(
        spec.help,
        example=spec.example,
        preset="Named settings, listed below. Flags and --config files override them.",
        config="YAML file of settings. Keys are spelled as the flags; later files override earlier ones.",
        resume="Resume the run in --out from its latest checkpoint. auto: start a new run if there is none.",
    )
    return command


def __getattr__(name: str) -> Callable[..., None]:
    """The command of a task, by the import path under which `train.cli` knows it."""
    if (task := name.replace("_", "-")) in task_names():
        return training_command(task)
    raise AttributeError(name)
