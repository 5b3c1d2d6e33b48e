"""The page of `prep inspect --column scores --html`: the distribution of each score, and pictures along it.

It is self-contained: pictures are JPEG files in it, and its content security policy forbids everything else.
"""

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.manifests.units import short_number
from clipmill.prep.core.histograms import HISTOGRAM_STYLE, histogram, histogram_html
from clipmill.prep.core.pages import PageRequest, page_head, publish_page, require_page_path
from clipmill.prep.core.report import Report
from clipmill.prep.scores.distribution import evenly, landmarks
from clipmill.prep.scores.pictures import Chunks, Thumbnail
from clipmill.shards.reader import Variant
from clipmill.shards.scores import open_scores
from clipmill.shards.selection import selected_chunks
from clipmill.shards.where import parse_where

NUM_SELECTED = 12  # pictures of chunks that a selection keeps, and of those that it drops
NUM_CUT_CHUNKS = 8  # chunks whose cuts are shown: those with the most
NUM_CUT_PICTURES = 6
_NUM_TIMES = 24


@dataclass(frozen=True)
class Score:
    """How a score is shown. `bounds` is its range, or None if it has no upper bound; a count is a whole number."""

    name: str
    title: str
    meaning: str
    bounds: tuple[float, float] | None = None
    is_count: bool = False


SCORES = (
    Score("motion", "Motion", "mean displacement, frame heights per second"),
    Score("camera_motion", "Camera motion", "the part of it that one similarity transform explains"),
    Score("object_motion", "Object motion", "the rest of it"),
    Score("sharpness", "Sharpness", "variance of the Laplacian of the luma"),
    Score("brightness", "Brightness", "mean luma, 0 to 1", (0.0, 1.0)),
    Score("black", "Black", "share of the time", (0.0, 1.0)),
    Score("frozen", "Frozen", "share of the time", (0.0, 1.0)),
    Score("letterbox", "Letterbox", "share of the picture that black bars cover", (0.0, 1.0)),
    Score("cuts", "Cuts", "number of shot cuts", is_count=True),
    Score("speech", "Speech", "share of the time, of chunks with audio", (0.0, 1.0)),
)


@dataclass(frozen=True)
class Selection:
    """What an expression keeps: bool [chunks], in the order of the table."""

    expression: str
    is_kept: NDArray[np.bool_]


def write_scores_page(variant: Variant, request: PageRequest) -> Report:
    """Publish the page of the current variant; with an expression it also shows what that keeps and drops.

    Raises:
        UserError: the page cannot be written, `variant` is not the current one, its merged table is missing or stale,
            or the request is not one for this page.
    """
    require_page_path(request.path)
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
    lines = _page(
        chunks,
        title=variant.directory.name,
        settings=f"cut_threshold {variant.recipe['cut_threshold']:g}; {variant.recipe['libraries']}",
        selection=selection,
        on_picture=request.on_sample,
    )
    publish_page(request.path, lines)
    num_chunks, html = scores.table.num_rows, os.fspath(request.path)
    if selection is None:
        return Report(f"{html}: {counted(num_chunks, 'chunk')}", {"html": html, "num_chunks": num_chunks})
    num_kept = int(selection.is_kept.sum())
    said = f"--where keeps {num_kept:,} of {counted(num_chunks, 'chunk')}"
    said += "" if num_kept else "; see the distributions on the page for values that occur"
    return Report(f"{html}: {said}", {"html": html, "num_chunks": num_chunks, "num_kept": num_kept})


def _select(text: str, table: pa.Table, *, data_dir: Path) -> Selection:
    where = parse_where(text)
    where.require(("chunk", "video"), because="the page shows chunks")
    coded = table["video_id"].chunk(0)
    is_kept = selected_chunks(
        where,
        data_dir,
        video_ids=coded.dictionary,
        video_row=coded.indices.to_numpy(),
        start_ms=table["start_ms"].to_numpy(),
    )
    return Selection(where.text, is_kept)


