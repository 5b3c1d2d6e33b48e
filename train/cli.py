"""The command line of training. What the commands do is imported when one of them runs."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from manifests.errors import UserError, run_command
from manifests.whole_numbers import refuse_fractions
from train.commands.arguments import add_files, hint_with_files, refuse_idle_flags
from train.commands.evaluation import evaluate
from train.run.folder import Resume
from train.tasks.caption.settings import CaptionerSettings, DecodingSettings
from train.tasks.caption.videos.files import Format
from train.tasks.classify.settings import ClassifySettings
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.mae.settings import MaeSettings

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
app.command(evaluate)


@app.command
def dual_encoder(
    settings: DualEncoderSettings = DualEncoderSettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, Parameter(group="Where")] = None,
    config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
    resume: Annotated[Resume, Parameter(group="Where", negative="")] = False,
) -> None:
    """Trains a video tower and a text tower to meet, by a contrastive loss (--loss.kind).

    Example:

        train dual-encoder --shards data --preset tiny --steps 200 --out runs/first

    Parameters
    ----------
    preset
        Settings by name; flags and --config go before them.
    config
        YAML file of settings, keys spelled as the flags; a later file goes before an earlier one.
    resume
        Go on with the run in --out from its latest checkpoint; auto: begin a new run where there is none.
    """
    from train.commands.training import train_dual_encoder

    train_dual_encoder(settings, resume=resume)


@app.command
def classify(
    settings: ClassifySettings = ClassifySettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, Parameter(group="Where")] = None,
    config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
    resume: Annotated[Resume, Parameter(group="Where", negative="")] = False,
) -> None:
    """Fine-tunes a video tower to tell the labels of clips apart.

    Example:

        train classify --shards data --init.weights runs/first --label class --out runs/classes

    Parameters
    ----------
    preset
        Settings by name; flags and --config go before them.
    config
        YAML file of settings, keys spelled as the flags; a later file goes before an earlier one.
    resume
        Go on with the run in --out from its latest checkpoint; auto: begin a new run where there is none.
    """
    from train.commands.training import train_classify

    train_classify(settings, resume=resume)


@app.command
def mae(
    settings: MaeSettings = MaeSettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, Parameter(group="Where")] = None,
    config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
    resume: Annotated[Resume, Parameter(group="Where", negative="")] = False,
) -> None:
    """Trains a video tower to reconstruct what a mask hides (VideoMAE): of any videos, without captions.

    Example:

        train mae --shards data --preset tiny --out runs/masked

    Parameters
    ----------
    preset
        Settings by name; flags and --config go before them.
    config
        YAML file of settings, keys spelled as the flags; a later file goes before an earlier one.
    resume
        Go on with the run in --out from its latest checkpoint; auto: begin a new run where there is none.
    """
    from train.commands.training import train_mae

    train_mae(settings, resume=resume)


@app.command
def caption(
    settings: CaptionerSettings = CaptionerSettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, Parameter(group="Where")] = None,
    config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
    resume: Annotated[Resume, Parameter(group="Where", negative="")] = False,
) -> None:
    """Trains a captioner: a video tower and a GPT-2 that says what the clip shows.

    Example:

        train caption --shards data --preset tiny --out runs/captions

    Parameters
    ----------
    preset
        Settings by name; flags and --config go before them.
    config
        YAML file of settings, keys spelled as the flags; a later file goes before an earlier one.
    resume
        Go on with the run in --out from its latest checkpoint; auto: begin a new run where there is none.
    """
    from train.commands.training import train_caption

    train_caption(settings, resume=resume)


@app.command
def caption_video(
    run: Path,
    videos: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    len: str = "10s",
    out: Path | None = None,
    form: Annotated[Format | None, Parameter(name="--format")] = None,
    batch: int = 16,
    decoding: Annotated[DecodingSettings | None, Parameter(group="Decoding")] = None,
) -> None:
    """Captions video files, a window at a time; folders are searched for videos.

    Examples:

        train caption-video runs/captions holiday.mp4
        train caption-video runs/captions films --len 5s --out captions.csv

    Parameters
    ----------
    run
        Folder that train caption --out made.
    videos
        Video files, or folders of them.
    len
        Length of a window; a rest shorter than a quarter of it joins the last one.
    out
        File to write, which is not there yet; lines on standard output when left out. Subtitles of several videos are
        files in this folder.
    form
        csv, json or srt; by the suffix of --out when left out.
    batch
        Windows that are captioned at once.
    decoding
        How captions are written; as the run says when left out.
    """
    from train.tasks.caption.videos.commands import caption_files

    caption_files(run, videos, length=len, out=out, wanted=form, batch=batch, decoding=decoding)


@app.command
def bench(
    settings: DualEncoderSettings = DualEncoderSettings(),  # noqa: B008 - frozen
    *,
    preset: Annotated[str | None, Parameter(group="Where")] = None,
    config: Annotated[list[Path] | None, Parameter(group="Where", negative="")] = None,
    seconds: Annotated[float, Parameter(group="Where")] = 3.0,
    as_json: Annotated[bool, Parameter(name="--json", group="Where", negative="")] = False,
) -> None:
    """Measures each link from disk to weights with the settings of a training run, and names the slowest.

    Example:

        train bench --shards data --preset tiny

    Parameters
    ----------
    preset
        Settings by name; flags and --config go before them.
    config
        YAML file of settings, keys spelled as the flags; a later file goes before an earlier one.
    seconds
        Time for each link.
    as_json
        Print one JSON object.
    """
    from train.bench.rates import print_report
    from train.bench.run import run_bench

    result = run_bench(settings, seconds=seconds)
    if as_json:
        print(json.dumps(result))
    else:
        print_report(result)


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
    form: Annotated[Literal["open_clip", "hf", "videomae"], Parameter(name="--format")],
    out: Path,
    frame_embedding: Literal["mean", "zero"] = "mean",
    checkpoint: Path | None = None,
) -> None:
    """Writes a run's weights as a folder for open_clip, transformers or VideoMAE; --init.weights reads it too.

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
