"""Write the page of `prep inspect --column scores --html`: the distribution of each score, with example pictures.

The page is self-contained: its pictures are embedded JPEG files, and its content security policy forbids all external
resources.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.prep.core.chunk_content import frame_rate, read_chunk
from clipmill.prep.core.chunk_input import seconds_of
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.plan import is_readable
from clipmill.prep.core.report import publish_page
from clipmill.prep.core.work import PageRequest, Report
from clipmill.shards.pages.figures import data_uri, evenly_spaced_items, histogram
from clipmill.shards.pages.templates import require_page_path
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.shards.score_fields import SCORES, Score
from clipmill.shards.scores import key_of_row, open_scores
from clipmill.shards.selection import selected_chunks
from clipmill.shards.where import parse_where

_HEIGHT_PX = 108
_JPEG_QUALITY = 80
NUM_SELECTED = 12  # maximum number of kept chunks, and of dropped chunks, whose pictures are shown
NUM_CUT_CHUNKS = 8  # maximum number of chunks whose cuts are shown; chunks with the most cuts come first
NUM_CUT_PICTURES = 6  # maximum number of pictures of cuts per chunk
SECTIONS = tuple(score for score in SCORES if score.title)
_LANDMARKS = (("lowest", 0.0), ("1st quartile", 0.25), ("median", 0.5), ("3rd quartile", 0.75), ("highest", 1.0))


@dataclass(frozen=True)
class Thumbnail:
    """A picture as a JPEG file in a data URI, or the reason why the picture is missing."""

    source: str | None
    width: int = 0
    height: int = 0
    problem: str | None = None


class Chunks:
    """The rows of the merged table of `scores`, and the chunks that they describe.

    Args:
        table: Merged table (clipmill.shards.scores).
        video: Variant of `video` that was scored.
    """

    def __init__(self, table: pa.Table, *, video: Variant) -> None:
        self.table = table
        self._shards = [shard for shard in video.shards() if is_readable(shard)]
        self._locations: dict[int, tuple[CommittedShard, int] | None] = {}

    def duplicate_key(self, row: int) -> str | None:
        """Return the key of the earlier chunk that a chunk duplicates; None if there is no such chunk."""
        original_row = self.table["duplicate_of"][row].as_py()
        return None if original_row < 0 else key_of_row(self.table, original_row)

    def duration_s(self, row: int) -> float | None:
        """Return the duration of a chunk in seconds; None if the chunk is not in the video column, or is damaged."""
        location = self._find(row)
        return None if location is None else float(seconds_of(location[0].index, location[1]))

    def thumbnails(
        self,
        middles: Collection[int],
        moments_s: Mapping[int, Sequence[float]],
        *,
        on_picture: Callable[[int, int], None],
    ) -> dict[tuple[int, float | None], Thumbnail]:
        """Return pictures of chunks, keyed by (row, time in the chunk in seconds). The time of a middle frame is None.

        Args:
            middles: Rows whose middle frame is shown.
            moments_s: Times of additional frames in seconds, keyed by row.
            on_picture: Function that is called with (number of chunks done, total number of chunks).
        """
        pictures: dict[tuple[int, float | None], Thumbnail] = {}
        rows = dict.fromkeys([*middles, *moments_s])
        for num_done, row in enumerate(rows, 1):
            moments: list[float | None] = [*([None] if row in middles else []), *moments_s.get(row, ())]
            pictures |= {(row, moment): picture for moment, picture in self._decode_chunk(row, moments).items()}
            on_picture(num_done, len(rows))
        return pictures

    def _decode_chunk(self, row: int, moments: Sequence[float | None]) -> dict[float | None, Thumbnail]:
        """Decode a chunk once and return its pictures, or the reason why they are missing, keyed by time."""
        location = self._find(row)
        if location is None:
            return dict.fromkeys(moments, Thumbnail(None, problem="not in the video column, or damaged"))
        shard, index_row = location
        fps, last_frame = frame_rate(shard.index, index_row), shard.index["num_frames"][index_row].as_py() - 1
        moment_frames = {
            moment: (last_frame + 1) // 2 if moment is None else min(last_frame, round(Fraction(moment) * fps))
            for moment in moments
        }
        frames = sorted(set(moment_frames.values()))
        pictures: dict[int, Thumbnail] = {}
        try:
            for frame, picture in zip(frames, read_chunk(shard, index_row).frames(frames), strict=True):
                width = max(2, round(picture.width * _HEIGHT_PX / picture.height))
                small_picture = picture.reformat(width=width, height=_HEIGHT_PX, format="bgr24", interpolation="AREA")
                _, jpeg = cv2.imencode(".jpg", small_picture.to_ndarray(), [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
                pictures[frame] = Thumbnail(data_uri(jpeg.tobytes(), "image/jpeg"), width, _HEIGHT_PX)
        except SourceFailure as failure:
            return dict.fromkeys(moments, Thumbnail(None, problem=f"cannot be shown: {failure.message}"))
        return {moment: pictures[frame] for moment, frame in moment_frames.items()}

    def _find(self, row: int) -> tuple[CommittedShard, int] | None:
        """Return the shard of a chunk and the row in the index of the shard; None if no shard contains the chunk."""
        if row not in self._locations:
            key = key_of_row(self.table, row)
            locations = ((shard, pc.index(shard.index["key"], key).as_py()) for shard in self._shards)
            self._locations[row] = next((location for location in locations if location[1] >= 0), None)
        return self._locations[row]


@dataclass(frozen=True)
class Selection:
    """The chunks that an expression keeps.

    Attributes:
        expression: Text of the expression.
        is_kept: True for each row of the table that is kept, bool [chunks].
    """

    expression: str
    is_kept: NDArray[np.bool_]

    @property
    def num_kept(self) -> int:
        """Number of kept chunks."""
        return int(self.is_kept.sum())

    @property
    def fraction(self) -> float:
        """Fraction of kept chunks."""
        return self.num_kept / max(1, len(self.is_kept))


def write_scores_page(variant: Variant, request: PageRequest) -> Report:
    """Publish the page of the current variant. With `request.where`, the page also shows kept and dropped chunks.

    Raises:
        UserError: The page cannot be written; `variant` is not the current variant; the merged table is missing, stale
            or damaged; `request.num_samples` is set; or `request.where` cannot be applied to chunks.
    """
    require_page_path(request.path, flag="--html")
    if request.num_samples is not None:
        raise UserError(
            "--chunks has no effect for the column scores, whose page shows the distributions of all chunks",
            hint="omit --chunks",
        )
    data_dir = variant.directory.parent.parent
    scores = open_scores(data_dir)
    if scores.variant.directory != variant.directory:
        raise UserError(
            f"--html shows only the current variant of scores, {scores.variant.directory.name}", hint="omit --variant"
        )
    chunks = Chunks(scores.table, video=Variant.open(data_dir))
    selection = None
    if request.where is not None:
        where = parse_where(request.where, data_dir=data_dir)
        where.require(("chunk", "video", "label"), because="the page shows chunks")
        video_column = scores.table["video_id"].chunk(0)
        is_kept = selected_chunks(
            where,
            data_dir,
            video_ids=video_column.dictionary,
            video_row=video_column.indices.to_numpy(),
            start_ms=scores.table["start_ms"].to_numpy(),
        )
        selection = Selection(where.text, is_kept)
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
    message = f"--where keeps {num_kept:,} of {count_noun(num_chunks, 'chunk')}"
    message += "" if num_kept else "; the distributions on the page show which values occur"
    return Report(f"{html}: {message}", {"html": html, "num_chunks": num_chunks, "num_kept": num_kept})


def _page(chunks: Chunks, *, selection: Selection | None, on_picture: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the values for the template."""
    # Unknown values become NaN.
    columns = {
        score.name: np.asarray(chunks.table[score.name].cast(pa.float64()).to_numpy(), np.float64) for score in SECTIONS
    }
    score_landmarks = {score.name: landmarks(columns[score.name]) for score in SECTIONS}
    num_cuts = columns["cuts"]
    first_rows = np.argsort(-np.nan_to_num(num_cuts), kind="stable")[:NUM_CUT_CHUNKS].tolist()
    cut_rows = [row for row in first_rows if num_cuts[row] > 0]
    groups = (
        []
        if selection is None
        else [
            (name, evenly_spaced_items(np.flatnonzero(selection.is_kept == is_kept).tolist(), at_most=NUM_SELECTED))
            for name, is_kept in (("kept", True), ("dropped", False))
        ]
    )
    middles = [row for marks in score_landmarks.values() for _, row in marks]
    middles += [row for _, rows in groups for row in rows]
    cut_times_s = {row: _choose_cut_times_s(chunks, row) for row in cut_rows}
    pictures = chunks.thumbnails(middles, cut_times_s, on_picture=on_picture)

    def describe_chunk(row: int, name: str = "", value: float | None = None) -> dict[str, Any]:
        chunk = {
            "picture": pictures[row, None],
            "key": key_of_row(chunks.table, row),
            "copy_of": chunks.duplicate_key(row),
        }
        return {**chunk, "name": name, "value": value}

    num_videos = len(set(chunks.table["video_id"].chunk(0).indices.to_pylist()))
    return {
        "summary": f"{count_noun(chunks.table.num_rows, 'chunk')} of {count_noun(num_videos, 'video')}",
        "selection": selection,
        "groups": [(name, [describe_chunk(row) for row in rows]) for name, rows in groups],
        "scores": [
            {
                "score": score,
                **_distribution(score, columns[score.name], selection=selection),
                "marks": [
                    describe_chunk(row, name, columns[score.name][row]) for name, row in score_landmarks[score.name]
                ],
            }
            for score in SECTIONS
        ],
        "cut": [
            {
                "key": key_of_row(chunks.table, row),
                "times_s": times_s,
                "seconds": chunks.duration_s(row) or max(times_s),
                "pictures": [(time_s, pictures[row, time_s]) for time_s in cut_times_s[row]],
            }
            for row, times_s in ((row, chunks.table["cut_times_s"][row].as_py()) for row in cut_rows)
        ],
    }