def _page(
    chunks: Chunks,
    *,
    title: str,
    settings: str,
    selection: Selection | None,
    on_picture: Callable[[int, int], None],
) -> Iterator[str]:
    columns = {score.name: _values(chunks.table[score.name]) for score in SCORES}
    picked = {score.name: landmarks(columns[score.name]) for score in SCORES}
    cut = _most_cut(columns["cuts"])
    groups = [] if selection is None else _groups(selection)
    middles = [*(row for marks in picked.values() for _, row in marks), *(row for _, rows in groups for row in rows)]
    pictures = chunks.thumbnails(middles, {row: _cut_frames_s(chunks, row) for row in cut}, on_picture=on_picture)
    num_videos = len(set(chunks.table["video_id"].chunk(0).indices.to_pylist()))
    summary = f"{counted(chunks.table.num_rows, 'chunk')} of {counted(num_videos, 'video')}"
    yield from (
        page_head(f"Scores: {title}", style=HISTOGRAM_STYLE + STYLE),
        f"<header><h1>Scores: {escape(title)}</h1><p>{escape(summary)}</p><p><code>{escape(settings)}</code></p>",
        "</header><main>",
    )
    if selection is not None:
        yield from _selection_html(selection, groups, chunks=chunks, pictures=pictures)
    for score in SCORES:
        marks = [(name, row, columns[score.name][row]) for name, row in picked[score.name]]
        yield from _score_html(score, columns[score.name], marks, chunks=chunks, pictures=pictures, selection=selection)
    if cut:
        yield from _cuts_html(cut, chunks=chunks, pictures=pictures)
    yield "</main></body></html>"


