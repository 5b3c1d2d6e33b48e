"""What the column `scores` makes of a chunk, and of what else its recipe and its records consist."""

from collections.abc import Iterator
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
_LIBRARIES = {  # by the names under which they are recorded: distributions, the first that is installed counts
    "av": ("av",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python"),
    "scenedetect": ("scenedetect-headless", "scenedetect"),
    "webrtcvad": ("webrtcvad-wheels", "webrtcvad"),
}


def _make(chunks: Chunks, recipe: Recipe[ScoresSettings]) -> Iterator[Sample | SourceFailure]:
    from clipmill.prep.scores.sample import scores_sample  # the libraries that measure take a second to load

    return chunks.each(partial(scores_sample, cut_threshold=recipe.settings.cut_threshold))


def _resolve(settings: ScoresSettings) -> tuple[ScoresSettings, dict[str, Any]]:
    return settings, {"libraries": installed_libraries()}


def installed_libraries() -> str:
    """Return the versions of the libraries whose methods make the scores, on one line.

    Raises:
        UserError: one of them is not installed.
    """
    return ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)


def _version(name: str) -> str:
    for distribution in _LIBRARIES[name]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise UserError(f"{_LIBRARIES[name][0]} is not installed", hint="install clipmill[prep]")


def version_mismatch(planned: str) -> str | None:
    """Return why this machine must not score chunks of a plan with the libraries `planned`, or None."""
    try:
        found = installed_libraries()
    except UserError as error:
        return str(error)
    return None if found == planned else f"its libraries are {found}; the plan requires {planned}"


def _table_problem(variant: Variant) -> str | None:
    """Return why the merged table cannot be used; None if it can, or if the variant has no scores to merge."""
    from clipmill.shards.scores import score_table_problem

    return score_table_problem(variant) if any(commit.files for commit in variant.commits.values()) else None


def _sample_facts(data_dir: Path, key: str) -> dict[str, Any]:
    """Return the key of the chunk that a chunk nearly duplicates; None if it is unique, nothing if that is unknown."""
    from clipmill.shards.scores import open_scores

    video_id, start_ms = split_key(key)
    try:
        table = open_scores(data_dir, columns=("video_id", "start_ms", "duplicate_of")).table
    except UserError:
        return {}
    is_chunk = pc.and_(pc.equal(table["video_id"], video_id), pc.equal(table["start_ms"], start_ms))
    first = [row for row in table["duplicate_of"].filter(is_chunk).to_pylist() if row >= 0]
    return {"duplicate_of": next((chunk_key(*(table[name][row].as_py() for name in _KEY)) for row in first), None)}


WORK = ChunkWork(
    fields=SCORES_FIELDS,
    extension="scores.json",
    make=_make,
    resolve=_resolve,
    name=lambda recipe: f"cut{recipe.settings.cut_threshold:g}".replace("+", ""),
    needs=("clipmill.prep.scores.work:version_mismatch", "libraries"),
    memory_gb=0.5,  # measured (benchmarks/README.md): 0.16 GB
    extra_files=(ExtraFile(CHUNKS_FILE, _table_problem, import_late("clipmill.shards.scores:publish_score_table")),),
    sample_facts=_sample_facts,
    write_page=import_late("clipmill.prep.scores.page:write_scores_page"),
    next_command=lambda data: ["prep", "inspect", "--column", SCORES, "--html", "scores.html", *data_flags(data)],
)
