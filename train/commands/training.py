"""The commands `train TASK`. The training code is loaded only when a command runs."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.help_text import check_values
from clipmill.manifests.monitoring import Monitoring
from clipmill.manifests.progress import Activity
from clipmill.manifests.settings import Checked, deferred_checks, flags_without_effect, mistakes, raise_mistakes
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.fields import FIRST_RUN, unknown_parts
from clipmill.train.config.files import RENAMED_PRESETS, Provenance, load_settings, preset_path, presets_of, yaml_source
from clipmill.train.config.shards import local_folder, require_paths
from clipmill.train.config.training import TrainingSettings
from clipmill.train.registry import DEFAULT, find_task, task_names
from clipmill.train.run.environment import require_parts
from clipmill.train.run.folder import Resume, RunFolder

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection

# Flags that do not affect the run; its record omits them.
_UNRECORDED_FLAGS = frozenset({"--resume", "--json", *map(Monitoring.flag, ("metrics_port", "log_format"))})


def parse(app: "App", strings: Sequence[str], provenance: Provenance | None = None) -> Callable[[], object]:
    """Parse a command line, check all settings together, and return a function that runs the command.

    Args:
        strings: Command line without the name of the program.
        provenance: Record of the source of each value; it is filled in even if this function raises.

    Raises:
        UserError: Settings are invalid, or flags have no effect in combination; the error lists all mistakes.
        CycloptsError: A flag is unknown or missing, or its value has the wrong type.
    """
    typed_values: dict[str, str] = {}
    record = provenance or Provenance()

    def fill(app: "App", commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
        values = {argument.name: argument.tokens[-1].value for argument in arguments if argument.tokens}
        if is_remote(values.get("--out", "")) and "--resume" not in {argument.name for argument in arguments}:
            raise UserError(
                f"--out {values['--out']} is a URL, but this command writes to a disk",
                hint="use a path, and copy the files afterwards",
                flags=("--out",),
            )
        add_files(app, commands, arguments, remarks=record.remarks)
        for argument in arguments:
            if not argument.tokens:
                continue
            source = argument.tokens[-1].source
            if argument.name not in _UNRECORDED_FLAGS:
                record.sources[argument.name] = "" if source == "cli" else source
            if source == "cli":
                typed_values[argument.name] = " ".join(str(token.value) for token in argument.tokens)

    app.config = (fill, check_values)
    with deferred_checks():
        command, bound, unparsed_parameters = app.parse_args(strings)
    errors: list[UserError] = []
    for settings in bound.arguments.values():
        if isinstance(settings, Checked):
            errors += flags_without_effect(settings, typed_values)
            errors += [*mistakes(settings), *unknown_parts(settings)]
    raise_mistakes(errors)
    # Commands that print or save the source of each value have this parameter.
    keywords = {"provenance": record} if "provenance" in unparsed_parameters else {}
    return lambda: command(*bound.args, **bound.kwargs, **keywords)


def add_files(app: "App", commands: tuple[str, ...], arguments: "ArgumentCollection", *, remarks: list[str]) -> None:
    """Set the values of missing flags from the `--config` files, the `--preset` and, with `--resume`, the run.

    Args:
        remarks: List to extend with remarks about values that depend on other settings.

    Raises:
        UserError: A file or preset is invalid, or the run in --out belongs to another task or has a different number of
            data folders.
    """
    tokens = {argument.name: argument.tokens for argument in arguments}
    if "--config" not in tokens:
        return  # a command without training settings, such as train quickstart, whose --preset is only a name

    def values_of(name: str) -> list[str]:
        return [token.value for token in tokens.get(name, ())]

    kind = _settings_of(commands[-1])

    def fill(path: Path, preset: str | None = None) -> None:
        yaml_source(path, kind, preset=preset, remarks=remarks)(app, commands, arguments)

    # A source fills in only missing values, so sources are read in order of decreasing precedence.
    for file in reversed(values_of("--config")):
        fill(Path(file))
    for preset in values_of("--preset"):
        fill(_preset_of(preset, commands[-1]), preset)
    if values_of("--resume"):
        out = local_folder(values_of("--out")[0]) if values_of("--out") else TrainingSettings.out
        # If --out does not hold a run, a new run starts, or opening the run raises an error.
        if (saved_settings := RunFolder(out).settings).is_file():
            RunFolder(out).require_task(commands[-1])
            old_settings = load_settings(saved_settings, find_task(commands[-1]).settings)
            require_parts(old_settings, RunFolder(out))
            # Report a different number of folders first. Otherwise the errors would be about flags that depend on the
            # number, such as --mix and names of metrics.
            folders = values_of("--shards")
            if folders and len(folders) != len(old_settings.folders) and any(RunFolder(out).checkpoints.glob("step_*")):
                raise UserError(
                    f"--shards lists {count_noun(len(folders), 'data folder')}, but the run in {out} has "
                    f"{len(old_settings.folders)}: {', '.join(old_settings.folders)}",
                    hint="list all these folders or omit --shards to continue, or use a different --out for a new run",
                    flags=("--shards",),
                )
            fill(saved_settings)


def _preset_of(name: str, command: str) -> Path:
    """Return the path of a preset; UserError if the command has no such preset."""
    kind = _settings_of(command)
    paths = {preset: preset_path(preset, kind.command) for preset in presets_of(kind)}
    hint = f"use a preset of train {command}: {', '.join(paths)}"
    try:
        path = preset_path(name, command)
    except UserError as error:
        raise UserError(
            str(error), hint=error.hint if RENAMED_PRESETS.get(name) in paths else hint, flags=error.flags
        ) from error
    if path not in paths.values():
        raise UserError(f"{name!r} is not a preset of train {command}", hint=hint)
    return path


def _settings_of(command: str) -> type[TrainingSettings]:
    """Return the settings class of `train TASK`, `train bench TASK` or `train bench`."""
    return find_task(command if command in task_names() else DEFAULT).settings


def docstring(help_text: str, *, example: str, **parameters: str) -> str:
    """Return the docstring of a command that is built from a spec, in the format that cyclopts reads."""
    lines = [help_text, "", "Example:", "", f"    {example}", "", "Parameters", "----------"]
    return "\n".join([*lines, *(line for name, text in parameters.items() for line in (name, f"    {text}"))])


def training_command(name: str) -> Callable[..., None]:
    """Return the cyclopts command of a task. The fields of the task's settings are the flags."""
    spec = find_task(name)
    kind = spec.settings
    default = kind()

    def command(
        settings: kind = default,  # type: ignore[valid-type]
        *,
        preset: Annotated[str | None, groups.WHERE, FIRST_RUN] = None,
        config: Annotated[list[Path] | None, groups.WHERE, FIRST_RUN, Parameter(negative="")] = None,
        resume: Annotated[Resume, groups.WHERE, FIRST_RUN, Parameter(negative="")] = False,
        monitoring: Annotated[Monitoring, Parameter(name="*")] = Monitoring(),  # noqa: B008 - frozen
        as_json: Annotated[bool, groups.WHERE, Parameter(name="--json", negative="")] = False,
        provenance: Annotated[Provenance | None, Parameter(parse=False)] = None,
    ) -> None:
        if not resume:
            clips: ClipSettings = settings
            require_paths(shards=clips.folders, init=clips.init.sources)
        with monitoring.begin(), ExitStack() as streams:
            if as_json or monitoring.log_format == "json":
                streams.enter_context(redirect_stdout(sys.stderr))
            with Activity("importing torch"):
                from clipmill.train.commands.launch import launch

            summary = launch(spec, settings, resume=resume, provenance=provenance or Provenance())
        if as_json and summary is not None:
            print(json.dumps(summary, indent=1))

    command.__doc__ = docstring(
        spec.help,
        example=spec.example,
        preset="Named settings, listed below. Flags and --config files override them.",
        config="YAML file of settings. Keys are spelled like the flags; later files override earlier files.",
        resume="Resume the run in --out from its latest checkpoint. auto: start a new run if --out contains no run.",
        as_json="Print a summary of the finished run as one JSON object; the log goes to standard error.",
    )
    return command


def __getattr__(name: str) -> Callable[..., None]:
    """Return the command of a task; `clipmill.train.cli` registers each task by its import path in this module."""
    if (task := name.replace("_", "-")) in task_names():
        return training_command(task)
    raise AttributeError(name)
