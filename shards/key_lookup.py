"""Finding samples by key in many shards."""

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from clipmill.shards.reader import CommittedShard


class KeyLookup:
    """Sorted keys of many shards in one Arrow array, which avoids a Python object per key."""

    def __init__(self, shards: "list[CommittedShard]") -> None:
        self._shards = shards
        keys = pa.chunked_array([shard.index.column("key").chunk(0) for shard in shards], type=pa.string())
        order = pc.sort_indices(keys)
        self._keys = keys.cast(pa.large_string()).combine_chunks().take(order)
        self._positions = order.to_numpy()
        self._first_rows = [0]
        for shard in shards:
            self._first_rows.append(self._first_rows[-1] + shard.index.num_rows)

    def find(self, key: str) -> "tuple[CommittedShard, int]":
        """Find the shard and row of `key` by bisection; raise KeyError if it is missing."""
        low = bisect_left(self._keys, key, key=_text)
        if low == len(self._keys) or self._keys[low].as_py() != key:
            raise KeyError(key)
        position = int(self._positions[low])
        number = bisect_right(self._first_rows, position) - 1
        return self._shards[number], position - self._first_rows[number]


def _text(scalar: pa.Scalar) -> str:
    return str(scalar.as_py())
