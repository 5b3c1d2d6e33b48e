"""The values of one score over many chunks: quantiles, a histogram, and the chunks that stand for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 32  # at most
_TAIL_SHARE = 0.01  # share of the values that may lie above the end of the histogram of an unbounded score,
_NUM_OUTLIERS = 5  # of few values this number instead, but no more than a tenth of them,
_TAIL_FACTOR = 1.5  # if the highest value is larger than the end by more than this factor
V = TypeVar("V")
_PICKED = (("lowest", 0.0), ("1st quartile", 0.25), ("median", 0.5), ("3rd quartile", 0.75), ("highest", 1.0))


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width.

    Attributes:
        begin, end: values at the first and the last border.
        counts: int64 [bins]; the last bin also has all values above `end`.
        kept: of these, the number that a selection keeps; None without a selection.
        is_cut: True if values lie above `end`.
    """

    begin: float
    end: float
    counts: NDArray[np.int64]
    kept: NDArray[np.int64] | None
    is_cut: bool


def histogram(
    values: NDArray[np.float64],
    *,
    bounds: tuple[float, float] | None = None,
    is_count: bool = False,
    is_kept: NDArray[np.bool_] | None = None,
) -> Histogram:
    """Return the histogram of one or more known values.

    Args:
        bounds: range of the score; None if it has no upper bound: then the histogram begins at 0, and leaves out a long
            tail, so that single large values do not squeeze all others into one bin.
        is_count: whether the values are whole numbers; each bin then holds as many of them.
        is_kept: which of the values belong to chunks that a selection keeps.
    """
    highest, num_bins = float(values.max()), NUM_BINS
    if is_count:
        num_bins = min(NUM_BINS, int(highest) + 1)
        begin, end = 0.0, float(-(-(int(highest) + 1) // num_bins) * num_bins)
    else:
        tail = _tail(values)
        begin, end = bounds or (0.0, tail if highest > _TAIL_FACTOR * tail else highest)
    end = end if end > begin else begin + 1.0
    inside = np.clip(values, begin, end)

    def count(of: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.histogram(of, bins=num_bins, range=(begin, end))[0].astype(np.int64)

    return Histogram(begin, end, count(inside), None if is_kept is None else count(inside[is_kept]), highest > end)


def _tail(values: NDArray[np.float64]) -> float:
    """Return the value at which a long tail begins."""
    num_above = max(int(_TAIL_SHARE * len(values)), min(_NUM_OUTLIERS, len(values) // 10))
    return float(np.sort(values)[-1 - num_above])


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


def evenly(rows: Sequence[V], *, count: int) -> list[V]:
    """Return up to `count` of them, evenly spaced."""
    picked = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))
    return [rows[number] for number in picked.tolist()]
