"""The commands `train caption-video` and `train caption-chunks`; torch is imported only when a command runs."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.train.config.clips import AS_TRAINED, Overrides
from clipmill.train.config.shards import require_paths, require_weights_exist
from clipmill.train.tasks.caption.spec import (
    DECODING,
    ChunkCaptionsRequest,
    ChunkDecoding,
    DecodingSettings,
    VideoFormat,
)


def caption_chunks(
    weights: Annotated[
        str,
        Parameter(
            help="Run folder of train caption, or folder with a TimeSformer and GPT-2 captioner and its tokenizer."
        ),
    ],
    /,
    request: ChunkCaptionsRequest,
) -> None:
    """Caption the chunks of a split, and write a table that prep manifest captions reads as a source of captions.

    The table contains several captions per clip, their likelihoods, and the name of the weights. Run the same command
    again to resume interrupted work. Under torchrun, all processes share the work.

    Example:

        train caption-chunks runs/captions --shards data --out pseudo.parquet
    """
    require_weights_exist(weights, takes_tags=False)
    require_paths(shards=(request.shards,))
    with Activity("importing torch"):
        from clipmill.train.device.precision import choose_device
        from clipmill.train.distributed.launch import COMMAND, open_world
        from clipmill.train.engine.rank_consistency import SAME_LAUNCH
        from clipmill.train.run.tracking import Progress
        from clipmill.train.run.variants import reading_variants_of_run
        from clipmill.train.tasks.caption.chunk_captions import caption, failures_path, open_work, require_table_path

    out = request.out
    require_table_path(out)
    fields = ("shards", "split", "variant", "where", "segment", "batch")
    start = {
        COMMAND: "train caption-chunks",
        "WEIGHTS": weights,
        **{request.flag(name): getattr(request, name) for name in fields},
        **{Overrides.flag(name): value for name, value in vars(request.shown).items()},
        **{ChunkDecoding.flag(name): value for name, value in vars(request.decoding).items()},
    }
    with open_world(device_type=choose_device(request.device).type, start=start, hint=SAME_LAUNCH) as world:
        progress = Progress("captioning", unit="part", is_quiet=request.json or not world.is_first)
        with reading_variants_of_run(weights, request.shards, request.variant, say=progress.say):
            work = open_work(weights, request, say=progress.say)
            record = caption(work, out, world=world, progress=progress)
        clips = count_noun(record["num_clips"] - record["num_failed"], "clip")
        counts = f"{count_noun(record['num_captions'], 'caption')} of {clips}"
        empty = f"; {count_noun(record['num_empty'], 'empty caption')} omitted" if record["num_empty"] else ""
        progress.say(f"done: {counts} in {out}{empty}")
        progress.say(f"next: prep manifest captions {shlex.quote(str(out))} --data {shlex.quote(request.shards)}")
        if request.json and world.is_first:
            sys.stdout.write(json.dumps({"out": str(out), **record}) + "\n")
    if record["num_failed"]:
        failures = failures_path(out)
        raise FailedWork(
            f"{count_noun(record['num_failed'], 'clip')} could not be decoded; see {failures}. After repairing the "
            f"data, remove {out} and {failures}, and run the same command again"
        )


def caption_video(
    weights: str,
    videos: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    len: str = "10s",
    out: Path | None = None,
    file_format: Annotated[VideoFormat | None, Parameter(name="--format")] = None,
    batch: int = 16,
    shown: Overrides = AS_TRAINED,
    decoding: Annotated[DecodingSettings | None, DECODING] = None,
) -> None:
    """Caption video files in windows of fixed length. Folders are searched for videos.

    Examples:

        train caption-video runs/captions holiday.mp4
        train caption-video runs/captions films --len 5s --out captions.json

    Parameters
    ----------
    weights
        Run folder of train caption, or folder with a TimeSformer and GPT-2 captioner and its tokenizer.
    videos
        Video files, or folders with videos.
    len
        Window length, 100ms to 3600s. A remainder shorter than a quarter of this length is merged into the last window.
    out
        New file to write, or a folder for the subtitles of several videos. Default: lines on standard output.
    file_format
        Output format. Default: the suffix of --out.
    batch
        Number of windows per batch.
    decoding
        Decoding settings. Default: the settings of the run.
    """
    require_weights_exist(weights, takes_tags=False)
    with Activity("importing torch"):
        from clipmill.train.tasks.caption.video_captions import caption_files

    caption_files(
        weights,
        videos,
        length=len,
        out=out,
        file_format=file_format,
        batch=batch,
        overrides=shown,
        decoding=decoding,
    )
