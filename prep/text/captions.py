"""Read the captions of videos in batches, compute the digests of their texts, and check stored texts.

Captions are read in batches, so that ten million captions never exist as Python objects at the same time. A digest
identifies a text in shards, in the bank (`bank.py`), and across runs. Digests are kept in NumPy arrays of 16-byte
strings, which are sorted before a search; ten million digests take 160 MB. Use `tobytes` to convert a digest to Python
bytes: NumPy's other conversions strip trailing zero bytes.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json
from clipmill.manifests.store import open_captions
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.text.recipe import MEMBER
from clipmill.shards.npy import load_npy
from clipmill.shards.selection import caption_columns, labelled_captions, selected_captions
from clipmill.shards.where import Where

_COLUMNS = ["caption_id", "video_id", "text"]


@dataclass(frozen=True)
class CaptionBatch:
    """Captions of the requested videos from one row group of the table.

    Attributes:
        row_group: Index of the row group.
        videos: Index of each caption's video in the requested videos, int64 [captions].
        ids: IDs of the captions, int64 [captions].
        texts: Texts of the captions, string [captions].
    """

    row_group: int
    videos: np.ndarray
    ids: np.ndarray
    texts: pa.Array


class CaptionReader:
    """Reader of the captions in the manifest. It is a context manager.

    The reader keeps the caption table open and reads the same table even if a new manifest is written.

    Args:
        where: Conditions (on captions and their videos) that select the captions to read; None for all captions.
    """

    def __init__(self, data_dir: Path, *, where: Where | None = None) -> None:
        self._file: pq.ParquetFile = open_captions(data_dir)
        self._data_dir, self._where = data_dir, where
        self._label_rows = labelled_captions(where, data_dir)
        self._columns = list(dict.fromkeys([*_COLUMNS, *caption_columns(where, self._file.schema_arrow)]))

    def __enter__(self) -> "CaptionReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self, video_ids: pa.Array, *, row_groups: Iterable[int] | None = None) -> Iterator[CaptionBatch]:
        """Yield the captions of `video_ids`, one row group of the table at a time.

        Args:
            row_groups: Row groups to read, in this order; None for all.

        Raises:
            UserError: A row group cannot be read.
        """
        for group in range(self._file.num_row_groups) if row_groups is None else row_groups:
            try:
                table = self._file.read_row_group(group, columns=self._columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                raise UserError(
                    f"the captions of the manifest cannot be read: {error}", hint="run `prep manifest` again"
                ) from None
            positions = pc.index_in(table["video_id"].cast(pa.string()), value_set=video_ids)
            is_selected = pc.is_valid(positions)
            if self._where is not None:
                rows = np.flatnonzero(is_selected)
                video_row = positions.filter(is_selected).to_numpy()
                selected = selected_captions(
                    self._where,
                    self._data_dir,
                    table,
                    rows=rows,
                    video_ids=video_ids,
                    video_row=video_row,
                    label_rows=self._label_rows,
                )
                mask = np.zeros(table.num_rows, bool)
                mask[rows[selected]] = True
                is_selected = pa.chunked_array([pa.array(mask)])
            if pc.any(is_selected).as_py():
                yield CaptionBatch(
                    row_group=group,
                    videos=positions.filter(is_selected).to_numpy().astype(np.int64),
                    ids=table["caption_id"].filter(is_selected).to_numpy(),
                    texts=table["text"].filter(is_selected).combine_chunks(),
                )


DIGEST_BYTES = 16
DIGESTS = np.dtype(f"S{DIGEST_BYTES}")  # dtype of arrays of digests


def text_digest(text: str) -> bytes:
    """Return the BLAKE2b-128 digest of a text in UTF-8."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def digests_of(texts: Iterable[str]) -> np.ndarray:
    """Return the digests of texts, DIGESTS [texts]."""
    return np.frombuffer(b"".join(map(text_digest, texts)), DIGESTS)


def from_arrow(array: pa.FixedSizeBinaryArray) -> np.ndarray:
    """Return the digests in an Arrow array without nulls, DIGESTS [rows]."""
    return np.frombuffer(array.buffers()[1], DIGESTS)[array.offset : array.offset + len(array)]