def _distribution(score: Score, values: NDArray[np.float64], *, selection: Selection | None) -> dict[str, Any]:
    is_known = ~np.isnan(values)
    values_histogram = None
    if is_known.any():
        is_kept = None if selection is None else selection.is_kept[is_known]
        values_histogram = histogram(values[is_known], bounds=score.bounds, is_count=score.is_count, is_kept=is_kept)
    return {"histogram": values_histogram, "num_unknown": int((~is_known).sum())}


def _choose_cut_times_s(chunks: Chunks, row: int) -> list[float]:
    return evenly_spaced_items(chunks.table["cut_times_s"][row].as_py(), at_most=NUM_CUT_PICTURES)


def landmarks(values: NDArray[np.float64]) -> list[tuple[str, int]]:
    """Return (name, row) of the chunks with the lowest value, the quartiles and the highest value.

    Each chunk is returned only once, so there are fewer than five landmarks if there are few chunks.

    Args:
        values: Value of each chunk, float64 [chunks]; NaN if unknown.
    """
    known_rows = np.flatnonzero(~np.isnan(values))
    sorted_rows = known_rows[np.argsort(values[known_rows], kind="stable")]
    names: dict[int, str] = {}
    for name, fraction in _LANDMARKS if len(sorted_rows) else ():
        names.setdefault(int(sorted_rows[round(fraction * (len(sorted_rows) - 1))]), name)
    return [(name, row) for row, name in names.items()]
