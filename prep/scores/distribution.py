"""The values of one score over many chunks: quantiles, a histogram, and the chunks that stand for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 32  # at most
# The histogram of an unbounded score ends at this percentile, or where that is less, at this number of interquartile
# ranges above the third quartile, if the highest value is larger than that by more than this factor.
_TAIL = 99.0
_NUM_RANGES = 4.0
_TAIL_FACTOR = 1.5
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
    """Return where a long tail begins. Of few values, the percentile itself may be an outlier; quartiles are not."""
    first, third, tail = np.percentile(values, [25, 75, _TAIL], method="lower").tolist()
    return min(tail, third + _NUM_RANGES * (third - first)) if third > first else tail


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
