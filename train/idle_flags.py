"""A check of flags: one that has no effect beside the others is refused, so that nobody waits for what it cannot do."""

from collections.abc import Iterable
from typing import Any

from manifests.errors import UserError

# A flag, the one that it goes with, and the values of that one with which it has no effect.
_GOES_WITH: dict[str, tuple[str, tuple[object, ...]]] = {
    "--stride": ("--sampling", ("uniform", "lavila")),
    "--min-crop-area": ("--crop", ("multi-scale", "centre")),
    "--decoder-mask-ratio": ("--decoder-mask", ("none",)),
    "--augment.rand-magnitude": ("--augment.rand-ops", (0,)),
    "--augment.rand-std": ("--augment.rand-ops", (0,)),
}
# What takes effect with it, as the hints have it.
_EFFECTIVE = {
    "--sampling": "--sampling stride",
    "--crop": "--crop random",
    "--decoder-mask": "--decoder-mask random or running-cell",
    "--augment.rand-ops": "--augment.rand-ops 1 or more",
    "--evaluate.every": "--evaluate.every STEPS",
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
        other, idle = _goes_with(name, commands[-1] if commands else "")
        if other not in found or not any(token.source == "cli" for token in argument.tokens):
            continue
        value, beside = _value(argument), _value(found[other])
        if value != argument.field_info.default and beside in idle:
            given = " ".join(str(token.value) for token in argument.tokens)
            raise UserError(
                f"{name} is {given}, which has no effect: {other} is {beside}",
                hint=f"leave it out, or use {_EFFECTIVE[other]}",
            )


def _goes_with(name: str, command: str) -> tuple[str, tuple[object, ...]]:
    is_of_evaluation = name.startswith("--evaluate.") and name != "--evaluate.every"
    if is_of_evaluation and not (name == "--evaluate.split" and command in _READ_THE_SPLIT):
        return "--evaluate.every", (0,)
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
