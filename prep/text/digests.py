"""Digests that identify texts in shards, in the bank, and from one run to the next.

Digests are held in a NumPy array of 16-byte strings, sorted if it is searched: ten million take 160 MB. When NumPy
converts such a string to a Python object it strips trailing zero bytes; use `tobytes` to get all bytes.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

DIGEST_BYTES = 16
DIGESTS = np.dtype(f"S{DIGEST_BYTES}")


def text_digest(text: str) -> bytes:
    """Return the BLAKE2b-128 digest of the UTF-8 text."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def digests_of(texts: Iterable[str]) -> np.ndarray:
    """Return the digests of texts, DIGESTS [texts]."""
    return np.frombuffer(b"".join(map(text_digest, texts)), DIGESTS)


def from_arrow(array: pa.FixedSizeBinaryArray) -> np.ndarray:
    """Return the digests in an Arrow array without nulls, DIGESTS [rows]."""
    return np.frombuffer(array.buffers()[1], DIGESTS)[array.offset : array.offset + len(array)]


def positions_in(ordered: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """Return the position of each of `digests` in the strictly ascending array `ordered`, or -1 if absent; int64."""
    if not len(ordered):
        return np.full(len(digests), -1, np.int64)
    positions = np.minimum(np.searchsorted(ordered, digests), len(ordered) - 1)
    return np.where(ordered[positions] == digests, positions, -1).astype(np.int64)


def owners_of(digests: np.ndarray, *, num_parts: int) -> np.ndarray:
    """Return which of `num_parts` parts of a run encodes each text, uint64 [digests] from 0."""
    return np.ascontiguousarray(digests).view(np.uint64)[::2] % np.uint64(num_parts)


class DigestSet:
    """A set of digests; duplicates may be added.

    The digests are partitioned by their leading bits, so that sorting needs memory for only a small part of them.
    """

    _NUM_PARTS = 16
    _MAX_WAITING = 1 << 18

    def __init__(self) -> None:
        self._parts = [np.empty(0, DIGESTS) for _ in range(self._NUM_PARTS)]
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def add(self, digests: np.ndarray) -> None:
        """Add digests, DIGESTS [any]."""
        self._waiting.append(digests)
        self._num_waiting += len(digests)
        if self._num_waiting > self._MAX_WAITING:
            self._sort_in()

    def ordered(self) -> np.ndarray:
        """Return all digests added, ascending and without duplicates; the set is empty afterwards."""
        self._sort_in()
        ordered = np.empty(sum(map(len, self._parts)), DIGESTS)
        begin = 0
        for number, part in enumerate(self._parts):
            ordered[begin : begin + len(part)] = part
            begin += len(part)
            self._parts[number] = part[:0].copy()
        return ordered

    def _sort_in(self) -> None:
        added = np.concatenate([np.empty(0, DIGESTS), *self._waiting])
        self._waiting, self._num_waiting = [], 0
        part_of = added.view(np.uint8)[::DIGEST_BYTES] // (256 // self._NUM_PARTS)
        for number in range(self._NUM_PARTS):
            self._parts[number] = np.union1d(self._parts[number], added[part_of == number])
