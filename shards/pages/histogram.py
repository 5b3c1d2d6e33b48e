"""Histograms on the pages of `prep inspect`: counts of values, drawn as SVG whose bars have a text each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.quoting import count_noun
from clipmill.manifests.units import short_number

NUM_BINS = 32  # at most
_NUM_LABELS, _NUM_RANGES = 8, 4  # labels of bars that stand for one whole number, and for several; at most
_TAIL_SHARE = 0.01  # share of the values that may lie above the end of the histogram of an unbounded quantity,
_NUM_OUTLIERS = 5  # of few values this number instead, but no more than a tenth of them,
_TAIL_FACTOR = 1.5  # if the highest value is larger than the end by more than this factor


@dataclass(frozen=True)
class Bar:
    """A bar that is not empty: its place, its values and count as text, and heights in percent by what they show."""

    left: int
    text: str
    heights: dict[str, float]


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width.

    Attributes:
        begin, end: values at the first and the last border.
        counts: int64 [bins]; the last bin also has all values above `end`.
        kept: of these, the number that a selection keeps; None without a selection.
        is_cut: True if values lie above `end`.
        is_count: whether the values are whole numbers.
    """

    begin: float
    end: float
    counts: NDArray[np.int64]
    kept: NDArray[np.int64] | None
    is_cut: bool
    is_count: bool

    def bin_text(self, number: int) -> str:
        """Return the values of a bin in words: `3`, `4 to 7`, `1.5 to 2`, `90 and more`."""
        width = (self.end - self.begin) / len(self.counts)
        low = self.begin + number * width
        if self.is_cut and number == len(self.counts) - 1:
            return f"{short_number(low)} and more"
        high = low + width - self.is_count
        return short_number(low) if self.is_count and width == 1 else f"{short_number(low)} to {short_number(high)}"

    @property
    def highest(self) -> int:
        """Number of values of the highest bar."""
        return max(int(self.counts.max()), 1)

    def span_text(self, unit: str) -> str:
        """Return the number of values and their range in words."""
        span = f"from {short_number(self.begin)} to {short_number(self.end)} {unit}".rstrip()
        return f"{count_noun(int(self.counts.sum()), 'value')} {span}"

    def bars(self, unit: str) -> list[Bar]:
        """Return the bars: of `kept` values, in front of `all` where a selection drops some."""
        bars = []
        for number, count in enumerate(self.counts.tolist()):
            if not count:
                continue
            text = f"{self.bin_text(number)} {unit}".rstrip() + f": {count_noun(count, 'chunk')}"
            shown = {"kept": count}
            if self.kept is not None:
                shown = {"all": count, "kept": int(self.kept[number])}
                text += f", {shown['kept']:,} kept"
            heights = {name: max(1.0, 100 * of / self.highest) if of else 0.0 for name, of in shown.items()}
            bars.append(Bar(10 * number, text, heights))
        return bars

    def ticks(self, unit: str) -> list[str]:
        """Return the labels of the axis: of whole numbers, below the middle of their bars, of others, at the borders.

        Bars of whole numbers without a label have an empty one.
        """
        unit = f" {unit}" if unit else ""
        if not self.is_count:
            ticks = [short_number(value) for value in (self.begin, (self.begin + self.end) / 2, self.end)]
            ticks[-1] += f"{unit} and more" if self.is_cut else unit
            return ticks
        num_bins = len(self.counts)
        is_single = self.end - self.begin == num_bins
        step = -(-num_bins // (_NUM_LABELS if is_single else _NUM_RANGES))
        first = 0 if is_single else step // 2
        ticks = [self.bin_text(number) if number % step == first else "" for number in range(num_bins)]
        ticks[num_bins - 1 - (num_bins - 1 - first) % step] += unit
        return ticks


def histogram(
    values: NDArray[np.float64],
    *,
    bounds: tuple[float, float] | None = None,
    is_count: bool = False,
    is_kept: NDArray[np.bool_] | None = None,
) -> Histogram:
    """Return the histogram of one or more known values.

    Args:
        bounds: range of the values; None if it has no upper bound: then the histogram begins at 0, and leaves out a
            long tail, so that single large values do not squeeze all others into one bin.
        is_count: whether the values are whole numbers; each bin then holds as many of them.
        is_kept: which of the values belong to samples that a selection keeps.
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

    kept = None if is_kept is None else count(inside[is_kept])
    return Histogram(begin, end, count(inside), kept, highest > end, is_count)


def _tail(values: NDArray[np.float64]) -> float:
    """Return the value at which a long tail begins."""
    num_above = max(int(_TAIL_SHARE * len(values)), min(_NUM_OUTLIERS, len(values) // 10))
    return float(np.sort(values)[-1 - num_above])
