"""Commands that make or plan a column, such as `prep latents` and `prep plan latents`.

The attributes `make_NAME` and `plan_NAME` of this module are the commands of the column NAME, and `plan` is the command
group `prep plan`. `prep/cli.py` registers them by import path. They are created on access, so a column is loaded only
when its command is called.
"""

from typing import Annotated, Any

from cyclopts import App, Parameter

from clipmill.manifests.help_text import OPTIONS
from clipmill.manifests.plugins import UnusablePart
from clipmill.prep.core.make import make_command, plan_command
from clipmill.prep.registry import COLUMNS, column_named


def __getattr__(name: str) -> Any:
    """Create and return `plan`, or the command `make_NAME` or `plan_NAME` of a column."""
    if name == "plan":
        first_column, *other_columns = COLUMNS
        command = plan_command(column_named(first_column))
        app = App(name="plan", help=command.__doc__, group_parameters=OPTIONS)
        app.default(command)
        app.command(f"{__name__}:plan_index", name="index")
        for other_column in other_columns:
            app.command(f"{__name__}:plan_{other_column}", name=other_column)
        return app
    if name == "plan_index":
        from clipmill.prep.video.column import INDEX

        return plan_command(INDEX)
    verb, _, column = name.partition("_")
    if verb not in ("make", "plan") or column not in COLUMNS:
        raise AttributeError(name)
    try:
        spec = column_named(column)
    except UnusablePart as error:
        load_error = error

        # Only the command of this column fails. Help and completion of the other commands still work.
        def refuse(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> None:
            raise load_error

        refuse.__doc__ = "This command cannot be used; run it to see why."
        return refuse
    return make_command(spec) if verb == "make" else plan_command(spec)