def positions_in(stored: np.ndarray, digests: np.ndarray, *, order: np.ndarray | None = None) -> np.ndarray:
    """Return the index of each digest in `stored`, int64; -1 for digests that are not in `stored`.

    Args:
        order: Indices that sort `stored`; None if `stored` is in strictly ascending order.
    """
    if not len(stored):
        return np.full(len(digests), -1, np.int64)
    ranks = np.minimum(np.searchsorted(stored, digests, sorter=order), len(stored) - 1)
    positions = ranks if order is None else order[ranks]
    return np.where(stored[positions] == digests, positions, -1).astype(np.int64)


def owners_of(digests: np.ndarray, *, num_parts: int) -> np.ndarray:
    """Return the index of the part (`--part`) that encodes each text, 0 to `num_parts` - 1; uint64 [digests]."""
    return np.ascontiguousarray(digests).view(np.uint64)[::2] % np.uint64(num_parts)


class DigestSet:
    """Set of digests. Adding a digest a second time has no effect.

    Digests are partitioned by their leading bits, so that sorting needs extra memory for only one partition at a time.
    """

    _NUM_PARTITIONS = 16
    _MAX_BUFFERED = 1 << 18  # maximum number of digests to collect before they are sorted

    def __init__(self) -> None:
        self._partitions = [np.empty(0, DIGESTS) for _ in range(self._NUM_PARTITIONS)]
        self._buffer: list[np.ndarray] = []
        self._num_buffered = 0

    def add(self, digests: np.ndarray) -> None:
        """Add digests, DIGESTS [digests], in any order."""
        self._buffer.append(digests)
        self._num_buffered += len(digests)
        if self._num_buffered > self._MAX_BUFFERED:
            self._flush()

    def pop_sorted(self) -> np.ndarray:
        """Return all digests in ascending order, and empty the set."""
        self._flush()
        digests = np.empty(sum(map(len, self._partitions)), DIGESTS)
        start = 0
        for index, partition in enumerate(self._partitions):
            digests[start : start + len(partition)] = partition
            start += len(partition)
            self._partitions[index] = partition[:0].copy()
        return digests

    def _flush(self) -> None:
        digests = np.concatenate([np.empty(0, DIGESTS), *self._buffer])
        self._buffer, self._num_buffered = [], 0
        indices = digests.view(np.uint8)[::DIGEST_BYTES] // (256 // self._NUM_PARTITIONS)
        for index in range(self._NUM_PARTITIONS):
            self._partitions[index] = np.union1d(self._partitions[index], digests[indices == index])


_MAX_LENGTH_ERROR = 0.01  # rounding a unit vector to float16 changes its length much less


def check_text(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Check the array of a sample, and compare the array and the JSON member with the index row."""
    array = load_npy(members[MEMBER])
    is_sequence = bool(row["row_tokens"])
    shape = (sum(row["row_tokens"]) if is_sequence else row["num_rows"], row["width"])
    if array is None:
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, "text.npy cannot be loaded")], 0)
    if array.shape != shape or array.dtype.str != "<f2":
        message = f"text.npy is {array.dtype} {array.shape}, but the index requires float16 {shape}"
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, message)], 0)
    differences = []
    lengths = np.linalg.norm(array.astype(np.float32), axis=1)
    if not np.isfinite(lengths).all():
        differences.append("text.npy contains non-finite values")
    elif not is_sequence and not bool((np.abs(lengths - 1) < _MAX_LENGTH_ERROR).all()):
        differences.append("text.npy contains rows that do not have unit length")
    try:
        description = parse_json(members["json"])
        digests = [text_digest(text) for text in description["texts"]]
        rows = description["caption_id"], description["caption_row"], description.get("row_tokens", [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        differences.append(f"the json member cannot be read: {error!r}")
    else:
        if digests != row["text_digest"]:
            differences.append("the texts in the json member differ from the index")
        if rows != (row["caption_id"], row["caption_row"], row["row_tokens"]):
            differences.append("caption_id, caption_row or row_tokens in the json member differ from the index")
    return CheckedSample([(DeepCode.ARRAY_DIFFERS, difference) for difference in differences], len(array))
