"""The `prep` command."""

import signal
import sys

from cyclopts import App, CycloptsError

from manifests.errors import Stopped, UserError, run_command
from manifests.whole_numbers import refuse_fractions
from prep.commands import advise as advise_command
from prep.commands import retry as retry_command
from prep.commands import upkeep as set_commands
from prep.commands.manifest import app as manifest_app
from prep.latents import command as latents_commands
from prep.text import command as text_commands
from prep.video import command as chunk_commands

app = App(
    name="prep",
    help="Turn long videos into training shards, once; again only what a change changes.",
    help_epilogue="Begin with `prep manifest folder VIDEOS`, then `prep chunk --len 15s`.",
    version_flags=["--version"],
    config=refuse_fractions,
    suppress_keyboard_interrupt=False,  # run_command says what an interruption means
)
app.command(manifest_app)
app.command(chunk_commands.chunk)
app.command(latents_commands.latents)
app.command(text_commands.text)
plan_app = App(name="plan", help=chunk_commands.plan.__doc__)
plan_app.default(chunk_commands.plan)
plan_app.command(latents_commands.plan_latents, name="latents")
plan_app.command(text_commands.plan_text, name="text")
app.command(plan_app)
app.command(retry_command.retry)
app.command(set_commands.status)
app.command(set_commands.verify)
app.command(set_commands.inspect)
app.command(set_commands.gc)
app.command(advise_command.advise)


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _stop)
    run_command(lambda: _run(sys.argv[1:]))


def _stop(_number: int, _frame: object) -> None:
    # Nobody is to be told twice, least of all in the middle of leaving.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped("what was finished is kept, run the same command again to go on")


def _run(arguments: list[str]) -> None:
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        message = " ".join(str(error).split())
        raise UserError(message, hint="`prep --help` and `prep COMMAND --help` list what there is") from None


if __name__ == "__main__":
    main()
