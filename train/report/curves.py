"""The curves of a results page: of training, and of evaluations during training."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipmill.train.spec import CurveGroup

NUM_LAST = 20  # steps, over which noisy metrics are averaged where one number stands for a run
# Products of many small numbers, such as BLEU's, are not exactly 0 where they should be.
_ROUNDING = 1e-12
# Suffix of the titles of charts whose values are shown times 100, as in tables.
_TIMES_100 = ", times 100"

Value = Callable[[dict[str, Any]], float | None]


@dataclass(frozen=True)
class Line:
    """One line of a chart: finite values by step, at least one, and what they are of if the chart has several lines."""

    points: Sequence[tuple[float, float]]
    label: str = ""

    @property
    def text(self) -> str:
        """Its first and last value, and its range, in words."""
        values = [value for _, value in self.points]
        (first_step, first), (last_step, last) = self.points[0], self.points[-1]
        ends = f"{first:.4g} at step {first_step:,.0f}, {last:.4g} at step {last_step:,.0f}"
        return f"{f'{self.label}: ' if self.label else ''}{ends}, from {min(values):.4g} to {max(values):.4g}"


@dataclass(frozen=True)
class Curve:
    """A chart.

    Attributes:
        last: the last value as text; of a noisy metric, its mean over the last steps; empty if there are several lines.
        lines: without smoothing.
    """

    title: str
    lines: tuple[Line, ...]
    last: str = ""
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
        tail = [y for _, y in points[-NUM_LAST:]] if kind.is_noisy else [points[-1][1]]
        last = f"{sum(tail) / len(tail):.4g}"
        curves.append(Curve(kind.title, (Line(points),), last, is_noisy=kind.is_noisy, from_zero=kind.from_zero))
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
            Line(_points(lines, _key(name, scale=scale), rounding=_ROUNDING), label) for name, label in its.items()
        ]
        if drawn := [line for line in drawn if line.points]:
            curves.append(Curve(f"{title} ({split})", tuple(drawn), from_zero=True))
    return curves


def overlaid(of_runs: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """The curves that several runs have, each with the lines of all of them; a line's label begins with its run."""
    titles = Counter(curve.title for curves in of_runs.values() for curve in curves)
    found = []
    for title in (title for title, count in titles.items() if count > 1):
        its = [(run, curve) for run, curves in of_runs.items() for curve in curves if curve.title == title]
        lines = tuple(
            Line(line.points, f"{run}: {line.label}" if len(curve.lines) > 1 else run)
            for run, curve in its
            for line in curve.lines
        )
        first = its[0][1]
        found.append(Curve(title, lines, is_noisy=first.is_noisy, from_zero=first.from_zero))
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
