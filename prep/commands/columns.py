"""`prep NAME` and `prep plan NAME` of the columns, by import path, so that a column is loaded when it is asked for.

This module has `make_NAME` and `plan_NAME`, the functions behind the commands of a column, and `plan`: `prep plan`.
"""

from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import App, Parameter

from clipmill.manifests.help_text import OPTIONS
from clipmill.manifests.plugins import UnusablePart
from clipmill.prep.core.make import make_command, plan_command
from clipmill.prep.registry import COLUMNS, column_named


def __getattr__(name: str) -> Any:
    """Return what this module has at an import path."""
    if name == "plan":
        return _plan_app()
    verb, _, column = name.partition("_")
    if verb not in ("make", "plan") or column not in COLUMNS:
        raise AttributeError(name)
    try:
        spec = column_named(column)
    except UnusablePart as error:
        return _refusing_command(error)
    return make_command(spec) if verb == "make" else plan_command(spec)


def _refusing_command(error: UnusablePart) -> Callable[..., None]:
    """Return a command that raises `error`: help and completion of the other commands do not need the column."""

    def refuse(*words: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
        raise error

    refuse.__doc__ = "Cannot be used; the command says why."
    return refuse


def _plan_app() -> App:
    first, *others = COLUMNS
    command = plan_command(column_named(first))
    app = App(name="plan", help=command.__doc__, group_parameters=OPTIONS)
    app.default(command)
    for name in others:
        app.command(f"{__name__}:plan_{name}", name=name)
    return app
