"""Embeddings of the variant's committed shards, taken into the bank instead of being computed again."""

import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from prep.text.bank import write_block
from prep.text.digests import DIGESTS, from_arrow, places_in
from shards.damage import Damaged
from shards.npy import data_offset
from shards.reader import CommittedShard, Variant

_ROWS_PER_BLOCK = 4096
MEMBER = "text.npy"


def take_over(variant_dir: Path, *, missing: np.ndarray, bank_dir: Path, width: int) -> int:
    """Copies what committed shards have of the texts with digests `missing` (ascending) into the bank.

    A member whose checksum does not fit is passed over, and so is a shard whose files are damaged: its texts are
    computed again.

    Returns:
        the number of texts.
    """
    is_missing = np.ones(len(missing), bool)
    digests: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    num_waiting = 0

    def flush() -> None:
        if digests:
            write_block(bank_dir, np.concatenate(digests), np.concatenate(rows))
            digests.clear()
            rows.clear()

    for shard in Variant(variant_dir).shards():
        try:
            for found, embedded in _wanted_rows(shard, missing=missing, is_missing=is_missing, width=width):
                digests.append(found)
                rows.append(embedded)
                num_waiting += len(found)
                if num_waiting >= _ROWS_PER_BLOCK:
                    flush()
                    num_waiting = 0
        except (Damaged, pa.ArrowException, OSError, KeyError):
            continue
    flush()
    return int(np.count_nonzero(~is_missing))


def _wanted_rows(
    shard: CommittedShard, *, missing: np.ndarray, is_missing: np.ndarray, width: int
) -> "list[tuple[np.ndarray, np.ndarray]]":
    column = shard.index["text_digest"].combine_chunks()
    offsets, stored = column.offsets.to_numpy(), from_arrow(column.values)
    places = places_in(missing, stored)
    is_wanted = places >= 0
    is_wanted[is_wanted] = is_missing[places[is_wanted]]
    samples = np.unique(np.searchsorted(offsets, np.flatnonzero(is_wanted), side="right") - 1)
    checksums = shard.index[f"{MEMBER}_crc32"]
    found = []
    for sample in samples.tolist():
        payload = shard.read(sample, MEMBER)
        if zlib.crc32(payload) != checksums[sample].as_py():
            continue
        begin, end = int(offsets[sample]), int(offsets[sample + 1])
        embedded = np.frombuffer(payload, np.float16, offset=data_offset(payload)).reshape(end - begin, width)
        # Another sample may have given the same text meanwhile.
        mine = np.flatnonzero(places[begin:end] >= 0)
        mine = mine[is_missing[places[begin:end][mine]]]
        if len(mine):
            is_missing[places[begin:end][mine]] = False
            found.append((stored[begin:end][mine].astype(DIGESTS), embedded[mine]))
    return found
