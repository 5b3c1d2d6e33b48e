"""`train caption-chunks` and its flags."""

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.progress import Activity
from clipmill.train.config.data import AS_TRAINED, Overrides
from clipmill.train.config.fields import Needs, Range
from clipmill.train.config.training import Device
from clipmill.train.tasks.caption.settings import DECODING, DecodingSettings, Method

_NUM_SAMPLES, _TOP_P = 5, 0.9


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChunkDecoding(DecodingSettings):
    """How the captions of chunks are generated: several per clip, by nucleus sampling."""

    prefix = ""

    method: Method = "sample"
    """Decoding method. sample: random sampling; greedy: the most likely token at each step; beam: beam search."""
    num_samples: Annotated[int | None, Range(1, 1000), Needs("method", ("sample",))] = None
    """sample: number of captions per clip. Default: 5."""
    top_p: Annotated[float | None, Range(above=0, most=1), Needs("method", ("sample",))] = None
    """sample: nucleus sampling, from the most likely tokens whose probabilities add up to this. Default: 0.9."""
    seed: int = 0
    """sample: random seed, combined with the key and begin of the clip and the number of the caption."""

    def effective(self) -> "ChunkDecoding":
        """The settings with the defaults of sampling."""
        if self.method != "sample":
            return self
        num_samples = _NUM_SAMPLES if self.num_samples is None else self.num_samples
        return replace(self, num_samples=num_samples, top_p=_TOP_P if self.top_p is None else self.top_p)


def caption_chunks(
    weights: str,
    /,
    *,
    shards: str,
    out: Path,
    split: str = "train",
    where: str | None = None,
    segment: str | None = None,
    batch: int = 16,
    workers: int = 4,
    device: Device = "auto",
    shown: Overrides = AS_TRAINED,
    decoding: Annotated[ChunkDecoding, DECODING] = ChunkDecoding(),
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Caption the chunks of a split, as a table that prep manifest captions takes as a source of captions.

    The table has several captions per clip with their likelihoods, and names the weights. The same command resumes an
    interrupted run; under torchrun, all processes share the work.

    Example:

        train caption-chunks runs/captions --shards data --out pseudo.parquet

    Parameters
    ----------
    weights
        Run folder of train caption, or a folder of a captioner of TimeSformer and GPT-2 with its tokenizer.
    shards
        Data folder.
    out
        Parquet file to write.
    split
        Split of the data.
    where
        Condition that selects the chunks, such as 'num_captions == 0' for the videos without captions (docs/data.md).
        Default: all.
    segment
        Length of the segments to caption, such as 5s. A remainder shorter than a quarter of it is merged into the last
        segment of a chunk. Default: whole chunks.
    batch
        Number of clips per batch and process.
    workers
        Number of threads that read and decode, per process.
    device
        Device of the model.
    as_json
        Print one JSON object.
    """
    for flag, value in (("--batch", batch), ("--workers", workers)):
        if value < 1:
            raise UserError(f"{flag} is {value}", hint="it must be 1 or more")
    with Activity("importing torch"):
        from clipmill.train.device.precision import choose_device
        from clipmill.train.distributed.launch import COMMAND, open_world
        from clipmill.train.engine.rank_consistency import SAME_LAUNCH
        from clipmill.train.run.tracking import Progress
        from clipmill.train.tasks.caption.chunks.captioning import caption, open_work
        from clipmill.train.tasks.caption.chunks.table import failures_path, require_table_path

    require_table_path(out)
    start = {
        COMMAND: "train caption-chunks",
        "WEIGHTS": weights,
        "--split": split,
        "--where": where,
        "--segment": segment,
        "--batch": batch,
        **{Overrides.flag(name): value for name, value in vars(shown).items()},
        **{ChunkDecoding.flag(name): value for name, value in vars(decoding).items()},
    }
    with open_world(device_type=choose_device(device).type, start=start, hint=SAME_LAUNCH) as world:
        progress = Progress("captioning", unit="part", is_quiet=as_json or not world.is_first)
        work = open_work(
            weights,
            shards=shards,
            split=split,
            where=where,
            segment=segment,
            batch=batch,
            workers=workers,
            device=device,
            overrides=shown,
            decoding=decoding.effective(),
            say=progress.say,
        )
        record = caption(work, out, world=world, progress=progress)
        counts = f"{record['num_captions']:,} captions of {record['num_clips'] - record['num_failed']:,} clips"
        empty = f"; {record['num_empty']:,} were empty and are left out" if record["num_empty"] else ""
        progress.say(f"done: {counts} in {out}{empty}")
        progress.say(f"next: prep manifest captions {shlex.quote(str(out))} --data {shlex.quote(shards)}")
        if as_json and world.is_first:
            sys.stdout.write(json.dumps({"out": str(out), **record}) + "\n")
    if record["num_failed"]:
        failures = failures_path(out)
        raise FailedWork(
            f"clips that could not be decoded: {record['num_failed']:,}; see {failures}. After a repair of the data, "
            f"remove {out} and {failures}, and run the same command again"
        )
