"""A line chart as SVG: no scripts, no fonts, nothing to load."""

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34
_MAX_POINTS = 800
_NUM_TICKS = 4


@dataclass(frozen=True)
class Line:
    """One line of a chart; `style` is a class of the page's style sheet."""

    points: Sequence[tuple[float, float]]
    style: str


def line_chart(lines: Sequence[Line], *, x_label: str, y_label: str, y_from_zero: bool = False) -> str:
    """Draws lines into one frame; labels are set by the caller of the page and must be plain words."""
    everything = [point for line in lines for point in line.points]
    if not everything:
        return ""
    x_low, x_high = _range([x for x, _ in everything])
    y_low, y_high = _range([y for _, y in everything])
    if y_from_zero:
        y_low = min(0.0, y_low)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{y_label} by {x_label}">']
    for number in range(_NUM_TICKS + 1):
        y_value = y_low + (y_high - y_low) * number / _NUM_TICKS
        _, y = place(x_low, y_value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:.3g}</text>')
        x_value = x_low + (x_high - x_low) * number / _NUM_TICKS
        x, _ = place(x_value, y_low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{x_value:.0f}</text>')
    for line in lines:
        places = (place(x, y) for x, y in _thinned(line.points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="{line.style}" points="{path}"/>')
    parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{x_label}</text>')
    parts.append("</svg>")
    return "".join(parts)


def smoothed(points: Sequence[tuple[float, float]], *, weight: float = 0.9) -> list[tuple[float, float]]:
    """Exponential moving average of the second values, without the pull of its start."""
    result = []
    total = norm = 0.0
    for x, y in points:
        total, norm = weight * total + (1 - weight) * y, weight * norm + (1 - weight)
        result.append((x, total / norm))
    return result


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    every = -(-len(points) // _MAX_POINTS)
    return [*points[:-1:every], points[-1]] if every > 1 else points
