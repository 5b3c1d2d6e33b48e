"""Finding samples by key in many shards."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc


class KeyLookup:
    """Sorted keys of the indexes of many shards in one Arrow array, which avoids a Python object per key."""

    def __init__(self, indexes: Sequence[pa.Table]) -> None:
        keys = pa.chunked_array([index.column("key").chunk(0) for index in indexes], type=pa.string())
        order = pc.sort_indices(keys)
        self._keys = keys.cast(pa.large_string()).combine_chunks().take(order)
        self._positions = order.to_numpy()
        self._first_rows = [0]
        for index in indexes:
            self._first_rows.append(self._first_rows[-1] + index.num_rows)

    def find(self, key: str) -> tuple[int, int]:
        """Find the index (its number) and row of `key` by bisection; raise KeyError if it is missing."""
        low = bisect_left(self._keys, key, key=_text)
        if low == len(self._keys) or self._keys[low].as_py() != key:
            raise KeyError(key)
        position = int(self._positions[low])
        number = bisect_right(self._first_rows, position) - 1
        return number, position - self._first_rows[number]


def _text(scalar: pa.Scalar) -> str:
    return str(scalar.as_py())
