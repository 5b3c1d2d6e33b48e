"""Command line of `train`. The implementation of a command is imported only when the command runs."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from clipmill.manifests import help_text as shared
from clipmill.manifests.errors import UserError, program_version, run_command
from clipmill.manifests.help_text import register_completion, wants_help
from clipmill.manifests.progress import Activity
from clipmill.manifests.settings import Range
from clipmill.manifests.storage.mirrors import UrlStream
from clipmill.manifests.storage.waiting import set_wait_reporter
from clipmill.train.commands.training import parse
from clipmill.train.config.files import Provenance, presets_of
from clipmill.train.config.training import TrainingSettings
from clipmill.train.registry import COMMANDS, task_names

if TYPE_CHECKING:
    from cyclopts.argument import ArgumentCollection


# The help shows ranges up to this bound. Larger bounds only guard against absurd values.
_MAX_SHOWN = 100


def help_text(app: App, argv: Sequence[str]) -> str:
    """Return the help text of the command that the arguments `argv` begin with."""
    return shared.help_text(app, argv, range_of=_range, tables_of=_presets)


def command_help(command: App, name: str) -> shared.CommandHelp:
    """Return the help of a command with all of its flags, for the documentation."""
    return shared.command_help(command, name, shows_all=True, range_of=_range, tables_of=_presets)


def _range(metadata: shared.Metadata) -> str:
    bounds = next((mark for mark in reversed(metadata) if isinstance(mark, Range)), None)
    if bounds is None or min(bounds.most, bounds.below) > _MAX_SHOWN:
        return ""
    least, most = max(bounds.least, bounds.above), min(bounds.most, bounds.below)
    open_least, open_most = ">" * (bounds.above == least), "<" * (bounds.below == most)
    return f"{open_least}{least:g} to {open_most}{most:g}"


def _presets(arguments: "ArgumentCollection") -> shared.Tables:
    hints = (argument.hint for argument in arguments)
    kind = next((hint for hint in hints if isinstance(hint, type) and issubclass(hint, TrainingSettings)), None)
    return {} if kind is None else {"Presets (--preset)": list(presets_of(kind).items())}


_FIRST_REPORT_S = 5.0  # time that the other processes wait while the first process reports an error

app = App(
    name="train",
    help="Train video-language models on the shards made by prep.",
    version=program_version,
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # run_command reports a KeyboardInterrupt
    default_parameter=Parameter(allow_repeating=True),  # the last value wins: "$@" can override a script's flags
)
# Commands are registered by import path: a command is imported when it is called, or when the help lists all commands.
for _name in task_names():
    app.command(f"clipmill.train.commands.training:{_name.replace('-', '_')}", name=_name)
app.command("clipmill.train.commands.quickstart:quickstart", name="quickstart")
app.command("clipmill.train.commands.evaluation:evaluate", name="eval")
app.command("clipmill.train.commands.bench:bench", name="bench")
app.command("clipmill.train.commands.export:export", name="export")
app.command("clipmill.train.commands.search:embed", name="embed")
app.command("clipmill.train.commands.search:search", name="search")
for _name, _path in COMMANDS.items():
    app.command(_path, name=_name)
register_completion(app)


@app.command
def doctor(
    *,
    shards: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Report this machine's hardware and software, the settings that training would use, and any problems.

    Exit codes: 0 if training can run, even with warnings; 1 if a problem would stop training; 2 for invalid usage.

    Examples:

        train doctor
        train doctor --shards data --json

    Parameters
    ----------
    shards
        Data folder on the disk to measure; nothing is written to the folder. Default: measure the disk of the current
        folder, with a temporary file.
    device
        Device to train on.
    as_json
        Print one JSON object.
    """
    from clipmill.train.doctor.commands import run_doctor

    run_doctor(shards=shards, device=device, is_json=as_json)


@app.command
def overview(
    runs: Annotated[list[str], Parameter(consume_multiple=True, negative="")],
    /,
    *,
    out: Path,
    link: Annotated[list[Path] | None, Parameter(negative="")] = None,
) -> None:
    """Write a web page that compares several runs: metrics, sample images, and links to their results pages.

    Examples:

        train overview runs/first runs/masked --out runs/index.html
        train overview runs/* --out runs/index.html

    Parameters
    ----------
    runs
        Run folders, or URLs of runs. Other files and folders, such as embeddings next to the runs, are omitted.
    out
        HTML file to write.
    link
        Additional page to link to, such as a page from train search. Repeat the flag for several pages.
    """
    with Activity(f"writing {out}"):
        from clipmill.train.report.overview import write_overview

        omitted_paths = write_overview(runs, out, links=link or ())
    print(f"written: {out}")
    if omitted_paths:
        print(f"omitted, because they are not runs: {', '.join(map(str, omitted_paths))}")


def main() -> None:
    """Entry point of the `train` program."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        set_wait_reporter(lambda line: print(line, file=sys.stderr, flush=True))
    with redirect_stdout(UrlStream(sys.stdout)), redirect_stderr(UrlStream(sys.stderr)):
        run_command(_call, program="train", has_daemons=True)


def _call() -> None:
    argv, provenance = sys.argv[1:], Provenance()
    try:
        if wants_help(app, argv):
            print(help_text(app, argv))
        else:
            parse(app, argv, provenance)()
    except UserError as error:
        sources = provenance.sources  # the preset or file that set a flag, if the user did not type it
        for mistake in error.errors:
            mistake.add_hint(*(f"{flag} is from {sources[flag]}" for flag in mistake.flags if sources.get(flag)))
        _wait_for_first_process()
        raise
    except CycloptsError as error:
        from clipmill.manifests.usage_errors import usage_error

        _wait_for_first_process()
        raise usage_error(error, app, argv) from None


def _wait_for_first_process() -> None:
    """Wait if a launcher started several processes on this machine and this process is not the first one.

    All processes usually find the same mistake in the flags. The first process reports it and exits, and torchrun then
    ends the others. A process that is still running after the wait has found a different mistake, and reports it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_REPORT_S)


if __name__ == "__main__":
    main()
