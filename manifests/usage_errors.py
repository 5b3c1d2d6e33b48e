"""Convert cyclopts' errors about command lines and settings files into user errors, for `prep` and `train`."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import on_one_line

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError, UnknownOptionError

_VALUES_ONLY = "--"
_SIZES = ("short-side", "size-px", "size")
# Flags in clipmill by the name of the setting in other programs. The first flag that the command accepts is suggested.
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
_CUTOFF = 0.7  # minimum similarity for difflib; with its default of 0.6, --resolution resembles --threshold
_UNITS = {
    "microbatch": "--microbatch is the number of samples that a process computes at once; --batch stays the same",
    "steps": "--steps is the number of optimizer steps: epochs x samples / --batch",
}
_KEY_PART = re.compile(r"\[([^\[\]]*)\]")  # a key in a file has the form [loss][kind]


def usage_error(error: "CycloptsError", app: "App", words: Sequence[str]) -> UserError:
    """Return the error for a command line that cyclopts rejects; the hint contains the command's --help.

    Args:
        words: Words of the command line.
    """
    commands, apps, _ = app.parse_commands(words)
    command = " ".join([app.name[0], *commands])
    misspelled = getattr(error, "unused_tokens", None) or [""]  # perhaps the misspelled name of a command
    matches = get_close_matches(misspelled[0], list(apps[-1]), n=1, cutoff=_CUTOFF)
    message = re.sub(r"(?<!\.)\.$", "", usage_message(error))
    if matches and "Did you mean" not in message:  # cyclopts may already suggest a command
        message += f". Did you mean {matches[0]}?"
    return UserError(message, hint="; ".join([*_hints(error, command, words), f"see {command} --help"]))


def usage_message(error: "CycloptsError") -> str:
    """Return the description of a mistake, on one line."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        several = "s" if len(error.unused_tokens) > 1 else ""
        return f"unexpected argument{several}: {on_one_line(', '.join(error.unused_tokens))}"
    if isinstance(error, UnknownOptionError):
        flag, word = _suggest_flag(error), _word(error)
        if error.token.source != "cli":  # a key in a file
            matches = [flag] if flag else get_close_matches(word.replace("_", "-"), _flags(error), n=1)
            question = f"; did you mean {matches[0]}?" if matches else ""
            return f"unknown key {on_one_line(word)} in {error.token.source}{question}"
        matches = [flag] if flag else get_close_matches(_flag_word(error), _flags(error), n=1, cutoff=_CUTOFF)
        return f"unknown option: {on_one_line(word)}" + (f". Did you mean --{matches[0]}?" if matches else "")
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        name = error.argument.name
        return f"{name.lstrip('-').upper() if error.argument.index is not None else name} is required"
    message = " ".join(str(error).split())
    return message[:1].lower() + message[1:]


def _suggest_flag(error: "UnknownOptionError") -> str | None:
    """Return the flag, without dashes, that other programs call by the unknown name; None if there is none."""
    flags = _flags(error)
    return next((flag for flag in _FOREIGN_NAMES.get(_flag_word(error), ()) if flag in flags), None)


def _flag_word(error: "UnknownOptionError") -> str:
    return _word(error).partition("=")[0].lstrip("-").replace("_", "-")


def _flags(error: "UnknownOptionError") -> list[str]:
    names = (name for argument in error.argument_collection if argument.parse for name in argument.names)
    return [name.lstrip("-") for name in names]


def _word(error: "UnknownOptionError") -> str:
    """Return the unknown option as the user typed it, or the unknown key in a file."""
    word = error.token.keyword or error.token.value
    return ".".join(_KEY_PART.findall(word)) or word


def _hints(error: "CycloptsError", command: str, words: Sequence[str]) -> Iterator[str]:
    """Yield hints about units of flags, values that begin with a dash, and patterns that the shell has expanded."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        word = _word(error)
        if flag := _suggest_flag(error):
            yield from filter(None, [_UNITS.get(flag)])
        elif _VALUES_ONLY in words and word in words[words.index(_VALUES_ONLY) :]:
            yield f"words after {_VALUES_ONLY} are values: put the flags before it"
        elif _is_dashed(word):
            yield f"put a value that begins with - after all flags and --, as in {command} ... -- {word}"
    elif isinstance(error, UnusedCliTokensError) and error.unused_tokens and "/" in error.unused_tokens[0]:
        yield "if you used a pattern, such as DIR/*, quote it, because the shell expands an unquoted pattern"
    elif isinstance(error, MissingArgumentError) and error.argument is not None:
        for flag, word in pairwise(words):
            if flag in error.argument.names and _is_dashed(word):
                yield f"pass a value that begins with - with =, as in {flag}={word}"


def _is_dashed(word: str) -> bool:
    return re.fullmatch(r"-[^-].+", word) is not None
