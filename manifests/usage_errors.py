"""Mistakes in command lines and files of settings as both programs report them: cyclopts' errors as user errors."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import on_one_line

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError, UnknownOptionError

_VALUES_ONLY = "--"
_KEY_PART = re.compile(r"\[([^\[\]]*)\]")  # a key of a file is [loss][kind]


def usage_error(error: "CycloptsError", app: "App", words: Sequence[str]) -> UserError:
    """Return the error for a command line that cyclopts refuses; the hint names the help of its command.

    Args:
        words: the command line.
    """
    commands, _, _ = app.parse_commands(words)
    command = " ".join([app.name[0], *commands])
    return UserError(usage_message(error), hint="; ".join([*_hints(error, command, words), f"see {command} --help"]))


def usage_message(error: "CycloptsError") -> str:
    """Return what is wrong, on one line."""
    from cyclopts import UnknownOptionError, UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        several = "s" if len(error.unused_tokens) > 1 else ""
        return f"unexpected argument{several}: {on_one_line(', '.join(error.unused_tokens))}"
    if isinstance(error, UnknownOptionError) and error.token.source != "cli":
        return _unknown_key(error)
    message = " ".join(str(error).split())
    return message[:1].lower() + message[1:]


def _unknown_key(error: "UnknownOptionError") -> str:
    """Return the message for a key of a file that is not a setting, with the one that is most like it."""
    key = ".".join(_KEY_PART.findall(error.token.keyword or "")) or str(error.token.keyword)
    flags = (name for argument in error.argument_collection if argument.parse for name in argument.names)
    near = get_close_matches(key.replace("_", "-"), [flag.lstrip("-") for flag in flags], n=1)
    return f"unknown key {on_one_line(key)} in {error.token.source}" + (f"; did you mean {near[0]}?" if near else "")


def _hints(error: "CycloptsError", command: str, words: Sequence[str]) -> Iterator[str]:
    """Yield how to give a value that begins with a dash, which looks like a flag, if this may be the mistake."""
    from cyclopts import MissingArgumentError, UnknownOptionError

    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        word = error.token.keyword or error.token.value
        if _VALUES_ONLY in words and word in words[words.index(_VALUES_ONLY) :]:
            yield f"words after {_VALUES_ONLY} are values: put the flags before it"
        elif _is_dashed(word):
            yield f"a value that begins with - is given after --, behind all flags: {command} ... -- {word}"
    elif isinstance(error, MissingArgumentError) and error.argument is not None:
        for flag, word in pairwise(words):
            if flag in error.argument.names and _is_dashed(word):
                yield f"a value that begins with - is given with =: {flag}={word}"


def _is_dashed(word: str) -> bool:
    return re.fullmatch(r"-[^-].+", word) is not None
