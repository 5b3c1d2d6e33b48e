"""A check of flags that both command lines make: a whole number is never rounded from something else."""

from collections.abc import Iterable
from typing import Any

from manifests.errors import UserError


def refuse_fractions(_app: Any, _commands: tuple[str, ...], arguments: Iterable[Any]) -> None:
    """A cyclopts `config`: raises a UserError where a flag of whole numbers was given a fraction, in place of rounding.

    Args:
        arguments: cyclopts' collection, with flags and what configuration files gave.
    """
    for argument in arguments:
        if argument.hint not in (int, int | None):
            continue
        for token in argument.tokens:
            value = str(token.value)
            # Without a point, cyclopts itself says what is no whole number.
            if "." in value:
                raise UserError(f"{argument.name} is {value}", hint="it must be a whole number, without a point")
