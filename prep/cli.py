"""The `prep` command."""

import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

from cyclopts import App, CycloptsError, Parameter

from clipmill.manifests.completion import register_completion
from clipmill.manifests.errors import Stopped, program_version, run_command
from clipmill.manifests.flag_values import check_values
from clipmill.manifests.help_text import help_text, wants_help
from clipmill.manifests.storage.mirrors import AddressStream
from clipmill.manifests.storage.waiting import tell_of_waiting
from clipmill.prep.commands import advise, export, manifest, retry, upkeep
from clipmill.prep.core.make import make_command, plan_command
from clipmill.prep.core.request import OPTIONS
from clipmill.prep.registry import columns

HELP = """Turn long videos into training shards, incrementally: each run makes only what is new, changed or damaged.

First run:

    prep manifest folder VIDEOS
    prep chunk --len 15s
    prep status
"""


def build_app() -> App:
    """Build the command line, with the commands of every column."""
    app = App(
        name="prep",
        help=HELP,
        version=program_version,
        version_flags=["--version"],
        config=check_values,
        group_parameters=OPTIONS,
        suppress_keyboard_interrupt=False,  # run_command prints the message for an interruption
        default_parameter=Parameter(allow_repeating=True),  # the last one counts, so that `script.sh "$@"` overrides
    )
    app.command(manifest.app)
    first, *others = columns()
    plan = App(name="plan", help=first.plan_help, group_parameters=OPTIONS)
    plan.default(plan_command(first))
    for column in columns():
        app.command(make_command(column), name=column.command)
    for column in others:
        plan.command(plan_command(column), name=column.name)
    app.command(plan)
    app.command(export.app)
    app.command(retry.retry)
    for command in (upkeep.status, upkeep.verify, upkeep.inspect, upkeep.diff, upkeep.gc):
        app.command(command)
    app.command(advise.advise)
    register_completion(app)
    return app


app = build_app()


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _stop)
    tell_of_waiting(lambda line: print(line, file=sys.stderr, flush=True))
    with redirect_stdout(AddressStream(sys.stdout)), redirect_stderr(AddressStream(sys.stderr)):
        run_command(lambda: _run(sys.argv[1:]), program="prep")


def _stop(_number: int, _frame: object) -> None:
    # A second signal must not interrupt the shutdown.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped("finished work is kept; run the same command again to resume")


def _run(arguments: list[str]) -> None:
    try:
        if wants_help(app, arguments):
            print(help_text(app, arguments))
        else:
            app(arguments, exit_on_error=False, print_error=False)
    except KeyboardInterrupt as interrupt:
        how = (*interrupt.args, "run the same command again to continue")
        raise KeyboardInterrupt("; ".join(how)) from None
    except CycloptsError as error:
        from clipmill.manifests.usage_errors import usage_error

        raise usage_error(error, app, arguments) from None


if __name__ == "__main__":
    main()
