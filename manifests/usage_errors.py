"""Convert cyclopts's errors about command lines and settings files to user errors, for `prep` and `train`."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError, UnknownOptionError

_END_OF_FLAGS = "--"  # argument after which all other arguments are values
_SIZES = ("short-side", "size-px", "size")
# Names of settings in other programs, and the corresponding flags of clipmill. The error suggests the first of these
# flags that the command accepts.
_FOREIGN_NAMES: dict[str, tuple[str, ...]] = {
    "accum-freq": ("microbatch",),
    "batch-size": ("batch",),
    "chunk-len": ("len",),
    "chunk-length": ("len",),
    "chunk-size": ("len",),
    "clip-length": ("len",),
    "data": ("shards",),
    "data-path": ("shards",),
    "duration": ("len",),
    "epochs": ("steps",),
    "frame-rate": ("fps",),
    "framerate": ("fps",),
    "gradient-accumulation-steps": ("microbatch",),
    "height": _SIZES,
    "image-size": _SIZES,
    "img-size": _SIZES,
    "input-size": _SIZES,
    "learning-rate": ("lr",),
    "max-steps": ("steps",),
    "num-epochs": ("steps",),
    "num-processes": ("workers",),
    "num-train-epochs": ("steps",),
    "num-workers": ("workers",),
    "output": ("out",),
    "output-dir": ("out",),
    "per-device-train-batch-size": ("batch",),
    "pretrained": ("init.weights",),
    "quality": ("crf",),
    "resolution": _SIZES,
    "train-data": ("shards",),
    "video-bitrate": ("bitrate",),
    "warmup": ("warmup-steps",),
    "wd": ("weight-decay",),
    "width": _SIZES,
}
_MIN_SIMILARITY = 0.7  # for difflib, whose default of 0.6 would suggest --threshold for --resolution
# Explanation of a flag whose unit differs from the unit in other programs.
_UNITS = {
    "microbatch": "--microbatch is the number of samples that a process computes at once; --batch stays the same",
    "steps": "--steps is the number of optimizer steps: epochs x samples / --batch",
}
_KEY_PART = re.compile(r"\[([^\[\]]*)\]")  # cyclopts writes a nested key of a file as [loss][kind]


def usage_error(error: "CycloptsError", app: "App", arguments: Sequence[str]) -> UserError:
    """Convert cyclopts's error about a command line to a user error with a hint that refers to the command's --help.

    Args:
        arguments: Arguments on the command line, without the name of the program.
    """
    commands, apps, _ = app.parse_commands(arguments)
    command = " ".join([app.name[0], *commands])
    unused_tokens = getattr(error, "unused_tokens", None) or [""]  # the first may be the misspelled name of a command
    matches = get_close_matches(unused_tokens[0], list(apps[-1]), n=1, cutoff=_MIN_SIMILARITY)
    message = re.sub(r"(?<!\.)\.$", "", usage_message(error))
    if matches and "Did you mean" not in message:  # cyclopts may have suggested a command itself
        message += f". Did you mean {matches[0]}?"
    return UserError(message, hint="; ".join([*_hints(error, command, arguments), f"see {command} --help"]))


def usage_message(error: "CycloptsError") -> str:
    """Describe a mistake in a command line or a settings file, on one line."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        plural = "s" if len(error.unused_tokens) > 1 else ""
        return f"unexpected argument{plural}: {on_one_line(', '.join(error.unused_tokens))}"
    if isinstance(error, UnknownOptionError):
        flag, option = _suggest_flag(error), _unknown_option(error)
        if error.token.source != "cli":  # a key in a file
            matches = [flag] if flag else get_close_matches(option.replace("_", "-"), _flags(error), n=1)
            question = f"; did you mean {matches[0]}?" if matches else ""
            return f"unknown key {on_one_line(option)} in {error.token.source}{question}"
        name = _unknown_name(error)
        matches = [flag] if flag else get_close_matches(name, _flags(error), n=1, cutoff=_MIN_SIMILARITY)
        return f"unknown option: {on_one_line(option)}" + (f". Did you mean --{matches[0]}?" if matches else "")
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        name = error.argument.name
        return f"{name.lstrip('-').upper() if error.argument.index is not None else name} is required"
    message = " ".join(str(error).split())
    return message[:1].lower() + message[1:]


def _suggest_flag(error: "UnknownOptionError") -> str | None:
    """Return the flag (without dashes) for an unknown name that other programs use, or None."""
    flags = _flags(error)
    return next((flag for flag in _FOREIGN_NAMES.get(_unknown_name(error), ()) if flag in flags), None)


def _unknown_name(error: "UnknownOptionError") -> str:
    return _unknown_option(error).partition("=")[0].lstrip("-").replace("_", "-")


def _flags(error: "UnknownOptionError") -> list[str]:
    names = (name for argument in error.argument_collection if argument.parse for name in argument.names)
    return [name.lstrip("-") for name in names]


def _unknown_option(error: "UnknownOptionError") -> str:
    """Return the unknown option as the user typed it, or the unknown key in a file in the form `loss.kind`."""
    option = error.token.keyword or error.token.value
    return ".".join(_KEY_PART.findall(option)) or option


def _hints(error: "CycloptsError", command: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield hints about units, flags after `--`, values that begin with a dash, and patterns that a shell expands."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        option = _unknown_option(error)
        if flag := _suggest_flag(error):
            yield from filter(None, [_UNITS.get(flag)])
        elif _END_OF_FLAGS in arguments and option in arguments[arguments.index(_END_OF_FLAGS) :]:
            yield f"put the flags before {_END_OF_FLAGS}, because all arguments after it are values"
        elif _begins_with_dash(option):
            yield f"put a value that begins with - after all flags and --, as in {command} ... -- {option}"
    elif isinstance(error, UnusedCliTokensError) and error.unused_tokens and "/" in error.unused_tokens[0]:
        yield "if you used a pattern, such as DIR/*, quote it, because the shell expands an unquoted pattern"
    elif isinstance(error, MissingArgumentError) and error.argument is not None:
        for flag, value in pairwise(arguments):
            if flag in error.argument.names and _begins_with_dash(value):
                yield f"use = to pass a value that begins with -, as in {flag}={value}"


def _begins_with_dash(argument: str) -> bool:
    return re.fullmatch(r"-[^-].+", argument) is not None
