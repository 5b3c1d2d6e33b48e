"""The page of `prep inspect --column scores --html`: the distribution of each score, and pictures along it.

It is self-contained: pictures are JPEG files in it, and its content security policy forbids everything else.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.prep.core.pages import PageRequest, publish_page
from clipmill.prep.core.report import Report
from clipmill.prep.scores.distribution import landmarks
from clipmill.prep.scores.pictures import Chunks, Thumbnail
from clipmill.shards.pages.figures import evenly_spaced_items, histogram
from clipmill.shards.pages.templates import require_page_path
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES, Score
from clipmill.shards.scores import open_scores
from clipmill.shards.selection import selected_chunks
from clipmill.shards.where import parse_where

NUM_SELECTED = 12  # pictures of chunks that a selection keeps, and of those that it drops
NUM_CUT_CHUNKS = 8  # chunks whose cuts are shown: those with the most
NUM_CUT_PICTURES = 6
SHOWN = tuple(score for score in SCORES if score.title)


@dataclass(frozen=True)
class Selection:
    """What an expression keeps: bool [chunks], in the order of the table."""

    expression: str
    is_kept: NDArray[np.bool_]

    @property
    def num_kept(self) -> int:
        """Number of chunks that are kept."""
        return int(self.is_kept.sum())

    @property
    def share(self) -> float:
        """Share of the chunks that are kept."""
        return self.num_kept / max(1, len(self.is_kept))


def write_scores_page(variant: Variant, request: PageRequest) -> Report:
    """Publish the page of the current variant; with an expression it also shows what that keeps and drops.

    Raises:
        UserError: the page cannot be written, `variant` is not the current one, its merged table is missing or stale,
            or the request is not one for this page.
    """
    require_page_path(request.path, flag="--html")
    if request.num_samples is not None:
        raise UserError(
            "--chunks does not apply to column scores", hint="the page shows the distributions of all chunks; omit it"
        )
    data_dir = variant.directory.parent.parent
    scores = open_scores(data_dir)
    if scores.variant.directory != variant.directory:
        raise UserError(
            f"--html shows the current variant of scores, {scores.variant.directory.name}", hint="omit --variant"
        )
    chunks = Chunks(scores.table, video=Variant.open(data_dir))
    selection = None if request.where is None else _select(request.where, scores.table, data_dir=data_dir)
    publish_page(
        request.path,
        Path(__file__).with_name("scores.html.j2"),
        settings=f"{variant.directory.name}: cut_threshold {variant.recipe['cut_threshold']:g}; "
        f"{variant.recipe['libraries']}",
        **_page(chunks, selection=selection, on_picture=request.on_sample),
    )
    num_chunks, html = scores.table.num_rows, os.fspath(request.path)
    if selection is None:
        return Report(f"{html}: {count_noun(num_chunks, 'chunk')}", {"html": html, "num_chunks": num_chunks})
    num_kept = selection.num_kept
    said = f"--where keeps {num_kept:,} of {count_noun(num_chunks, 'chunk')}"
    said += "" if num_kept else "; see the distributions on the page for values that occur"
    return Report(f"{html}: {said}", {"html": html, "num_chunks": num_chunks, "num_kept": num_kept})


def _select(text: str, table: pa.Table, *, data_dir: Path) -> Selection:
    where = parse_where(text)
    where.require(("chunk", "video", "label"), because="the page shows chunks")
    coded = table["video_id"].chunk(0)
    is_kept = selected_chunks(
        where,
        data_dir,
        video_ids=coded.dictionary,
        video_row=coded.indices.to_numpy(),
        start_ms=table["start_ms"].to_numpy(),
    )
    return Selection(where.text, is_kept)


def _page(chunks: Chunks, *, selection: Selection | None, on_picture: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the values of the template."""
    columns = {score.name: _values(chunks.table[score.name]) for score in SHOWN}
    picked = {score.name: landmarks(columns[score.name]) for score in SHOWN}
    cut = _most_cut(columns["cuts"])
    groups = [] if selection is None else _groups(selection)
    middles = [*(row for marks in picked.values() for _, row in marks), *(row for _, rows in groups for row in rows)]
    pictures = chunks.thumbnails(middles, {row: _cut_frames_s(chunks, row) for row in cut}, on_picture=on_picture)

    def mark(row: int, name: str = "", value: float | None = None) -> dict[str, Any]:
        found = {"picture": pictures[row, None], "key": chunks.key(row), "copy_of": chunks.copy_of(row)}
        return {**found, "name": name, "value": value}

    num_videos = len(set(chunks.table["video_id"].chunk(0).indices.to_pylist()))
    return {
        "summary": f"{count_noun(chunks.table.num_rows, 'chunk')} of {count_noun(num_videos, 'video')}",
        "selection": selection,
        "groups": [(name, [mark(row) for row in rows]) for name, rows in groups],
        "scores": [
            {
                "score": score,
                **_distribution(score, columns[score.name], selection=selection),
                "marks": [mark(row, name, columns[score.name][row]) for name, row in picked[score.name]],
            }
            for score in SHOWN
        ],
        "cut": [_cuts(chunks, row, pictures=pictures) for row in cut],
    }


def _distribution(score: Score, values: NDArray[np.float64], *, selection: Selection | None) -> dict[str, Any]:
    is_known = ~np.isnan(values)
    found = None
    if is_known.any():
        is_kept = None if selection is None else selection.is_kept[is_known]
        found = histogram(values[is_known], bounds=score.bounds, is_count=score.is_count, is_kept=is_kept)
    return {"histogram": found, "num_unknown": int((~is_known).sum())}


def _cuts(chunks: Chunks, row: int, *, pictures: Mapping[tuple[int, float | None], Thumbnail]) -> dict[str, Any]:
    times_s = chunks.table["cut_times_s"][row].as_py()
    return {
        "key": chunks.key(row),
        "times_s": times_s,
        "seconds": chunks.duration_s(row) or max(times_s),
        "pictures": [(time_s, pictures[row, time_s]) for time_s in _cut_frames_s(chunks, row)],
    }


def _values(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return a column as float64, NaN where unknown."""
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)


def _most_cut(cuts: NDArray[np.float64]) -> list[int]:
    in_order = np.argsort(-np.nan_to_num(cuts), kind="stable")[:NUM_CUT_CHUNKS]
    return [row for row in in_order.tolist() if cuts[row] > 0]


def _cut_frames_s(chunks: Chunks, row: int) -> list[float]:
    return evenly_spaced_items(chunks.table["cut_times_s"][row].as_py(), at_most=NUM_CUT_PICTURES)


def _groups(selection: Selection) -> list[tuple[str, list[int]]]:
    return [
        (name, evenly_spaced_items(np.flatnonzero(selection.is_kept == is_kept).tolist(), at_most=NUM_SELECTED))
        for name, is_kept in (("kept", True), ("dropped", False))
    ]
