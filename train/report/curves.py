"""The curves of a results page: of training, and of evaluations during training."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.report.chart import Line, line_chart, smoothed
from train.spec import CurveGroup

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
        last: the last value as text.
        legend: (style, label, last value) of each line, if there are several.
    """

    title: str
    svg: str
    last: str
    legend: tuple[tuple[str, str, str], ...] = ()


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
        curves.append(Curve(kind.title, svg, f"{smooth[-1][1]:.3g}"))
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
            curves.append(Curve(f"{title} ({split})", svg, "", legend))
    return curves


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
