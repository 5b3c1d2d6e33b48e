"""Merging the rows of one dataset into a manifest: pure functions of tables."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.schema import OWN_DIGEST, REJECTED, VIDEOS


def without_taken_ids(
    dataset: str, videos: pa.Table, captions: pa.Table, rejected: pa.Table, *, taken_ids: pa.ChunkedArray
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Return (videos, captions, rejected) without the videos in `taken_ids`, which become rejected rows."""
    is_taken = pc.is_in(videos["video_id"], value_set=taken_ids.combine_chunks())
    if not pc.any(is_taken).as_py():
        return videos, captions, rejected
    refused, videos = videos.filter(is_taken), videos.filter(pc.invert(is_taken))
    owner = rows_of(captions["video_id"], refused["video_id"])
    num_lost = np.bincount(owner[owner >= 0], minlength=refused.num_rows)
    rows = pa.table(
        {
            "dataset": [dataset] * refused.num_rows,
            "file": refused["path"],
            "row": pa.nulls(refused.num_rows, pa.int64()),
            "source_id": refused["source_id"],
            "reason": [Reason.DUPLICATE_ID.value] * refused.num_rows,
            "detail": [f"another dataset has a video with the same ID; captions lost: {count}" for count in num_lost],
        },
        schema=REJECTED,
    )
    return videos, captions.filter(pa.array(owner < 0)), pa.concat_tables([rejected, rows])


def rows_of(column: pa.ChunkedArray, values: pa.ChunkedArray) -> np.ndarray:
    """Return the row in `values` of each element of a dictionary-encoded column, int32[N]; -1 if it is missing."""
    column = column.unify_dictionaries()
    if column.num_chunks == 0:
        return np.empty(0, np.int32)
    row_of_code = pc.index_in(column.chunk(0).dictionary, value_set=values.combine_chunks())
    row_of_code = row_of_code.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.concatenate([row_of_code[chunk.indices.to_numpy(zero_copy_only=False)] for chunk in column.chunks])


def video_table(dataset: str, videos: pa.Table, *, num_captions: np.ndarray, digests: list[str]) -> pa.Table:
    """Build the rows of one dataset: schema.VIDEOS and schema.OWN_DIGEST."""
    columns = {name: videos[name] for name in ("video_id", "source_id", "path", "split")}
    columns["dataset"] = pa.array([dataset] * videos.num_rows, pa.string())
    columns["num_captions"] = pa.array(num_captions.astype(np.int32))
    columns["captions_sha256"] = pa.array(digests, pa.string())
    columns[OWN_DIGEST.name] = pa.nulls(videos.num_rows, OWN_DIGEST.type)
    return pa.table(columns, schema=VIDEOS.append(OWN_DIGEST))


def num_other_splits(old: pa.Table, new: pa.Table) -> int:
    """Return the number of videos that both tables have, in different splits."""
    rows = pc.index_in(new["video_id"].combine_chunks(), value_set=old["video_id"].combine_chunks())
    is_known = pc.is_valid(rows)
    before = old["split"].combine_chunks().take(rows.filter(is_known))
    return pc.sum(pc.not_equal(before, new["split"].combine_chunks().filter(is_known))).as_py() or 0


def replace_dataset(old: pa.Table, new: pa.Table, *, dataset: str) -> pa.Table:
    """Replace the videos of `dataset` in `old` by `new`: known videos keep their rows, others are appended."""
    position = pc.index_in(new["video_id"], value_set=old["video_id"].combine_chunks()).to_numpy(zero_copy_only=False)
    position = np.where(np.isnan(position.astype(float)), old.num_rows + np.arange(new.num_rows), position)
    is_other = pc.not_equal(old["dataset"], dataset)
    other_position = np.flatnonzero(is_other.to_numpy(zero_copy_only=False))
    order = np.argsort(np.concatenate([other_position, position]), kind="stable")
    return pa.concat_tables([old.filter(is_other), new]).take(pa.array(order)).combine_chunks()


def tables_fingerprint(*tables: pa.Table) -> str:
    """Hash tables of strings and integers; the result identifies the files of one write."""
    sha256 = hashlib.sha256()
    for table in tables:
        for batch in table.to_batches(max_chunksize=65_536):
            for column in batch.columns:
                sha256.update(repr(column.to_pylist()).encode())
    return sha256.hexdigest()
