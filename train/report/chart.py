"""A line chart as SVG, without scripts or fonts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# About as many units as pixels on the page, so that text has the page's small font size.
_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 8, 34
_MAX_POINTS = 800
_MAX_MARKED = 60
_NUM_TICKS = 4


@dataclass(frozen=True)
class Line:
    """One line of a chart; `style` is a CSS class of the page; `label` is part of the tooltip of points."""

    points: Sequence[tuple[float, float]]
    style: str
    label: str = ""


def line_chart(
    lines: Sequence[Line], *, x_label: str, y_label: str, y_from_zero: bool = False, has_marks: bool = False
) -> str:
    """Draw lines in one chart; empty without points. The result is markup with escaped text.

    Args:
        has_marks: mark points, if there are few, with their values as tooltips.
    """
    everything = [point for line in lines for point in line.points]
    if not everything:
        return ""
    x_ticks = ticks(*_range([x for x, _ in everything]), whole=True)
    ys = [y for _, y in everything]
    # If all values are 0, the axis still starts at 0.
    reached = [*ys, 0.0 if any(ys) else 1.0] if y_from_zero else ys
    y_ticks = ticks(*_range(reached))
    x_low, x_high = _range([x for x, _ in everything])
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    title = escape(f"{y_label} by {x_label}", {'"': "&quot;"})
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">']
    for y_value in y_ticks:
        _, y = place(x_low, y_value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_number(y_value)}</text>')
    for x_value in x_ticks:
        if x_low <= x_value <= x_high:
            x, _ = place(x_value, y_low)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 17}" text-anchor="middle">{_number(x_value)}</text>'
            )
    for line in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in thinned(line.points)))
        parts.append(f'<polyline class="{line.style}" points="{path}"/>')
        if len(line.points) == 1 or (has_marks and len(line.points) <= _MAX_MARKED):
            parts += [_mark(place(*point), point, line) for point in line.points]
    parts.append(
        f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>'
    )
    parts.append("</svg>")
    return "".join(parts)


def smoothed(points: Sequence[tuple[float, float]], *, weight: float = 0.9) -> list[tuple[float, float]]:
    """Bias-corrected exponential moving average of the y values."""
    result = []
    total = norm = 0.0
    for x, y in points:
        total, norm = weight * total + (1 - weight) * y, weight * norm + (1 - weight)
        result.append((x, total / norm))
    return result


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four or five round values, 1, 2 or 5 times a power of ten apart, that cover `low` to `high`."""
    rough = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most some hundred points: the minimum and maximum of each part, so that no peak is lost."""
    if len(points) <= _MAX_POINTS:
        return points
    every = -(-2 * len(points) // _MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), every):
        part = points[begin : begin + every]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _mark(at: tuple[float, float], point: tuple[float, float], line: Line) -> str:
    words = escape(f"{line.label} {_number(point[1])} at {_number(point[0])}".strip())
    return f'<circle class="{line.style}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3"><title>{words}</title></circle>'


def _number(value: float) -> str:
    if abs(value) >= 10_000 and value == round(value):
        return f"{value / 1000:,.0f}k" if value % 1000 == 0 else f"{value:,.0f}"
    return f"{value:.4g}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high > low:
        return low, high
    around = abs(low) / 10 or 0.5
    return low - around, high + around
