"""`chunks_table`: the chunks of a data folder with their captions, labels and scores, as one table (docs/python.md)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.store import read_captions, read_videos
from clipmill.shards.columns import VIDEO, how_to_repair
from clipmill.shards.dataset import current_variant
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import NUMBERS
from clipmill.shards.scores import SCORES, open_scores
from clipmill.shards.selection import find_chunks
from clipmill.train.data.arguments import names_arguments
from clipmill.train.data.chunk_table import ChunkTable, chunk_table, rows_of
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import US_PER_S

_MS_PER_S, _LABEL = 1000, "label_"


@names_arguments
def chunks_table(data: str | Path, *, cache: Path | None = None) -> pa.Table:
    """The chunks of all splits as a pyarrow table, ordered by video and time; no video is decoded.

    Columns: key, video_id, split, begin_s, end_s (seconds in the video); captions (list of strings: those that are on
    show during the chunk, also in part, in the order of caption_id) and caption_id (list of int64); each label column
    `label_NAME` (list of strings, one per caption); and with `prep scores`, each score and `duplicate` (bool), null
    for chunks without scores.

    Args:
        data: data folder that prep made, as a path or an address.
        cache: folder for copies of remote data. Default: the user's cache folder.

    Raises:
        UserError: there is no such data, a table of it is damaged, or the scores are of other chunks.
    """
    folder = open_data_folder(str(data), cache=cache)
    data_dir = folder.path
    videos = read_videos(data_dir, columns=["video_id", "split"])
    video_ids = videos["video_id"].combine_chunks()
    try:
        chunks, _ = chunk_table(Variant.open(data_dir, tars=folder.tars).require_complete(), video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair(VIDEO)) from error
    ids = video_ids.take(pa.array(chunks.video_row))
    starts_ms = chunks.start_ms.tolist()
    columns = {
        "key": pa.array([chunk_key(one, start) for one, start in zip(ids.to_pylist(), starts_ms, strict=True)]),
        "video_id": ids,
        "split": videos["split"].combine_chunks().take(pa.array(chunks.video_row)),
        "begin_s": pa.array(chunks.start_ms / _MS_PER_S),
        "end_s": pa.array(chunks.end_us / US_PER_S),
        **dict(_captions(data_dir, chunks, video_ids)),
    }
    if current_variant(data_dir, SCORES) is not None:
        if folder.tars is not None:
            folder.tars.files.copy_column(SCORES)
        columns |= _scores(data_dir, chunks, video_ids)
    return pa.table(columns)


def _captions(data_dir: Path, chunks: ChunkTable, video_ids: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """The captions of each chunk, and their columns of labels: a list for each chunk."""
    captions = read_captions(data_dir)
    rows, chunk = _shown_pairs(captions, chunks, video_ids)
    order = np.lexsort((rows, chunk))
    bounds = np.searchsorted(chunk[order], np.arange(len(chunks) + 1))
    labels = [name for name in captions.column_names if name.startswith(_LABEL)]
    names = {"captions": "text", "caption_id": "caption_id", **dict(zip(labels, labels, strict=True))}
    for name, column in names.items():
        values = captions[column].take(pa.array(rows[order])).combine_chunks()
        yield name, pa.LargeListArray.from_arrays(bounds, values)


def _shown_pairs(
    captions: pa.Table, chunks: ChunkTable, video_ids: pa.Array
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each pair of a caption, as its row, and a chunk that shows a part of it."""
    video = rows_of(captions["video_id"], video_ids)
    begin_s, end_s = captions["begin_s"].to_numpy(), captions["end_s"].to_numpy()
    search = chunks.search()
    before = search.last_of(video - 1)  # the last chunk of the videos before
    last = search.last_of(video)
    is_within = np.isfinite(end_s)
    end_ms = np.ceil(end_s[is_within] * _MS_PER_S).astype(np.int64) - 1
    last[is_within] = np.minimum(last[is_within], search.last_started(video[is_within], end_ms))
    first = np.maximum(before + 1, search.last_started(video, (begin_s * _MS_PER_S).astype(np.int64)))
    # The chunk that had started by then may have ended, where shots or failures leave gaps.
    has_ended = chunks.end_us[np.minimum(first, len(chunks) - 1)] <= begin_s * US_PER_S
    counts = np.maximum(last - (first + has_ended) + 1, 0)
    rows = np.repeat(np.arange(len(captions)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, np.repeat(first + has_ended, counts) + within


def _scores(data_dir: Path, chunks: ChunkTable, video_ids: pa.Array) -> dict[str, pa.ChunkedArray]:
    """The numbers of each chunk, and whether it looks like one of an earlier video."""
    table = open_scores(data_dir, columns={"video_id", "start_ms", *NUMBERS, "duplicate_of"}).table
    rows = find_chunks(table, video_ids=video_ids, video_row=chunks.video_row, start_ms=chunks.start_ms)
    found = pa.array(rows, mask=rows < 0)
    of_chunks = {name: table[name].take(found) for name in NUMBERS}
    return of_chunks | {"duplicate": pa.compute.greater_equal(table["duplicate_of"].take(found), 0)}
