"""Stable caption ids: which of the new captions are the old ones.

A caption is identified by (video_id, begin_s, end_s, text, source); the n-th of several equal ones is matched
with the n-th. Rows are compared by a 128-bit hash, so that millions of captions are matched by sorting integers
and the old texts need not stay in memory. The hash is multilinear with random weights (Carter & Wegman 1979, two
independent 64-bit lanes); it lives for one run and is never stored.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LANES = 2
_LANE_STEPS = (_GOLDEN, np.uint64(0xD1B54A32D192ED03))
_ROWS_AT_ONCE = 32_768


def caption_hashes(table: pa.Table, *, texts: Iterable[pa.Array]) -> np.ndarray:
    """Hashes of captions, uint64[N, 2].

    Args:
        table: columns video_id, source (dictionary-encoded), begin_s, end_s; N rows.
        texts: the N texts, in arrays of any length, so that they can be streamed.
    """
    hashes = np.empty((table.num_rows, _LANES), np.uint64)
    begin = 0
    for array in texts:
        for first in range(0, len(array), _ROWS_AT_ONCE):
            part = _hash_strings(array.slice(first, _ROWS_AT_ONCE))
            hashes[begin : begin + len(part)] = part
            begin += len(part)
    for name in ("video_id", "source"):
        _stir(hashes, _hash_dictionary(table[name]))
    for name in ("begin_s", "end_s"):
        # Adding 0.0 makes -0.0 the same as 0.0.
        bits = (table[name].to_numpy() + 0.0).view(np.uint64)
        _stir(hashes, bits[:, None])
    return hashes


def assign_ids(
    hashes: np.ndarray, *, old_hashes: np.ndarray, old_ids: np.ndarray, next_id: int
) -> tuple[np.ndarray, int]:
    """Ids of the captions with `hashes`: the old id where one matches, else the next free one in row order.

    Returns:
        ids int64[N], and the next id that is free after them.
    """
    ids = np.full(len(hashes), -1, np.int64)
    if len(old_ids):
        old_keys, keys = _ranked(old_hashes), _ranked(hashes)
        order = np.argsort(old_keys)
        place = np.minimum(np.searchsorted(old_keys, keys, sorter=order), len(order) - 1)
        candidate = order[place]
        same = (old_keys[candidate] == keys) & (old_hashes[candidate, 1] == hashes[:, 1])
        ids[same] = old_ids[candidate[same]]
    fresh = np.flatnonzero(ids < 0)
    ids[fresh] = np.arange(next_id, next_id + len(fresh))
    return ids, next_id + len(fresh)


def _ranked(hashes: np.ndarray) -> np.ndarray:
    """Keys uint64[N] that differ for equal rows: the first lane, moved on by how many equal rows came before."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    if not len(order):
        return hashes[:, 0]
    in_order = hashes[order]
    begins_group = np.ones(len(order), bool)
    begins_group[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    position = np.arange(len(order))
    rank = position - np.maximum.accumulate(np.where(begins_group, position, 0))
    keys = np.empty(len(order), np.uint64)
    keys[order] = in_order[:, 0] + rank.astype(np.uint64) * _GOLDEN
    return keys


def _stir(hashes: np.ndarray, values: np.ndarray) -> None:
    """Mixes values uint64[N, 1 or 2] into hashes uint64[N, 2], in place (the finalizer of SplitMix64)."""
    hashes ^= values
    for lane in range(_LANES):
        column = hashes[:, lane]
        column += _LANE_STEPS[lane]
        column ^= column >> np.uint64(30)
        column *= np.uint64(0xBF58476D1CE4E5B9)
        column ^= column >> np.uint64(27)
        column *= np.uint64(0x94D049BB133111EB)
        column ^= column >> np.uint64(31)


def _hash_dictionary(column: pa.ChunkedArray) -> np.ndarray:
    column = column.unify_dictionaries()
    if column.num_chunks == 0:
        return np.empty((0, _LANES), np.uint64)
    values = _hash_strings(column.chunk(0).dictionary)
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return values[np.concatenate(codes)]


def _hash_strings(strings: pa.Array) -> np.ndarray:
    """Hashes of strings, uint64[N, 2]."""
    _, offset_buffer, data_buffer = strings.buffers()
    hashes = np.zeros((len(strings), _LANES), np.uint64)
    if data_buffer is None or offset_buffer is None:
        return hashes
    offsets = np.frombuffer(offset_buffer, np.int32)[strings.offset : strings.offset + len(strings) + 1]
    lengths = np.diff(offsets)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return hashes
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    starts = (offsets[:-1] - offsets[0])[filled]
    position = np.arange(len(data)) - np.repeat(starts, lengths[filled])
    # Plus one, so that a zero byte counts too and strings of different lengths differ.
    symbols = data.astype(np.uint64) + np.uint64(1)
    for lane in range(_LANES):
        weights = np.random.PCG64(lane).random_raw(int(lengths.max()))
        hashes[filled, lane] = np.add.reduceat(weights[position] * symbols, starts)
    return hashes
