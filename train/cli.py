"""The command line of training. What the commands do is imported when one of them runs."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from manifests.errors import UserError, run_command
from manifests.whole_numbers import refuse_fractions
from train.commands.arguments import add_files, hint_with_files, refuse_idle_flags
from train.registry import COMMANDS, task_names

_FIRST_SPEAKS_S = 5.0

app = App(
    name="train",
    help="Trains video-language models from the shards that prep made.",
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # run_command says what an interruption means
    config=[add_files, refuse_fractions, refuse_idle_flags],
)
# By import path: a command is loaded when it is called, or when the help lists them all.
for _name in task_names():
    app.command(f"train.commands.training:{_name.replace('-', '_')}", name=_name)
app.command("train.commands.evaluation:evaluate", name="eval")
app.command("train.commands.bench:bench", name="bench")
for _name, _path in COMMANDS.items():
    app.command(_path, name=_name)


@app.command
def doctor(
    *,
    shards: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Reports what this machine has, what training will use of it, and what is wrong.

    Exit codes: 0, also with warnings; 1 if something would stop training; 2 for invalid usage.

    Examples:

        train doctor
        train doctor --shards data --json

    Parameters
    ----------
    shards
        Data folder whose disk to measure; it is only read. The current folder when left out, with a temporary file.
    device
        Device that training is to run on, as in a training command.
    as_json
        Print one JSON object.
    """
    from train.doctor.commands import run_doctor

    run_doctor(shards=shards, device=device, is_json=as_json)


@app.command
def export(
    run: Path,
    *,
    form: Annotated[str, Parameter(name="--format")],
    out: Path,
    frame_embedding: Literal["mean", "zero"] = "mean",
    checkpoint: Path | None = None,
) -> None:
    """Export a run's weights as a folder for open_clip, transformers or VideoMAE, which --init.weights reads too.

    Example:

        train export runs/first --format open_clip --out exported

    Parameters
    ----------
    run
        Folder that train dual-encoder, train mae, train classify with a videomae tower, or train caption with a
        TimeSformer tower made.
    form
        open_clip: for create_model('local-dir:OUT'); hf: for from_pretrained('OUT') of CLIPModel,
        VideoMAEForPreTraining, VideoMAEForVideoClassification or, of captioners, VisionEncoderDecoderModel;
        videomae: a checkpoint as VideoMAE's own.
    out
        Folder to make.
    frame_embedding
        What a picture of a dual encoder gets for a temporal embedding: the mean of all frames', or none.
    checkpoint
        Checkpoint of the run; its latest when left out.
    """
    from train.commands.export import export_run

    export_run(run, form=form, out=out, frame_embedding=frame_embedding, checkpoint=checkpoint, say=print)


@app.command
def overview(runs: Annotated[list[Path], Parameter(consume_multiple=True, negative="")], /, *, out: Path) -> None:
    """Writes one page about several runs: their numbers, a few of their pictures, links to their pages.

    Example:

        train overview runs/first runs/masked --out runs/index.html

    Parameters
    ----------
    runs
        Folders that training commands made.
    out
        Page to write.
    """
    from train.report.overview import write_overview

    write_overview(runs, out)
    print(out)


def main() -> None:
    """Entry point of the `train` program."""
    run_command(_call, has_daemons=True)


def _call() -> None:
    if {*sys.argv[1:]} <= {"--help", "-h"}:
        for name in app:
            app[name]  # loads it
    try:
        app(sys.argv[1:])
    except UserError as error:
        error.hint = hint_with_files(error, sys.argv[1:])
        _let_first_speak()
        raise
    except CycloptsError as error:
        message = " ".join(str(error).split())
        _let_first_speak()
        raise UserError(message[:1].lower() + message[1:], hint="see train --help, or --help after a command") from None


def _let_first_speak() -> None:
    """Waits where a launcher started several processes on this machine, and this one is not the first.

    They make a user's mistake together. Once the first one has said it and left, torchrun ends the others; one that is
    still there has made a mistake of its own, and says it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_SPEAKS_S)


if __name__ == "__main__":
    main()
