"""Interactive charts of a page: the data of its curves, and the scripts that draw them.

uPlot draws them: 51 kB in the page, against 1,192 kB of Plotly's basic bundle and 251 kB of Vega-Lite without Vega.
Without scripts, the page has the first and last value of each line, and its range, in words.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clipmill.manifests.formatting import escape_invisible
from clipmill.train.report.curves import Curve, Line

_FOLDER = Path(__file__).parent
_MAX_POINTS = 2000  # of a line; more become the means and extremes of equal parts
_NUM_DIGITS = 6


def chart_values(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return what a page's template needs for charts of `curves`: `json`, `scripts` and `style`."""
    charts = [
        {
            "title": escape_invisible(curve.title),
            "from_zero": curve.from_zero,
            "is_noisy": curve.is_noisy,
            "text": escape_invisible("; ".join(line.text for line in curve.lines)),
            "lines": [_line(line) for line in curve.lines],
        }
        for curve in curves
    ]
    # "<" is escaped, so that no text within can end the element.
    text = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return {"json": text, "scripts": _scripts(), "style": _style()}


def _line(line: Line) -> dict[str, Any]:
    """A line as x, y, the means that are smoothed, and the number of points that each of them stands for."""
    every = -(-len(line.points) // (_MAX_POINTS // 2)) if len(line.points) > _MAX_POINTS else 1
    parts = [line.points[begin : begin + every] for begin in range(0, len(line.points), every)]
    found: dict[str, Any] = {"label": escape_invisible(line.label), "x": [], "y": [], "mean": [], "count": []}
    for part in parts:
        mean = sum(y for _, y in part) / len(part)
        kept = sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
        for x, y in kept:
            found["x"].append(x)
            found["y"].append(_round_value(y))
            found["mean"].append(_round_value(mean))
            found["count"].append(len(part) / len(kept))
    return found


def _round_value(value: float) -> float:
    return float(f"{value:.{_NUM_DIGITS}g}")


@cache
def _scripts() -> tuple[str, str]:
    return (_FOLDER / "uplot" / "uPlot.iife.min.js").read_text(), (_FOLDER / "charts.js").read_text()


@cache
def _style() -> str:
    return (_FOLDER / "uplot" / "uPlot.min.css").read_text()
