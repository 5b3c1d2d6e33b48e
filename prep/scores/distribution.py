"""The chunks that stand for the values of one score: at quartiles."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V")
_PICKED = (("lowest", 0.0), ("1st quartile", 0.25), ("median", 0.5), ("3rd quartile", 0.75), ("highest", 1.0))


def landmarks(values: NDArray[np.float64]) -> list[tuple[str, int]]:
    """Return (name, row) of the chunks at the lowest, highest and quartile values; NaN marks unknown values.

    Each chunk is named once: few chunks have fewer landmarks.
    """
    known = np.flatnonzero(~np.isnan(values))
    in_order = known[np.argsort(values[known], kind="stable")]
    found: dict[int, str] = {}
    for name, share in _PICKED if len(in_order) else ():
        found.setdefault(int(in_order[round(share * (len(in_order) - 1))]), name)
    return [(name, row) for row, name in found.items()]
