"""A check of flags: one that has no effect beside the others is refused, so that nobody waits for what it cannot do."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import UserError
from train.config.training import TrainingSettings, flat
from train.tasks.caption.settings import has_captioner

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection
from train.config.files import preset_path, read_values, yaml_source
from train.run.folder import RunFolder

# A flag, the one that it goes with, and the values of that one with which it has no effect.
_GOES_WITH: dict[str, tuple[str, tuple[object, ...]]] = {
    "--stride": ("--sampling", ("uniform", "lavila")),
    "--min-crop-area": ("--crop", ("multi-scale", "centre")),
    "--decoder-mask-ratio": ("--decoder-mask", ("none",)),
    "--towers.temporal": ("--towers.kind", ("videomae",)),
    "--augment.rand-magnitude": ("--augment.rand-ops", (0,)),
    "--augment.rand-std": ("--augment.rand-ops", (0,)),
}
# What takes effect with it, as the hints have it.
_EFFECTIVE = {
    "--sampling": "--sampling stride",
    "--crop": "--crop random",
    "--decoder-mask": "--decoder-mask random or running-cell",
    "--towers.kind": "--towers.kind clip",
    "--augment.rand-ops": "--augment.rand-ops 1 or more",
    "--evaluate.every": "--evaluate.every STEPS",
}
# About a decoder, or a tokenizer, that is made anew, and what there must not be beside it.
_OF_WHAT_IS_NEW = {
    "--decoder.name": ("--decoder.weights",),
    "--decoder.vocabulary": ("--decoder.weights", "--decoder.tokenizer"),
}
# These look at the split without an evaluation in the loop: for its classes, and for pictures at the end.
_READ_THE_SPLIT = ("classify", "mae")


def refuse_idle_flags(_app: Any, commands: tuple[str, ...], arguments: Iterable[Any]) -> None:
    """A cyclopts `config`: raises a UserError where a flag was given a value that cannot have an effect.

    Those of files are let pass: a preset or the settings of a run may well say more than what the flags beside them
    leave in effect. So are flags that say what holds anyway.

    Args:
        arguments: cyclopts' collection, with flags and what configuration files gave.
    """
    found = {argument.name: argument for argument in arguments}
    for name, argument in found.items():
        if name in _OF_WHAT_IS_NEW:
            _refuse_of_what_is_new(name, found)
        other, idle = _goes_with(name, commands[-1] if commands else "")
        if other not in found or not any(token.source == "cli" for token in argument.tokens):
            continue
        value, beside = _value(argument), _value(found[other])
        if value != argument.field_info.default and beside in idle:
            raise UserError(
                f"{name} is {_words(argument)}, which has no effect: {other} is {beside}",
                hint=f"leave it out, or use {_EFFECTIVE[other]}",
            )


def _refuse_of_what_is_new(name: str, found: dict[str, Any]) -> None:
    if not any(token.source == "cli" for token in found[name].tokens):
        return
    # The settings of a run say of each flag that it was left out.
    beside = [other for other in _OF_WHAT_IS_NEW[name] if _words(found[other])]
    start = _words(found["--init.weights"])
    if start and has_captioner(Path(start)):
        beside = ["--init.weights", *beside]
    if beside:
        raise UserError(
            f"{name} is {_words(found[name])}, which has no effect: {beside[0]} is {_words(found[beside[0]])}, "
            "which has its own",
            hint="leave it out",
        )


def _words(argument: Any) -> str:
    return " ".join(str(token.value) for token in argument.tokens)


def _goes_with(name: str, command: str) -> tuple[str, tuple[object, ...]]:
    is_of_evaluation = name.startswith("--evaluate.") and name != "--evaluate.every"
    if is_of_evaluation and not (name == "--evaluate.split" and command in _READ_THE_SPLIT):
        return "--evaluate.every", (0,)
    if name == "--towers.temporal" and command == "mae":
        return "", ()  # which has no other kind of tower, and says so
    return _GOES_WITH.get(name, ("", ()))


def _value(argument: Any) -> object:
    """The value that takes effect; words where cyclopts is still to say that they are none."""
    default, words = argument.field_info.default, [str(token.value) for token in argument.tokens]
    if not words:
        return default
    if isinstance(default, tuple):
        return tuple(words)
    try:
        return type(default)(words[-1]) if isinstance(default, (int, float)) else words[-1]
    except ValueError:
        return words[-1]


# Settings from files, for flags that nobody gave.

_FLAG = re.compile(r"--[a-z][a-z0-9.-]*[a-z0-9]")


def add_files(app: "App", commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Fills in what no flag has set; cyclopts calls it for each command.

    The values come from the `--config` files and the `--preset`, with `--resume` from the run itself, and with
    `--resume auto` from all of them.
    """

    def given(name: str) -> list[str]:
        return [token.value for argument in arguments if argument.name == name for token in argument.tokens]

    def fill(path: Path) -> None:
        yaml_source(path)(app, commands, arguments)

    resume = given("--resume")
    is_automatic = resume[-1:] == ["auto"]
    if resume and not is_automatic:
        for name in ("--config", "--preset"):
            if given(name):
                raise UserError(
                    f"{name} does not go with --resume",
                    hint="the run's own settings count; leave it out, or use --resume auto",
                )
    # A source fills only what is still empty: the strongest comes first.
    for file in reversed(given("--config")):
        fill(Path(file))
    for preset in given("--preset"):
        fill(preset_path(preset, commands[-1]))
    if resume:
        out = Path(given("--out")[0]) if given("--out") else TrainingSettings.out
        # Where there is no run, a new one begins, or opening it says so.
        if (saved := RunFolder(out).settings).is_file():
            RunFolder(out).require_task(commands[-1])
            fill(saved)


def hint_with_files(error: UserError, words: Sequence[str]) -> str | None:
    """The hint of a mistake, with the flags that its message names and that nobody typed: a preset or file has them.

    Args:
        words: of the command line.
    """
    typed = {word.partition("=")[0] for word in words}
    untyped = [flag for flag in dict.fromkeys(_FLAG.findall(str(error))) if flag not in typed]
    said = [] if error.hint is None else [error.hint]
    try:
        sources = {str(file): Path(file) for file in reversed(_values_of("--config", words))}
        sources |= {f"preset {name}": preset_path(name, words[0]) for name in _values_of("--preset", words)}
        for flag in untyped:
            having = [name for name, path in sources.items() if flag in _flags_of(path)]
            said += [f"{flag} is from {having[0]}"] if having else []
    except UserError:
        pass  # a file that cannot be read, which is the mistake itself
    return "; ".join(said) or None


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    following = [after for word, after in pairwise(words) if word == flag]
    return following + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _flags_of(path: Path) -> set[str]:
    return {
        f"--{name.replace('_', '-')}" for name in flat({str(key): value for key, value in read_values(path).items()})
    }


def docstring(help_text: str, *, example: str, **parameters: str) -> str:
    """The docstring of a command that is made from a spec, as cyclopts reads it."""
    lines = [help_text, "", "Example:", "", f"    {example}", "", "Parameters", "----------"]
    return "\n".join([*lines, *(line for name, text in parameters.items() for line in (name, f"    {text}"))])
