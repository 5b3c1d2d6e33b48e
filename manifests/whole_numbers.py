"""Validation shared by both command lines: values of integer flags are never rounded."""

from collections.abc import Iterable
from typing import Any

from clipmill.manifests.errors import UserError


def refuse_fractions(_app: Any, _commands: tuple[str, ...], arguments: Iterable[Any]) -> None:
    """A cyclopts `config` that raises a UserError if an integer flag is given a fraction, instead of rounding it.

    Args:
        arguments: cyclopts' argument collection, with values from flags and configuration files.
    """
    for argument in arguments:
        if argument.hint not in (int, int | None):
            continue
        for token in argument.tokens:
            value = str(token.value)
            # Without a decimal point, cyclopts itself reports invalid integers.
            if "." in value:
                raise UserError(f"{argument.name} is {value}", hint="give a whole number, without a decimal point")
