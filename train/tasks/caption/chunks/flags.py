"""`train caption-chunks` and its flags."""

import json
import shlex
import sys
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.train.config.data import Overrides
from clipmill.train.config.places import require_named_weights, require_places
from clipmill.train.tasks.caption.chunks.request import ChunkCaptionsRequest, ChunkDecoding


def caption_chunks(
    weights: Annotated[
        str,
        Parameter(
            help="Run folder of train caption, or a folder of a captioner of TimeSformer and GPT-2 with its tokenizer."
        ),
    ],
    /,
    request: ChunkCaptionsRequest,
) -> None:
    """Caption the chunks of a split, as a table that prep manifest captions takes as a source of captions.

    The table has several captions per clip with their likelihoods, and names the weights. The same command resumes an
    interrupted run; under torchrun, all processes share the work.

    Example:

        train caption-chunks runs/captions --shards data --out pseudo.parquet
    """
    require_named_weights(weights, takes_tags=False)
    require_places(shards=(request.shards,))
    with Activity("importing torch"):
        from clipmill.train.device.precision import choose_device
        from clipmill.train.distributed.launch import COMMAND, open_world
        from clipmill.train.engine.rank_consistency import SAME_LAUNCH
        from clipmill.train.run.tracking import Progress
        from clipmill.train.run.variants import reading_variants_of_run
        from clipmill.train.tasks.caption.chunks.captioning import caption, open_work
        from clipmill.train.tasks.caption.chunks.table import failures_path, require_table_path

    out = request.out
    require_table_path(out)
    decisive = ("shards", "split", "where", "segment", "batch")
    start = {
        COMMAND: "train caption-chunks",
        "WEIGHTS": weights,
        **{request.flag(name): getattr(request, name) for name in decisive},
        **{Overrides.flag(name): value for name, value in vars(request.shown).items()},
        **{ChunkDecoding.flag(name): value for name, value in vars(request.decoding).items()},
    }
    with open_world(device_type=choose_device(request.device).type, start=start, hint=SAME_LAUNCH) as world:
        progress = Progress("captioning", unit="part", is_quiet=request.json or not world.is_first)
        with reading_variants_of_run(weights, request.shards, say=progress.say):
            work = open_work(weights, request, say=progress.say)
            record = caption(work, out, world=world, progress=progress)
        clips = count_noun(record["num_clips"] - record["num_failed"], "clip")
        counts = f"{count_noun(record['num_captions'], 'caption')} of {clips}"
        empty = f"; {record['num_empty']:,} were empty and are left out" if record["num_empty"] else ""
        progress.say(f"done: {counts} in {out}{empty}")
        progress.say(f"next: prep manifest captions {shlex.quote(str(out))} --data {shlex.quote(request.shards)}")
        if request.json and world.is_first:
            sys.stdout.write(json.dumps({"out": str(out), **record}) + "\n")
    if record["num_failed"]:
        failures = failures_path(out)
        raise FailedWork(
            f"clips that could not be decoded: {record['num_failed']:,}; see {failures}. After a repair of the data, "
            f"remove {out} and {failures}, and run the same command again"
        )
