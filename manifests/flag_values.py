"""Validation shared by both command lines: integers are never rounded, addresses never taken for local paths, and
groups of flags have no values."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from cyclopts import Group

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote

OPTIONS = Group("Options", sort_key=9)  # of flags without another group


def check_values(_app: Any, _commands: tuple[str, ...], arguments: Iterable[Any]) -> None:
    """A cyclopts `config` for what conversion would hide.

    Args:
        arguments: cyclopts' argument collection, with values from flags and configuration files.

    Raises:
        UserError: an integer flag is given a fraction, or a flag of local paths an address, of which `Path` would make
            a local folder such as `s3:`; or the name of a group is given a value, which its first flag would take.
    """
    for argument in arguments:
        values = [str(token.value) for token in argument.tokens]
        # A file whose group is empty gives it an empty value.
        if argument.children and any(values):
            raise UserError(
                f"{argument.name} is {values[0]}, and it is a group of flags, which takes no value",
                hint=f"give a value to one of its flags, such as {argument.children[0].name}",
                flags=(argument.name,),
            )
        # Without a decimal point, cyclopts itself reports invalid integers.
        if argument.hint in (int, int | None) and (fractions := [value for value in values if "." in value]):
            raise UserError(
                f"{argument.name} is {fractions[0]}",
                hint="give a whole number, without a decimal point",
                flags=(argument.name,),
            )
        is_path = Path in (argument.hint, *get_args(argument.hint)) and argument.parameter.converter is None
        if is_path and (addresses := [value for value in values if is_remote(value)]):
            raise UserError(
                f"{argument.name} is {addresses[0]}, and takes a local path",
                hint="give a local path, and copy the files from or to that address",
                flags=(argument.name,),
            )
