"""Histograms on the pages of `prep inspect`: counts of values, drawn as SVG whose bars have a text each."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.quoting import counted
from clipmill.manifests.units import short_number

NUM_BINS = 32  # at most
_NUM_LABELS, _NUM_RANGES = 8, 4  # labels of bars that stand for one whole number, and for several; at most
_TAIL_SHARE = 0.01  # share of the values that may lie above the end of the histogram of an unbounded quantity,
_NUM_OUTLIERS = 5  # of few values this number instead, but no more than a tenth of them,
_TAIL_FACTOR = 1.5  # if the highest value is larger than the end by more than this factor
# The pages that draw histograms define --bar, --rest and --soft.
HISTOGRAM_STYLE = """
.histogram { margin: 12px 0 4px; }
.histogram svg { display: block; width: 100%; height: 96px; }
.histogram .kept { fill: var(--bar); }
.histogram .all { fill: var(--rest); }
.histogram figcaption { display: flex; flex-direction: column; color: var(--soft); font-size: 12px; margin-top: 2px; }
.ticks { display: flex; justify-content: space-between; font-variant-numeric: tabular-nums; }
.bins span { display: flex; flex: 1 1 0; justify-content: center; min-width: 0; white-space: nowrap; }
"""


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


def histogram_html(found: Histogram, *, title: str, unit: str = "") -> Iterator[str]:
    """Yield the lines of a figure. Each bar is an item of a list, with its values and number of chunks as text."""
    top = max(int(found.counts.max()), 1)
    unit = f" {unit}" if unit else ""
    span = f"from {short_number(found.begin)} to {short_number(found.end)}{unit}"
    label = f"{title}: histogram of {int(found.counts.sum()):,} values {span}"
    view = f'viewBox="0 0 {len(found.counts) * 10} 100" preserveAspectRatio="none"'
    yield f'<figure class="histogram"><svg {view} role="list" aria-label="{escape(label)}">'
    for number, count in enumerate(found.counts.tolist()):
        if not count:
            continue
        kept = None if found.kept is None else int(found.kept[number])
        text = f"{found.bin_text(number)}{unit}: {counted(count, 'chunk')}"
        text = escape(text if kept is None else f"{text}, {kept:,} kept")
        bars = [("kept", count)] if kept is None else [("all", count), ("kept", kept)]
        yield f'<g role="listitem" aria-label="{text}"><title>{text}</title>'
        # Transparent, so that the text appears above low bars too.
        yield f'<rect x="{number * 10}" y="0" width="10" height="100" fill-opacity="0"/>'
        for name, height_of in bars:
            height = max(1.0, 100 * height_of / top) if height_of else 0.0
            place = f'x="{number * 10 + 1}" y="{100 - height:.1f}" width="8" height="{height:.1f}"'
            yield f'<rect class="{name}" {place}/>'
        yield "</g>"
    legend = "" if found.kept is None else "; coloured: kept"
    yield f"</svg><figcaption>{_ticks_html(found, unit=unit)}"
    yield f"<span>largest bar: {counted(top, 'chunk')}{legend}</span></figcaption></figure>"


def _ticks_html(found: Histogram, *, unit: str) -> str:
    """Return the labels of the axis: of whole numbers, below the middle of their bars, of others, at the borders."""
    num_bins = len(found.counts)
    if found.is_count:
        is_single = found.end - found.begin == num_bins
        step = -(-num_bins // (_NUM_LABELS if is_single else _NUM_RANGES))
        first = 0 if is_single else step // 2
        ticks = [found.bin_text(number) if number % step == first else "" for number in range(num_bins)]
        ticks[num_bins - 1 - (num_bins - 1 - first) % step] += unit
    else:
        ticks = [short_number(value) for value in (found.begin, (found.begin + found.end) / 2, found.end)]
        ticks[-1] += f"{unit} and more" if found.is_cut else unit
    spans = "".join(f"<span>{escape(tick)}</span>" for tick in ticks)
    return f'<span class="ticks{" bins" if found.is_count else ""}">{spans}</span>'
