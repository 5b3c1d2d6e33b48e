"""Stable caption IDs: new captions are matched with old captions. Unlikely and duplicate captions of a table.

A caption is identified by (video_id, begin_s, end_s, text, source). If several captions are equal, the n-th new one is
matched with the n-th old one. Rows are compared by a 128-bit hash, so that millions of captions are matched by sorting
integers, and the old texts need not stay in memory. The hash is multilinear with random weights (Carter & Wegman 1979,
two independent 64-bit lanes); it is valid for one run and never stored.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LANES = 2
_LANE_STEPS = (_GOLDEN, np.uint64(0xD1B54A32D192ED03))
_ROWS_AT_ONCE = 32_768
_PARTS = 16


def caption_hashes(captions: pa.Table) -> np.ndarray:
    """Hash captions to uint64[N, 2].

    Args:
        captions: Columns video_id, source (dictionary-encoded), begin_s, end_s, text.
    """
    captions = captions.select(["video_id", "source", "begin_s", "end_s", "text"]).unify_dictionaries()
    hashes = np.empty((captions.num_rows, _LANES), np.uint64)
    value_hashes: dict[str, np.ndarray] = {}
    begin = 0
    for batch in captions.to_batches(max_chunksize=_ROWS_AT_ONCE):
        part = _hash_strings(batch["text"])
        for name in ("video_id", "source"):
            if name not in value_hashes:
                value_hashes[name] = _hash_strings(batch[name].dictionary)
            _mix(part, value_hashes[name][batch[name].indices.to_numpy()])
        for name in ("begin_s", "end_s"):
            # Adding 0.0 turns -0.0 into 0.0.
            _mix(part, (batch[name].to_numpy() + 0.0).view(np.uint64)[:, None])
        hashes[begin : begin + len(part)] = part
        begin += len(part)
    return hashes


def assign_ids(
    hashes: np.ndarray, *, old_hashes: np.ndarray, old_ids: np.ndarray, next_id: int
) -> tuple[np.ndarray, int]:
    """Assign an ID to each caption in `hashes`: the ID of the matching old caption, or the next free ID in row order.

    Returns:
        IDs int64[N], and the next free ID after them.
    """
    ids = np.full(len(hashes), -1, np.int64)
    if len(old_ids):
        # Processed in parts, so that sorting needs only a fraction of the memory.
        part, old_part = _parts(hashes), _parts(old_hashes)
        for number in range(_PARTS):
            rows, old_rows = np.flatnonzero(part == number), np.flatnonzero(old_part == number)
            matched, old_matched = _match(hashes[rows], old_hashes[old_rows])
            ids[rows[matched]] = old_ids[old_rows[old_matched]]
    fresh = np.flatnonzero(ids < 0)
    ids[fresh] = np.arange(next_id, next_id + len(fresh))
    return ids, next_id + len(fresh)


def _parts(hashes: np.ndarray) -> np.ndarray:
    return (hashes[:, 0] >> np.uint64(64 - _PARTS.bit_length() + 1)).astype(np.uint8)


def _match(hashes: np.ndarray, old_hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row indices of equal captions in both arrays."""
    if not len(old_hashes):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys, old_keys = _rank_keys(hashes), _rank_keys(old_hashes)
    order, old_order = np.argsort(keys), np.argsort(old_keys)
    keys, old_keys = keys[order], old_keys[old_order]
    position = np.minimum(np.searchsorted(old_keys, keys), len(old_keys) - 1)
    rows, old_rows = order, old_order[position]
    same = (old_keys[position] == keys) & (old_hashes[old_rows, 1] == hashes[rows, 1])
    return rows[same], old_rows[same]


def _rank_keys(hashes: np.ndarray) -> np.ndarray:
    """Return keys uint64[N] that differ for equal rows: the first lane plus the number of equal rows before."""
    keys = hashes[:, 0].copy()
    order = np.argsort(keys)
    in_order = keys[order]
    repeats = in_order[1:] == in_order[:-1]
    is_repeated = np.zeros(len(keys), bool)
    is_repeated[order[1:][repeats]] = is_repeated[order[:-1][repeats]] = True
    rows = np.flatnonzero(is_repeated)
    if not len(rows):
        return keys
    groups = np.lexsort((hashes[rows, 1], hashes[rows, 0]))
    grouped = hashes[rows[groups]]
    begins_group = np.ones(len(rows), bool)
    begins_group[1:] = (grouped[1:] != grouped[:-1]).any(axis=1)
    position = np.arange(len(rows))
    rank = position - np.maximum.accumulate(np.where(begins_group, position, 0))
    keys[rows[groups]] += rank.astype(np.uint64) * _GOLDEN
    return keys


def _mix(hashes: np.ndarray, values: np.ndarray) -> None:
    """Mix values uint64[N, 1 or 2] into hashes uint64[N, 2], in position (the finalizer of SplitMix64)."""
    hashes ^= values
    for lane in range(_LANES):
        column = hashes[:, lane]
        column += _LANE_STEPS[lane]
        column ^= column >> np.uint64(30)
        column *= np.uint64(0xBF58476D1CE4E5B9)
        column ^= column >> np.uint64(27)
        column *= np.uint64(0x94D049BB133111EB)
        column ^= column >> np.uint64(31)


def _hash_strings(strings: pa.Array) -> np.ndarray:
    """Hash strings to uint64[N, 2]."""
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
    # Plus one, so that zero bytes affect the hash and strings of different lengths differ.
    symbols = data.astype(np.uint64) + np.uint64(1)
    for lane in range(_LANES):
        weights = np.random.PCG64(lane).random_raw(int(lengths.max()))
        hashes[filled, lane] = np.add.reduceat(weights[position] * symbols, starts)
    return hashes


_SPACE = r"[\s\p{Z}]+"


def is_unlikely(captions: pa.Table, *, min_likelihood: float) -> np.ndarray:
    """Return True for captions with a likelihood below `min_likelihood`, bool[N]; False without a likelihood."""
    # Compared as float32, like the column: otherwise a caption with exactly this likelihood could be below it.
    unlikely = pc.less(captions["likelihood"], pa.scalar(min_likelihood, pa.float32()))
    return np.asarray(unlikely.fill_null(False).to_numpy())


def is_duplicate(captions: pa.Table) -> np.ndarray:
    """Return True for captions that repeat another caption of the same clip and source, bool[N].

    Texts are compared without regard to case and whitespace. Of several equal captions, the most likely one is not a
    duplicate, or the first of the most likely ones.
    """
    if not captions.num_rows:
        return np.zeros(0, bool)
    folded = pc.replace_substring_regex(captions["text"], _SPACE, " ")
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(folded))
    hashes = caption_hashes(captions.set_column(captions.column_names.index("text"), "text", folded))
    likelihood = captions["likelihood"].fill_null(-np.inf).to_numpy()
    order = np.lexsort((-likelihood, hashes[:, 1], hashes[:, 0]))
    repeats = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    duplicates = np.zeros(captions.num_rows, bool)
    duplicates[order[1:][repeats]] = True
    return duplicates
