"""The command line of training. What the commands do is imported when one of them runs."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from clipmill.manifests.errors import UserError, program_version, run_command
from clipmill.manifests.help_text import register_completion, wants_help
from clipmill.manifests.progress import Activity
from clipmill.manifests.storage.waiting import tell_of_waiting
from clipmill.train.commands.training import name_sources, parse
from clipmill.train.config.choices import Provenance
from clipmill.train.registry import COMMANDS, task_names

_FIRST_SPEAKS_S = 5.0

app = App(
    name="train",
    help="Train video-language models on the shards made by prep.",
    version=program_version,
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # run_command says what an interruption means
    default_parameter=Parameter(allow_repeating=True),  # the last one counts, so that `script.sh "$@"` overrides
)
# By import path: a command is loaded when it is called, or when the help lists them all.
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
    """Report the hardware and software of this machine, what training will use, and what is wrong.

    Exit codes: 0 if training can run, even with warnings; 1 if something would stop it; 2 for invalid usage.

    Examples:

        train doctor
        train doctor --shards data --json

    Parameters
    ----------
    shards
        Data folder on a disk to measure; it is only read. Default: the current folder, with a temporary file.
    device
        Device that training is to run on.
    as_json
        Print one JSON object.
    """
    from clipmill.train.doctor.commands import run_doctor

    run_doctor(shards=shards, device=device, is_json=as_json)


@app.command
def overview(
    runs: Annotated[list[Path], Parameter(consume_multiple=True, negative="")],
    /,
    *,
    out: Path,
    link: Annotated[list[Path] | None, Parameter(negative="")] = None,
) -> None:
    """Write a web page that compares several runs: metrics, sample images, links to their results pages.

    Example:

        train overview runs/first runs/masked --out runs/index.html
        train overview runs/* --out runs/index.html

    Parameters
    ----------
    runs
        Run folders. Other files and folders, such as embeddings beside them, are left out.
    out
        HTML file to write.
    link
        Another page to link to, such as one of train search. May be repeated.
    """
    with Activity(f"writing {out}"):
        from clipmill.train.report.overview import write_overview

        left_out = write_overview(runs, out, links=link or ())
    print(f"written: {out}")
    if left_out:
        print(f"left out, not a run: {', '.join(map(str, left_out))}")


def main() -> None:
    """Entry point of the `train` program."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell_of_waiting(lambda line: print(line, file=sys.stderr, flush=True))
    run_command(_call, program="train", has_daemons=True)


def _call() -> None:
    words, provenance = sys.argv[1:], Provenance()
    try:
        if wants_help(app, words):
            from clipmill.train.commands.help import help_text

            print(help_text(app, words))
        else:
            parse(app, words, provenance)()
    except UserError as error:
        name_sources(error, provenance.sources)
        _let_first_speak()
        raise
    except CycloptsError as error:
        from clipmill.manifests.usage_errors import usage_error

        _let_first_speak()
        raise usage_error(error, app, words) from None


def _let_first_speak() -> None:
    """Wait, if a launcher started several processes on this machine and this is not the first of them.

    A mistake in the flags is usually the same in all processes. The first one reports it and exits, and torchrun then
    ends the others. A process that is still running after the wait has a mistake of its own, and reports it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_SPEAKS_S)


if __name__ == "__main__":
    main()
