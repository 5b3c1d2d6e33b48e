"""SHA-256 digests of captions: one per video, which lets a plan detect changed captions, and one over texts."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.caption_table import take_rows
from clipmill.manifests.schema import LIKELIHOOD

_ROWS_AT_ONCE = 131_072


def captions_sha256(
    captions: pa.Table, *, caption_ids: np.ndarray, video_rows: np.ndarray, num_videos: int
) -> list[str]:
    """Compute a digest of each video's captions, ordered by begin, end and ID: IDs, times, texts, sources and labels.

    Likelihoods count for videos that have any: without one, the digest is that of a table without the column.

    Args:
        captions: the columns after caption_id, N rows.
        caption_ids: int64[N].
        video_rows: int[N], index of each caption's video, in [0, num_videos).

    Returns:
        num_videos hex digests; a video without captions has the digest of empty input.
    """
    order = np.lexsort((caption_ids, captions["end_s"].to_numpy(), captions["begin_s"].to_numpy(), video_rows))
    bounds = np.searchsorted(video_rows[order], np.arange(num_videos + 1))
    digests = [hashlib.sha256(b"").hexdigest()] * num_videos
    columns = captions.drop_columns(["video_id"])
    if LIKELIHOOD.name not in columns.column_names:
        columns = columns.append_column(LIKELIHOOD, pa.nulls(columns.num_rows, LIKELIHOOD.type))
    for first, last in _windows(bounds):
        rows = order[bounds[first] : bounds[last]]
        part = take_rows(columns, rows).combine_chunks()
        likelihood = part[LIKELIHOOD.name].chunk(0)
        has_likelihood = likelihood.is_valid().to_numpy(zero_copy_only=False)
        part = part.drop_columns([LIKELIHOOD.name])
        streams = [_Stream.fixed(caption_ids[rows])]
        for name in part.column_names:
            streams += _streams(part[name].chunk(0))
        optional = [_Stream.fixed(has_likelihood), *_streams(likelihood.fill_null(0))]
        local = bounds[first : last + 1] - bounds[first]
        for video in np.flatnonzero(np.diff(local)):
            begin, end = int(local[video]), int(local[video + 1])
            sha256 = hashlib.sha256((end - begin).to_bytes(8, "little"))
            for stream in (*streams, *optional) if has_likelihood[begin:end].any() else streams:
                sha256.update(stream.rows(begin, end))
            digests[first + int(video)] = sha256.hexdigest()
    return digests


class TextDigest:
    """SHA-256 over a sequence of texts, however it is divided into blocks; different sequences differ."""

    def __init__(self) -> None:
        self._lengths, self._bytes = hashlib.sha256(), hashlib.sha256()

    def add(self, texts: pa.StringArray) -> None:
        """Add the next texts."""
        lengths, content = _streams(texts)[-2:]
        self._lengths.update(lengths.rows(0, len(texts)))
        self._bytes.update(content.rows(0, len(texts)))

    def hexdigest(self) -> str:
        """Return the digest of all texts added so far."""
        return hashlib.sha256(self._lengths.digest() + self._bytes.digest()).hexdigest()


def _windows(bounds: np.ndarray) -> list[tuple[int, int]]:
    """Divide the videos into ranges of about _ROWS_AT_ONCE captions each; the first video of a range has captions."""
    windows = []
    first, num_videos = 0, len(bounds) - 1
    while first < num_videos and bounds[first] < bounds[-1]:
        first = int(np.searchsorted(bounds, bounds[first], side="right")) - 1
        last = int(np.searchsorted(bounds, bounds[first] + _ROWS_AT_ONCE, side="right")) - 1
        last = min(max(last, first + 1), num_videos)
        windows.append((first, last))
        first = last
    return windows


@dataclass(frozen=True)
class _Stream:
    """Bytes in row order: rows a..b are data[offsets[a]:offsets[b]], or have a fixed number of bytes each."""

    data: memoryview
    offsets: np.ndarray | None = None
    row_bytes: int = 0

    @staticmethod
    def fixed(values: np.ndarray) -> "_Stream":
        values = np.ascontiguousarray(values)
        return _Stream(values.view(np.uint8).data, row_bytes=values.itemsize)

    def rows(self, begin: int, end: int) -> memoryview:
        if self.offsets is None:
            return self.data[begin * self.row_bytes : end * self.row_bytes]
        return self.data[int(self.offsets[begin]) : int(self.offsets[end])]


def _streams(array: pa.Array) -> list[_Stream]:
    """Return the content of a column as streams, lengths before bytes, so that different contents differ."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    streams = []
    if array.null_count:
        streams.append(_Stream.fixed(array.is_null().to_numpy(zero_copy_only=False)))
    if pa.types.is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        values = np.ascontiguousarray(array.flatten().to_numpy(zero_copy_only=False))
        offsets = np.concatenate(([0], np.cumsum(lengths))) * values.itemsize
        return [*streams, _Stream.fixed(lengths), _Stream(values.view(np.uint8).data, offsets=offsets)]
    if pa.types.is_string(array.type):
        array = pc.fill_null(array, "")
        _, offset_buffer, data = array.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
        return [
            *streams,
            _Stream.fixed(np.diff(offsets)),
            _Stream(memoryview(data if data is not None else b""), offsets=offsets),
        ]
    return [*streams, _Stream.fixed(pc.fill_null(array, 0).to_numpy(zero_copy_only=False))]
