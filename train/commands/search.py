"""`train embed` and `train search`."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.train.config.shards import DataSettings, folders_of

Device = Literal["auto", "cpu", "cuda"]


def embed(
    weights: str,
    *,
    shards: str | None = None,
    out: Path,
    split: str = "val",
    where: str | None = None,
    features: Literal["embedding", "pooled", "tokens"] | None = None,
    clips: Literal["captions", "chunks"] = "captions",
    num_frames: int | None = None,
    sampling: Literal["uniform", "stride", "lavila"] | None = None,
    size_px: int | None = None,
    batch: int = 64,
    workers: int = 4,
    device: Device = "auto",
) -> None:
    """Embed the clips and captions of a split, as files for train search, numpy, polars and faiss.

    The folder gets video.npy, text.npy, clips.parquet, captions.parquet and embed.json. The same command resumes an
    interrupted run; under torchrun, all processes share the work.

    Examples:

        train embed runs/first --split val --out embedded
        train embed runs/masked --shards data --features tokens --out tokens

    Parameters
    ----------
    weights
        Run folder, or other trained weights.
    shards
        Data folder. Default: that of the training run.
    out
        Folder to write.
    split
        Split of the data.
    where
        Condition that selects the clips, such as "motion > 0.2 and not duplicate" (docs/data.md). Default: all.
    features
        What to store for each clip: embedding (unit length, beside those of captions), pooled (one vector of the video
        tower before any projection) or tokens (all tokens of the tower). Default: embedding for dual encoders,
        otherwise pooled.
    clips
        What a row is: each time span that has captions, or each whole chunk, for videos without captions.
    num_frames
        Number of frames per clip. Default: as in training.
    sampling
        How frames are sampled. Default: as in training.
    size_px
        Side of the frames, in pixels. Default: as in training.
    batch
        Number of clips per forward pass and process.
    workers
        Number of threads that read and decode, per process.
    device
        Device of the model.
    """
    for flag, value in (("--batch", batch), ("--workers", workers)):
        if value < 1:
            raise UserError(f"{flag} is {value}", hint="it must be 1 or more")
    if shards is None:
        shards = _own_folder(weights)
    with Activity("importing torch"):
        from clipmill.train.device.precision import choose_device
        from clipmill.train.distributed.launch import COMMAND, open_world
        from clipmill.train.engine.rank_consistency import SAME_LAUNCH
        from clipmill.train.inference.model import load_model
        from clipmill.train.run.tracking import Progress
        from clipmill.train.search.embedding import embed as run
        from clipmill.train.search.embedding import open_work
        from clipmill.train.search.folder import FAILURES

    start = {
        COMMAND: "train embed",
        "WEIGHTS": weights,
        "--split": split,
        "--where": where,
        "--features": features,
        "--clips": clips,
        "--num-frames": num_frames,
        "--sampling": sampling,
        "--size-px": size_px,
        "--batch": batch,
    }
    with open_world(device_type=choose_device(device).type, start=start, hint=SAME_LAUNCH) as world:
        with Activity(f"loading {weights}"):
            model = load_model(
                weights, num_frames=num_frames, sampling=sampling, size_px=size_px, device=device, shards=shards
            )
        with Activity(f"opening {shards}"):
            work = open_work(
                model,
                weights=weights,
                shards=shards,
                split=split,
                features=features,
                clips=clips,
                batch=batch,
                workers=workers,
                where=where,
            )
        progress = Progress("embedding", unit="part", is_quiet=not world.is_first)
        for remark in model.remarks:
            progress.say(remark)
        record = run(work, out, world=world, progress=progress)
        progress.say(f"done: {record['num_clips']:,} clips and {record['num_captions']:,} captions in {out}")
        if record["features"] == "embedding":
            progress.say(f'next: train search {shlex.quote(str(out))} "what to look for"')
    if record["num_failed"]:
        raise FailedWork(
            f"{counted(record['num_failed'], 'clip')} could not be decoded; see {out / FAILURES}. After a repair of "
            f"the data, remove {out} and run the same command again"
        )


def _own_folder(weights: str) -> str:
    """The data folder that a run was trained on; UserError if it is not a run, or was trained on several."""
    with Activity("importing torch"):
        from clipmill.train.config.files import read_values
        from clipmill.train.evaluation.opening import require_weights
        from clipmill.train.inference.model import tasks_where
        from clipmill.train.run.folder import open_run
        from clipmill.train.weights.sources import is_run

    if not is_run(Path(weights)):
        require_weights(weights, tasks_where(lambda spec: spec.features is not None))
        raise UserError(f"--shards is missing: {weights} is not a run, which has data of its own", hint="add it")
    settings = read_values(open_run(Path(weights)).settings)
    folders = folders_of(settings.get("shards", DataSettings.shards))
    if len(folders) > 1:
        raise UserError(
            f"{weights} was trained on {len(folders)} data folders, and train embed reads one: {', '.join(folders)}",
            hint=f"name one of them: --shards {folders[0]}",
        )
    return folders[0]


def search(
    folder: Path,
    queries: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    like: Annotated[list[str] | None, Parameter(negative="")] = None,
    top: int = 10,
    page: Path | None = None,
    weights: str | None = None,
    shards: str | None = None,
    device: Device = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Search embedded clips by text or by example.

    The search is exact: every clip is compared with the query, by cosine similarity.

    Examples:

        train search embedded "a dog catches a frisbee"
        train search embedded "a red circle" "a square" --page search.html
        train search embedded --like synthetic-00007_000015000

    Parameters
    ----------
    folder
        Folder of train embed.
    queries
        Texts to search for.
    like
        Clip to search for similar ones of: the key of its chunk, or its row in clips.parquet.
    top
        Number of clips to find for each query.
    page
        HTML file to write, which plays the clips.
    weights
        Weights that the clips were embedded with. Default: where they were then.
    shards
        Data folder of the page's clips. Default: where it was when the clips were embedded.
    device
        Device of the text tower.
    as_json
        Print one JSON object.
    """
    with Activity("loading the search"):
        from clipmill.train.evaluation.pages import require_page_path
        from clipmill.train.search.folder import open_embedded
        from clipmill.train.search.searching import describe, result_json, search_folder, write_search_page

    if page is None and shards is not None:
        raise UserError(f"--shards is {shards}, which has no effect without --page", hint="leave it out, or add --page")
    if page is not None:
        require_page_path(page, flag="--page")
    embedded = open_embedded(folder)
    results = search_folder(embedded, queries or (), like=like or (), top=top, weights=weights, device=device)
    num_missing = 0
    if page is not None:
        with Activity(f"writing {page}"):
            num_missing = write_search_page(page, embedded, results, shards=shards)
    if as_json:
        print(json.dumps(result_json(embedded, results)))
    else:
        print(describe(results))
        if page is not None:
            print(f"written: {page}")
    if num_missing:
        raise FailedWork(f"clips that {page} cannot show, because they could not be read or decoded: {num_missing}")
