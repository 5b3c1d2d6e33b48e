"""The curves of a results page: of training, and of evaluations during training."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from clipmill.train.spec import CurveGroup

# A line chart as SVG, without scripts or fonts.


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


NUM_LAST = 20  # steps, over which noisy metrics are averaged where one number stands for a run
_NUM_STYLES = 4
# Products of many small numbers, such as BLEU's, are not exactly 0 where they should be.
_ROUNDING = 1e-12
# Suffix of the titles of charts whose values are shown times 100, as in tables.
_TIMES_100 = ", times 100"

Value = Callable[[dict[str, Any]], float | None]


@dataclass(frozen=True)
class Curve:
    """A chart; `svg` is markup.

    Attributes:
        last: the last value as text; of a noisy metric, its mean over the last steps.
        legend: (style, label, last value) of each line, if there are several.
        lines: without smoothing.
    """

    title: str
    svg: str
    last: str
    legend: tuple[tuple[str, str, str], ...] = ()
    lines: tuple[Line, ...] = ()
    is_noisy: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class _Kind:
    """A metric of the lines of metrics.jsonl."""

    title: str
    value: Value
    is_noisy: bool = True
    from_zero: bool = False
    has_first: bool = True  # the first step includes warm-up of caches and of the loader's queue


def _key(name: str, *, scale: float = 1.0) -> Value:
    def value(line: dict[str, Any]) -> float | None:
        found = line.get(name)
        return None if found is None else scale * float(found)

    return value


_TRAINING = (
    _Kind("Loss", _key("loss")),
    _Kind("Batch accuracy, %", _key("batch_accuracy", scale=100), from_zero=True),
    _Kind("Learning rate", _key("lr"), is_noisy=False, from_zero=True),
    _Kind("Temperature", _key("temperature"), is_noisy=False),
    _Kind("Gradient norm", _key("grad_norm"), from_zero=True),
    _Kind("Samples per second", _key("samples_per_s"), from_zero=True, has_first=False),
    _Kind(
        "Waiting for data, % of a step",
        lambda line: 100 * line["data_wait_s"] / line["step_s"] if line.get("step_s") else None,
        from_zero=True,
        has_first=False,
    ),
    _Kind("GPU memory, GB", _key("gpu_memory_gb"), is_noisy=False, from_zero=True),
    _Kind("Model FLOPS utilisation, %", _key("mfu", scale=100), from_zero=True, has_first=False),
)


def training_curves(lines: Sequence[dict[str, Any]]) -> list[Curve]:
    """Curves of the training metrics that the lines have."""
    curves = []
    for kind in _TRAINING:
        points = _points(lines if kind.has_first else lines[1:], kind.value)
        if not points:
            continue
        smooth = smoothed(points) if kind.is_noisy else points
        drawn = [Line(points, "raw"), Line(smooth, "smooth")] if kind.is_noisy else [Line(points, "smooth")]
        svg = line_chart(drawn, x_label="step", y_label=kind.title, y_from_zero=kind.from_zero)
        tail = [y for _, y in points[-NUM_LAST:]] if kind.is_noisy else [points[-1][1]]
        last = f"{sum(tail) / len(tail):.4g}"
        own = (Line(points, "smooth"),)
        curves.append(Curve(kind.title, svg, last, (), own, is_noisy=kind.is_noisy, from_zero=kind.from_zero))
    return curves


def evaluation_curves(lines: Sequence[dict[str, Any]], known: Sequence[CurveGroup]) -> list[Curve]:
    """A chart for each group of evaluation metrics of each split; metrics are named `<split>/<name>`."""
    names = dict.fromkeys(name for line in lines for name in line if "/" in name)
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        split, _, short = name.partition("/")
        title, label = _chart_of(short, known)
        groups.setdefault((split, title), {})[name] = label
    order = [group.title for group in known]
    curves = []
    for (split, title), its in sorted(groups.items(), key=lambda group: _rank(group[0][1], order)):
        scale = 100.0 if title.endswith(("%", _TIMES_100)) else 1.0
        drawn = [
            Line(_points(lines, _key(name, scale=scale), rounding=_ROUNDING), f"line{number % _NUM_STYLES}", label)
            for number, (name, label) in enumerate(its.items())
        ]
        drawn = [line for line in drawn if line.points]
        if drawn:
            svg = line_chart(drawn, x_label="step", y_label=title, y_from_zero=True, has_marks=True)
            legend = tuple((line.style, line.label, f"{line.points[-1][1]:.3g}") for line in drawn)
            curves.append(Curve(f"{title} ({split})", svg, "", legend, tuple(drawn), from_zero=True))
    return curves


def overlaid(of_runs: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """The curves that several runs have, each with the lines of all of them; a line's label begins with its run."""
    titles = Counter(curve.title for curves in of_runs.values() for curve in curves)
    found = []
    for title in (title for title, count in titles.items() if count > 1):
        its = [(run, curve) for run, curves in of_runs.items() for curve in curves if curve.title == title]
        lines = tuple(
            Line(line.points, f"line{number % _NUM_STYLES}", f"{run}: {line.label}" if len(curve.lines) > 1 else run)
            for number, (run, curve) in enumerate(its)
            for line in curve.lines
        )
        first = its[0][1]
        svg = line_chart(lines, x_label="step", y_label=title, y_from_zero=first.from_zero)
        legend = tuple((line.style, line.label, f"{line.points[-1][1]:.3g}") for line in lines)
        found.append(Curve(title, svg, "", legend, lines, is_noisy=first.is_noisy, from_zero=first.from_zero))
    return found


def _rank(title: str, order: Sequence[str]) -> int:
    return order.index(title) if title in order else len(order)


def _chart_of(name: str, known: Sequence[CurveGroup]) -> tuple[str, str]:
    """The title of a metric's chart, and its label there."""
    for group in known:
        if match := re.fullmatch(group.pattern, name):
            return group.title, group.label(match[1])
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:], words


def _points(lines: Sequence[dict[str, Any]], value: Value, *, rounding: float = 0.0) -> list[tuple[float, float]]:
    """The finite values by step; values closer to 0 than `rounding` become 0."""
    found = ((float(line["step"]), value(line)) for line in lines)
    finite = ((step, number) for step, number in found if number is not None and math.isfinite(number))
    return [(step, 0.0 if abs(number) < rounding else number) for step, number in finite]
