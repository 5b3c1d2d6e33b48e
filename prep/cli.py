"""The program `prep`. Its commands are registered by import path, and loaded when they are called."""

import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

from cyclopts import App, CycloptsError, Parameter

from clipmill.manifests.errors import Stopped, program_version, run_command
from clipmill.manifests.help_text import OPTIONS, check_values, help_text, register_completion, wants_help
from clipmill.manifests.storage.mirrors import UrlStream
from clipmill.manifests.storage.waiting import set_wait_reporter
from clipmill.prep.registry import COLUMNS, SUMMARIES
from clipmill.shards.columns import command_for

HELP = """Turn long videos into training shards, incrementally: each run makes only new, changed or damaged shards.

First run:

    prep manifest folder VIDEOS
    prep chunk --len 15s
    prep status
"""


# Commands before and after the columns in `prep --help`: name -> (import path, first line of the help).
_FIRST_COMMANDS = {
    "manifest": ("clipmill.prep.commands.manifest:app", "Read videos and captions of a dataset into the manifest."),
}
_LAST_COMMANDS = {
    "index": (
        "clipmill.prep.commands.index:index",
        "Index the videos of the manifest without encoding them; packets stay in the source files.",
    ),
    "plan": (
        "clipmill.prep.commands.columns:plan",
        "Print what prep chunk would do with the same settings, why, and the estimated cost (dry run).",
    ),
    "export": ("clipmill.prep.exports.kinds:app", "Write columns in a format that other tools read."),
    "retry": (
        "clipmill.prep.commands.upkeep:retry",
        "Retry the failures of a column, for example after repairing a source video.",
    ),
    "status": (
        "clipmill.prep.commands.upkeep:status",
        "Show the videos, the variants of each column, failures, the progress of running commands, and the next step.",
    ),
    "verify": (
        "clipmill.prep.commands.upkeep:verify",
        "Verify the checksums of all shards and records by reading every byte.",
    ),
    "inspect": (
        "clipmill.prep.commands.upkeep:inspect",
        "Show the shards of a variant or the details of a sample, or write an HTML page of chunks or scores.",
    ),
    "diff": (
        "clipmill.prep.commands.upkeep:diff",
        "Compare two variants of a column: settings, samples, sizes, and the values of up to 16 arrays.",
    ),
    "use": (
        "clipmill.prep.commands.upkeep:use",
        "Make a variant the current variant of its column, so that training reads it. No file is removed.",
    ),
    "gc": (
        "clipmill.prep.commands.upkeep:gc",
        "Remove variants that are not current, unreferenced shards, and temporary files left by killed commands.",
    ),
    "advise": (
        "clipmill.prep.commands.advise:advise",
        "Report whether the disk or the bucket keeps up with training, or when re-encoding indexed videos pays off.",
    ),
}


def build_app() -> App:
    """Build the command line with all commands, including one for each column."""
    app = App(
        name="prep",
        help=HELP,
        version=program_version,
        version_flags=["--version"],
        config=check_values,
        group_parameters=OPTIONS,
        suppress_keyboard_interrupt=False,  # `run_command` prints the message
        # If a flag is repeated, the last value wins, so flags passed to `script.sh "$@"` override flags in the script.
        default_parameter=Parameter(allow_repeating=True),
    )
    columns = {
        command_for(name): (f"clipmill.prep.commands.columns:make_{name}", SUMMARIES.get(name)) for name in COLUMNS
    }
    for name, (path, summary) in {**_FIRST_COMMANDS, **columns, **_LAST_COMMANDS}.items():
        app.command(path, name=name, help=summary)
    register_completion(app)
    return app


app = build_app()


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _stop)
    set_wait_reporter(lambda line: print(line, file=sys.stderr, flush=True))
    with redirect_stdout(UrlStream(sys.stdout)), redirect_stderr(UrlStream(sys.stderr)):
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
        messages = (*interrupt.args, "run the same command again to resume")
        raise KeyboardInterrupt("; ".join(messages)) from None
    except CycloptsError as error:
        from clipmill.manifests.usage_errors import usage_error

        raise usage_error(error, app, arguments) from None


if __name__ == "__main__":
    main()