def _values(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return a column as float64, NaN where unknown."""
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)


def _most_cut(cuts: NDArray[np.float64]) -> list[int]:
    in_order = np.argsort(-np.nan_to_num(cuts), kind="stable")[:NUM_CUT_CHUNKS]
    return [row for row in in_order.tolist() if cuts[row] > 0]


def _cut_frames_s(chunks: Chunks, row: int) -> list[float]:
    return evenly(chunks.table["cut_times_s"][row].as_py(), count=NUM_CUT_PICTURES)


def _groups(selection: Selection) -> list[tuple[str, list[int]]]:
    return [
        (name, evenly(np.flatnonzero(selection.is_kept == is_kept).tolist(), count=NUM_SELECTED))
        for name, is_kept in (("kept", True), ("dropped", False))
    ]


def _selection_html(
    selection: Selection,
    groups: Sequence[tuple[str, list[int]]],
    *,
    chunks: Chunks,
    pictures: dict[tuple[int, float | None], Thumbnail],
) -> Iterator[str]:
    num_kept, total = int(selection.is_kept.sum()), len(selection.is_kept)
    share = f"{100 * num_kept / total:.1f} %" if total else "none"
    yield f'<section><h2>Selection</h2><p><code class="where">{escape(selection.expression)}</code></p>'
    yield f"<p>keeps {num_kept:,} of {counted(total, 'chunk')} ({share}), and drops {total - num_kept:,}</p>"
    for name, rows in groups:
        yield f'<h3 class="{name}">{name}</h3>'
        yield from _row_html([(None, row, None) for row in rows], chunks=chunks, pictures=pictures)
    yield "</section>"


def _score_html(
    score: Score,
    values: NDArray[np.float64],
    marks: Sequence[tuple[str | None, int, float | None]],
    *,
    chunks: Chunks,
    pictures: dict[tuple[int, float | None], Thumbnail],
    selection: Selection | None,
) -> Iterator[str]:
    is_known = ~np.isnan(values)
    known = values[is_known]
    num_unknown = len(values) - len(known)
    unknown = f"; {num_unknown:,} unknown" if num_unknown else ""
    yield f'<section id="{score.name}"><h2>{score.title} <code>{score.name}</code></h2>'
    yield f"<p>{score.meaning}{unknown}</p>"
    if len(known):
        is_kept = None if selection is None else selection.is_kept[is_known]
        found = histogram(known, bounds=score.bounds, is_count=score.is_count, is_kept=is_kept)
        yield from histogram_html(found, title=score.title)
        yield from _row_html(marks, chunks=chunks, pictures=pictures)
    yield "</section>"


def _row_html(
    marks: Sequence[tuple[str | None, int, float | None]],
    *,
    chunks: Chunks,
    pictures: dict[tuple[int, float | None], Thumbnail],
) -> Iterator[str]:
    yield '<div class="row">'
    for name, row, value in marks:
        of_value = "" if value is None else f"<b>{escape(short_number(value))}</b> {escape(name or '')}"
        yield f"<article>{_image(pictures[row, None])}<p>{of_value}</p><p><code>{escape(chunks.key(row))}</code></p>"
        yield "</article>"
    yield "</div>"


def _cuts_html(
    rows: Sequence[int], *, chunks: Chunks, pictures: dict[tuple[int, float | None], Thumbnail]
) -> Iterator[str]:
    yield '<section id="cut_times_s"><h2>Cut times <code>cut_times_s</code></h2>'
    yield "<p>the chunks with the most cuts: position of each cut in the chunk, and the first frames of new shots</p>"
    for row in rows:
        times = chunks.table["cut_times_s"][row].as_py()
        length = chunks.duration_s(row) or max(times)
        places = (f"{1000 * time_s / length:.1f}" for time_s in times)
        ticks = "".join(f'<rect class="kept" x="{place}" y="0" width="4" height="20"/>' for place in places)
        listed = ", ".join(f"{time_s:.2f}" for time_s in times[:_NUM_TIMES])
        more = f" and {len(times) - _NUM_TIMES} more" if len(times) > _NUM_TIMES else ""
        what = f"{counted(len(times), 'cut')} in {length:.1f} s"
        yield f'<div class="chunk"><h3><code>{escape(chunks.key(row))}</code></h3>'
        yield f'<svg class="line" viewBox="0 0 1004 20" preserveAspectRatio="none" role="img"><title>{what}</title>'
        yield f'<rect class="all" x="0" y="8" width="1004" height="4"/>{ticks}</svg>'
        yield f'<p>{what}: at {listed}{more} s</p><div class="row">'
        for time_s in _cut_frames_s(chunks, row):
            yield f"<article>{_image(pictures[row, time_s])}<p><b>{time_s:.2f} s</b></p></article>"
        yield "</div></div>"
    yield "</section>"


def _image(picture: Thumbnail) -> str:
    if picture.jpeg is None:
        return f'<p class="problem">{escape(picture.problem or "")}</p>'
    encoded = base64.b64encode(picture.jpeg).decode()
    return f'<img alt="" width="{picture.width}" height="{picture.height}" src="data:image/jpeg;base64,{encoded}">'


STYLE = """
:root { color-scheme: light dark; --paper: #f6f6f4; --card: #fff; --ink: #1d1d1b; --soft: #6b6b66; --line: #e2e2dc;
  --alarm: #b3261e; --bar: #2f6fb0; --rest: #c3c3bc; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #141413; --card: #1e1e1c; --ink: #ececE6; --soft: #9c9c95; --line: #32322e; --alarm: #f2b8b5;
    --bar: #6aa5dd; --rest: #4c4c46; } }
* { box-sizing: border-box; margin: 0; }
body { background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; padding: 24px;
  max-width: 1400px; margin: 0 auto; }
h1 { font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
header p, section > p { color: var(--soft); margin-top: 4px; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin-top: 16px; padding: 16px; }
h2 { font-size: 16px; font-weight: 600; }
h3 { font-size: 13px; font-weight: 600; margin-top: 12px; }
code { font: 12px/1.4 ui-monospace, monospace; color: var(--soft); overflow-wrap: anywhere; }
.where { color: var(--ink); font-size: 13px; }
.line { display: block; width: 100%; height: 14px; margin-top: 6px; }
rect.kept { fill: var(--bar); }
rect.all { fill: var(--rest); }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(176px, 45%), 1fr)); gap: 10px;
  margin-top: 8px; }
article img { display: block; width: 100%; height: auto; aspect-ratio: 16 / 9; object-fit: contain; background: #000;
  border-radius: 4px; }
article p { font-size: 12px; font-variant-numeric: tabular-nums; }
h3.kept { color: var(--bar); }
h3.dropped { color: var(--soft); }
.chunk { margin-top: 12px; }
.problem { color: var(--alarm); overflow-wrap: anywhere; }
"""
