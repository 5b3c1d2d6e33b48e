"""Evaluates a `--where` on the chunks and the captions of a data folder."""

import shlex
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.manifests.store import read_videos
from clipmill.shards.chunk_table import read_chunk_rows
from clipmill.shards.columns import SCORES, VIDEO, how_to_make, how_to_repair
from clipmill.shards.damage import Damaged
from clipmill.shards.moments import Moments
from clipmill.shards.reader import Variant
from clipmill.shards.scores import open_scores
from clipmill.shards.where import Where

_OF_VIDEOS = ("dataset", "split", "num_captions")
_OF_CHUNKS = ("duration_s", "width", "height")
_OF_CAPTIONS = ("text", "source", "likelihood")


def selected_chunks(
    where: Where, data_dir: Path, *, video_ids: pa.Array, video_row: NDArray[np.integer], start_ms: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """bool [chunks], True for those that `where` selects.

    Args:
        where: conditions on chunks and videos.
        video_ids: distinct ids of videos.
        video_row: [chunks], the video of each, as an index of `video_ids`.
        start_ms: [chunks], its start.

    Raises:
        UserError: it uses scores, and there are none, or some of these chunks have none.
    """
    wanted = where.columns
    columns = _of_videos(wanted, data_dir, video_ids=video_ids, video_row=video_row)
    columns["start_ms"] = pa.array(start_ms)
    if of_chunks := wanted.intersection(_OF_CHUNKS):
        chunks = _chunk_fields(data_dir)
        rows = find_chunks(chunks, video_ids=video_ids, video_row=video_row, start_ms=start_ms)
        if num_missing := int((rows < 0).sum()):
            raise UserError(
                f"--where uses {', '.join(sorted(of_chunks))} of chunks, and {counted(num_missing, 'chunk')} of "
                f"{len(rows):,} are not in the current variant of video",
                hint=f"see prep status --data {shlex.quote(str(data_dir))}",
            )
        columns |= {name: _taken(chunks[name], rows) for name in of_chunks}
    if where.uses_scores:
        of_scores = wanted.difference(columns)
        scores = open_scores(data_dir, columns={"video_id", "start_ms", *of_scores}).table
        rows = find_chunks(scores, video_ids=video_ids, video_row=video_row, start_ms=start_ms)
        if num_missing := int((rows < 0).sum()):
            raise UserError(
                f"--where uses scores, and {counted(num_missing, 'chunk')} of {len(rows):,} have none",
                hint=f"run {how_to_make(SCORES, data_dir)}, or leave scores out of --where",
            )
        columns |= {name: _taken(scores[name], rows) for name in of_scores}
    return where.mask(pa.table(columns))


def selected_captions(
    where: Where,
    data_dir: Path,
    captions: pa.Table | pa.RecordBatch,
    *,
    rows: NDArray[np.integer],
    video_ids: pa.Array,
    video_row: NDArray[np.integer],
) -> NDArray[np.bool_]:
    """bool [rows], True for the captions that `where` selects.

    Args:
        where: conditions on captions and their videos.
        captions: of the manifest; without a column `likelihood`, all likelihoods are unknown.
        rows: the captions to look at.
        video_ids: distinct ids of videos.
        video_row: [rows], the video of each, as an index of `video_ids`.
    """
    columns = _of_videos(where.columns, data_dir, video_ids=video_ids, video_row=video_row)
    for name in where.columns.intersection(_OF_CAPTIONS):
        has = name in captions.schema.names
        columns[name] = captions[name].take(pa.array(rows)) if has else pa.nulls(len(rows), pa.float32())
    return where.mask(pa.table(columns))


def caption_columns(where: Where | None, schema: pa.Schema) -> list[str]:
    """The columns of the manifest's captions that `selected_captions` needs."""
    return [] if where is None else [name for name in _OF_CAPTIONS if name in where.columns and name in schema.names]


def nothing_selected(where: Where, *, what: str) -> UserError:
    """The error for an expression that selects none of `what`."""
    return UserError(
        f"--where '{where.text}' selects none of {what}", hint="use a weaker condition, or leave these data out"
    )


def _of_videos(
    wanted: Collection[str], data_dir: Path, *, video_ids: pa.Array, video_row: NDArray[np.integer]
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Columns of videos, one entry per chunk or caption."""
    codes = pa.array(video_row, pa.int32())
    columns: dict[str, pa.Array | pa.ChunkedArray] = {"video_id": pa.DictionaryArray.from_arrays(codes, video_ids)}
    if names := [name for name in _OF_VIDEOS if name in wanted]:
        videos = read_videos(data_dir)
        rows = pc.index_in(video_ids, value_set=videos["video_id"].combine_chunks())
        for name in names:
            values = videos[name].take(rows).combine_chunks()
            is_text = pa.types.is_string(values.type)
            columns[name] = pa.DictionaryArray.from_arrays(codes, values) if is_text else values.take(codes)
    return columns


def _chunk_fields(data_dir: Path) -> pa.Table:
    """Duration and size of the chunks of the current variant of `video`."""
    names = ["video_id", "start_ms", "num_frames", "fps_num", "fps_den", "width", "height"]
    variant = Variant.open(data_dir).whole()
    try:
        rows = read_chunk_rows(variant, columns=names)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair(VIDEO, what="the table or the shard")) from error
    found = rows.table
    num_frames, fps_num, fps_den = (found[name].to_numpy() for name in ("num_frames", "fps_num", "fps_den"))
    entries, codes = rows.coded("video_id")
    coded = pa.DictionaryArray.from_arrays(pa.array(codes), entries)
    duration_s = pa.array(num_frames.astype(np.int64) * fps_den / fps_num)
    place = found.column_names.index("video_id")
    return found.set_column(place, "video_id", coded).append_column("duration_s", duration_s)


def find_chunks(
    table: pa.Table, *, video_ids: pa.Array, video_row: NDArray[np.integer], start_ms: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The row of each chunk in a table with `video_id` (a dictionary) and `start_ms`; -1 if it has none."""
    if not len(table):
        return np.full(len(video_row), -1)
    coded = table["video_id"].chunk(0)
    row_of_code = pc.fill_null(pc.index_in(coded.dictionary, value_set=video_ids), -1).to_numpy().astype(np.int64)
    table_row, table_ms = row_of_code[coded.indices.to_numpy()], table["start_ms"].to_numpy()
    moments = Moments.of(table_row, table_ms)
    keys = moments.numbers(table_row, table_ms)
    is_sorted = bool((keys[1:] > keys[:-1]).all())
    order = None if is_sorted else np.argsort(keys, kind="stable")
    wanted = moments.numbers(video_row, start_ms)
    found = np.searchsorted(keys, wanted, sorter=order)
    found = np.minimum(found, len(keys) - 1)
    rows = found if order is None else order[found]
    return np.where(keys[rows] == wanted, rows, -1)


def _taken(column: pa.ChunkedArray, rows: NDArray[np.int64]) -> pa.Array | pa.ChunkedArray:
    is_whole = len(rows) == len(column) and bool((np.diff(rows) == 1).all())
    return column if is_whole else column.take(pa.array(rows))
