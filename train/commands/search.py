"""The commands `train embed` and `train search`."""

import json
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.shards.columns import VIDEO
from clipmill.train.config.files import read_values
from clipmill.train.config.shards import DataSettings, folders_of, local_folder, require_paths, require_weights_exist
from clipmill.train.registry import tasks_where
from clipmill.train.run.folder import is_run, open_run
from clipmill.train.search.request import EmbedRequest, SearchRequest
from clipmill.train.spec import Tasks, take_tags


def embed(
    weights: Annotated[str, Parameter(help="Run folder, or other trained weights.")], /, request: EmbedRequest
) -> None:
    """Embed the clips and captions of a split, and write files for train search, numpy, polars and faiss.

    The files are video.npy, text.npy, clips.parquet, captions.parquet and embed.json. To resume interrupted work, run
    the same command again. Under torchrun, all processes share the work.

    Examples:

        train embed runs/first --split val --out embedded
        train embed runs/masked --shards data --features tokens --out tokens
    """
    require_weights_exist(weights, takes_tags=take_tags(_embedding_tasks()))
    if request.shards is None:
        request = replace(request, shards=_training_folder(weights))
    require_paths(shards=(request.shards,))
    with Activity("importing torch"):
        from clipmill.train.device.precision import choose_device
        from clipmill.train.distributed.launch import COMMAND, open_world
        from clipmill.train.engine.rank_consistency import SAME_LAUNCH
        from clipmill.train.inference import load_model
        from clipmill.train.run.tracking import Progress
        from clipmill.train.run.variants import reading_variants_of_run
        from clipmill.train.search import embedding
        from clipmill.train.search.folder import FAILURES

    fields = ("split", "variant", "where", "features", "clips", "batch")
    start = {
        COMMAND: "train embed",
        "WEIGHTS": weights,
        **{request.flag(name): getattr(request, name) for name in fields},
        **{request.flag(name): value for name, value in vars(request.shown).items()},
    }
    with open_world(device_type=choose_device(request.device).type, start=start, hint=SAME_LAUNCH) as world:
        progress = Progress("embedding", unit="part", is_quiet=not world.is_first)
        with reading_variants_of_run(weights, request.shards, request.variant, say=progress.say):
            with Activity(f"loading {weights}"):
                model = load_model(weights, **vars(request.shown), device=request.device, shards=request.shards)
            with Activity(f"opening {request.shards}"):
                work = embedding.open_work(model, request, weights=weights)
            for remark in model.remarks:
                progress.say(remark)
            record = embedding.embed(work, request.out, world=world, progress=progress)
        captions = count_noun(record["num_captions"], "caption")
        progress.say(f"done: {count_noun(record['num_clips'], 'clip')} and {captions} in {request.out}")
        if record["features"] == "embedding":
            progress.say(f'next: train search {shlex.quote(str(request.out))} "what to look for"')
    if record["num_failed"]:
        raise FailedWork(
            f"{count_noun(record['num_failed'], 'clip')} could not be decoded; see {request.out / FAILURES}. Repair "
            f"the data, remove {request.out}, and run the same command again"
        )


def _embedding_tasks() -> Tasks:
    return tasks_where(lambda spec: spec.features is not None)


def _training_folder(weights: str) -> str:
    """Return the data folder that a run was trained on.

    Raises:
        UserError: The weights are not a run, or the run has several data folders.
    """
    if not is_run(path := local_folder(weights)):
        with Activity("importing torch"):
            from clipmill.train.evaluation.opening import require_weights

        require_weights(weights, _embedding_tasks())
        raise UserError(
            f"--shards is missing: {weights} is not a run with a data folder",
            hint="add --shards DATA",
            flags=("--shards",),
        )
    settings = read_values(open_run(path).settings)
    folders = folders_of(settings.get("shards", DataSettings.shards))
    if len(folders) > 1:
        raise UserError(
            f"{weights} was trained on {len(folders)} data folders, but train embed reads only one: "
            f"{', '.join(folders)}",
            hint=f"pass one of them, such as --shards {folders[0]}",
        )
    return folders[0]


def search(
    folder: Path,
    queries: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    request: SearchRequest = SearchRequest(),  # noqa: B008 - frozen
) -> None:
    """Search embedded clips by text or by example.

    The search is exact: the query is compared with every clip, by cosine similarity.

    Examples:

        train search embedded "a dog catches a frisbee"
        train search embedded "a red circle" "a square" --page search.html
        train search embedded --like synthetic-00007_000015000

    Parameters
    ----------
    folder
        Folder written by train embed.
    queries
        Texts to search for.
    """
    from clipmill.shards.dataset import reading_variants
    from clipmill.shards.pages.templates import require_page_path
    from clipmill.train.search.folder import open_embeddings

    page = request.page
    if page is None and request.shards is not None:
        raise UserError(
            f"--shards {request.shards} has no effect without --page",
            hint="omit --shards, or add --page",
            flags=("--shards", "--page"),
        )
    if page is not None:
        require_page_path(page, flag="--page")
    embeddings = open_embeddings(folder)
    require_paths(shards=(request.shards,))
    with Activity("loading the search"):
        from clipmill.train.data.variants import choose_variants
        from clipmill.train.search.searching import describe, result_json, search_folder, write_search_page

    results = search_folder(
        embeddings, queries or (), like=request.like, top=request.top, weights=request.weights, device=request.device
    )
    num_missing = 0
    if page is not None:
        data = embeddings.record["data"]
        variants = choose_variants(
            [request.shards or str(data["shards"])],
            recorded=[{VIDEO: {"name": data["video_variant"]}}] if "video_variant" in data else [],
            subject=str(folder),
            print_note=partial(print, file=sys.stderr),
        )
        with Activity(f"writing {page}"), reading_variants(variants):
            num_missing = write_search_page(page, embeddings, results, shards=request.shards)
    if request.json:
        print(json.dumps(result_json(embeddings, results)))
    else:
        print(describe(results))
        if page is not None:
            print(f"written: {page}")
    if num_missing:
        raise FailedWork(
            f"{count_noun(num_missing, 'clip')} could not be read or decoded, and cannot be played on {page}"
        )
