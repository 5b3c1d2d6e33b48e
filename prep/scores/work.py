"""The `ChunkWork` of the column `scores`. The recipe records the versions of the libraries that compute scores."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key, split_key
from clipmill.manifests.plugins import import_late
from clipmill.prep.core.chunk_input import Chunks
from clipmill.prep.core.chunk_work import ChunkWork
from clipmill.prep.core.column import data_flags
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.work import ExtraFile
from clipmill.prep.scores.column import ScoresSettings
from clipmill.shards.columns import SCORES
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES_FIELDS
from clipmill.shards.writer import Sample

_KEY = ("video_id", "start_ms")
_LIBRARIES = {  # name in the recipe -> names of distributions; the first installed distribution is used
    "av": ("av",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"),
    "scenedetect": ("scenedetect-headless", "scenedetect"),
    "webrtcvad": ("webrtcvad-wheels", "webrtcvad"),
}


def _make(chunks: Chunks, recipe: Recipe[ScoresSettings]) -> Iterator[Sample | SourceFailure]:
    from clipmill.prep.scores.score import scores_sample  # its libraries take a second to load

    return chunks.each(partial(scores_sample, cut_threshold=recipe.settings.cut_threshold))


def installed_libraries() -> str:
    """Return the names and versions of the libraries that compute the scores, separated by commas.

    Raises:
        UserError: A library is not installed.
    """
    parts = []
    for name, distributions in _LIBRARIES.items():
        for distribution in distributions:
            with suppress(PackageNotFoundError):
                parts.append(f"{name} {version(distribution)}")
                break
        else:
            raise UserError(f"{distributions[0]} is not installed", hint="install clipmill[prep]")
    return ", ".join(parts)


def version_mismatch(required_libraries: str) -> str | None:
    """Return the reason why this machine must not score chunks for a plan; None if the machine may.

    Args:
        required_libraries: Result of `installed_libraries` in the recipe of the plan.
    """
    try:
        installed = installed_libraries()
    except UserError as error:
        return str(error)
    return (
        None if installed == required_libraries else f"it has {installed}, but the plan requires {required_libraries}"
    )


def _table_problem(variant: Variant) -> str | None:
    """Return the reason why the merged table is unusable; None if it is usable, or not needed (all chunks failed)."""
    from clipmill.shards.scores import score_table_problem

    return score_table_problem(variant) if any(commit.files for commit in variant.commits.values()) else None


def _sample_facts(data_dir: Path, key: str) -> dict[str, Any]:
    """Return `duplicate_of`: the key of the earlier chunk that the chunk duplicates, or None; {} if unknown."""
    from clipmill.shards.scores import open_scores

    video_id, start_ms = split_key(key)
    try:
        table = open_scores(data_dir, columns=("video_id", "start_ms", "duplicate_of")).table
    except UserError:
        return {}
    is_chunk = pc.and_(pc.equal(table["video_id"], video_id), pc.equal(table["start_ms"], start_ms))
    rows = [row for row in table["duplicate_of"].filter(is_chunk).to_pylist() if row >= 0]
    return {"duplicate_of": next((chunk_key(*(table[name][row].as_py() for name in _KEY)) for row in rows), None)}


WORK = ChunkWork(
    fields=SCORES_FIELDS,
    extension="scores.json",
    make=_make,
    resolve=lambda settings: (settings, {"libraries": installed_libraries()}),
    name=lambda recipe: f"cut{recipe.settings.cut_threshold:g}".replace("+", ""),
    needs=("clipmill.prep.scores.work:version_mismatch", "libraries"),
    memory_gb=0.5,  # measured (benchmarks/README.md): 0.16 GB
    extra_files=(ExtraFile(CHUNKS_FILE, _table_problem, import_late("clipmill.shards.scores:publish_score_table")),),
    sample_facts=_sample_facts,
    write_page=import_late("clipmill.prep.scores.page:write_scores_page"),
    next_command=lambda data: ["prep", "inspect", "--column", SCORES, "--html", "scores.html", *data_flags(data)],
)
