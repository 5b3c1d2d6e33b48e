"""The results page of a run (index.html), rendered from the files of the run.

uPlot draws the charts. It adds 51 kB to the page; Plotly's basic bundle would add 1,192 kB, and Vega-Lite without Vega
251 kB. Without scripts, the page shows the first value, last value and range of each line as text.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import duration_text, escape_invisible
from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.storage.mirrors import show_urls
from clipmill.shards.pages.templates import load_template
from clipmill.train.config.files import read_values
from clipmill.train.config.training import TrainingSettings, flatten, plain_values
from clipmill.train.evaluation.tables import class_view, table_of
from clipmill.train.registry import DEFAULT, evaluations_of, find_task, task_names
from clipmill.train.run.folder import RunFolder, other_data, read_lines, read_object
from clipmill.train.spec import CurveGroup, EvaluationSpec

NUM_LAST = 20  # number of final steps over which a noisy metric is averaged
# Products of many small numbers, as in BLEU, may differ slightly from 0 where they should be 0.
_ROUNDING = 1e-12
# Suffix of the titles of charts whose values are multiplied by 100, as in tables.
_TIMES_100 = ", times 100"

Value = Callable[[dict[str, Any]], float | None]


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    Attributes:
        points: Pairs of step and finite value, at least one.
        label: Name of the line; empty if the chart has only one line.
    """

    points: Sequence[tuple[float, float]]
    label: str = ""

    @property
    def text(self) -> str:
        """First value, last value and range, as text."""
        values = [value for _, value in self.points]
        (first_step, first), (last_step, last) = self.points[0], self.points[-1]
        ends = f"{first:.4g} at step {first_step:,.0f}, {last:.4g} at step {last_step:,.0f}"
        return f"{f'{self.label}: ' if self.label else ''}{ends}, from {min(values):.4g} to {max(values):.4g}"


@dataclass(frozen=True)
class Curve:
    """Chart on a page.

    Attributes:
        lines: Lines without smoothing.
        last: Last value as text, or the mean of the last steps for a noisy metric; empty if there are several lines.
        is_noisy: True if the chart is smoothed.
        from_zero: True if the vertical axis starts at 0, unless values are negative.
    """

    title: str
    lines: tuple[Line, ...]
    last: str = ""
    is_noisy: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class _Metric:
    """Training metric in metrics.jsonl, shown as a chart."""

    title: str
    value: Value
    is_noisy: bool = True
    from_zero: bool = False
    includes_first_step: bool = True  # False for speeds: caches and the loader's queue are still empty in that step


def _value_of(name: str, *, scale: float = 1.0) -> Value:
    def value(line: dict[str, Any]) -> float | None:
        number = line.get(name)
        return None if number is None else scale * float(number)

    return value


_TRAINING_METRICS = (
    _Metric("Loss", _value_of("loss")),
    _Metric("Batch accuracy, %", _value_of("batch_accuracy", scale=100), from_zero=True),
    _Metric("Learning rate", _value_of("lr"), is_noisy=False, from_zero=True),
    _Metric("Temperature", _value_of("temperature"), is_noisy=False),
    _Metric("Gradient norm", _value_of("grad_norm"), from_zero=True),
    _Metric("Samples per second", _value_of("samples_per_s"), from_zero=True, includes_first_step=False),
    _Metric(
        "Waiting for data, % of a step",
        lambda line: 100 * line["data_wait_s"] / line["step_s"] if line.get("step_s") else None,
        from_zero=True,
        includes_first_step=False,
    ),
    _Metric("GPU memory, GB", _value_of("gpu_memory_gb"), is_noisy=False, from_zero=True),
    _Metric("Model FLOPS utilisation, %", _value_of("mfu", scale=100), from_zero=True, includes_first_step=False),
)


def training_curves(lines: Sequence[dict[str, Any]]) -> list[Curve]:
    """Return a chart for each training metric that the lines of metrics.jsonl contain."""
    curves = []
    for metric in _TRAINING_METRICS:
        points = _points(lines if metric.includes_first_step else lines[1:], metric.value)
        if not points:
            continue
        tail = [y for _, y in points[-NUM_LAST:]] if metric.is_noisy else [points[-1][1]]
        last = f"{sum(tail) / len(tail):.4g}"
        curves.append(Curve(metric.title, (Line(points),), last, is_noisy=metric.is_noisy, from_zero=metric.from_zero))
    return curves


def evaluation_curves(lines: Sequence[dict[str, Any]], groups_of_metrics: Sequence[CurveGroup]) -> list[Curve]:
    """Return a chart for each group of evaluation metrics and each split. Metrics are named `<split>/<name>`."""
    names = dict.fromkeys(name for line in lines for name in line if "/" in name)
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        split, _, metric = name.partition("/")
        title, label = _chart_of(metric, groups_of_metrics)
        groups.setdefault((split, title), {})[name] = label
    order = [group.title for group in groups_of_metrics]
    curves = []
    # Charts are in the order of `groups_of_metrics`; metrics without a group come last.
    rank = {title: index for index, title in reversed([*enumerate(order)])}
    for (split, title), labels in sorted(groups.items(), key=lambda group: rank.get(group[0][1], len(order))):
        scale = 100.0 if title.endswith(("%", _TIMES_100)) else 1.0
        chart_lines = [
            Line(_points(lines, _value_of(name, scale=scale), rounding=_ROUNDING), label)
            for name, label in labels.items()
        ]
        if chart_lines := [line for line in chart_lines if line.points]:
            curves.append(Curve(f"{title} ({split})", tuple(chart_lines), from_zero=True))
    return curves


def overlay_curves(curves_by_run: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    """Return a chart for each curve that several runs share. The labels of the lines begin with the name of the run."""
    titles = Counter(curve.title for curves in curves_by_run.values() for curve in curves)
    overlays = []
    for title in (title for title, count in titles.items() if count > 1):
        pairs = [(run, curve) for run, curves in curves_by_run.items() for curve in curves if curve.title == title]
        lines = tuple(
            Line(line.points, f"{run}: {line.label}" if len(curve.lines) > 1 else run)
            for run, curve in pairs
            for line in curve.lines
        )
        first_curve = pairs[0][1]
        overlays.append(Curve(title, lines, is_noisy=first_curve.is_noisy, from_zero=first_curve.from_zero))
    return overlays


def _chart_of(name: str, groups: Sequence[CurveGroup]) -> tuple[str, str]:
    """Return the title of the chart for a metric, and the label of the metric in this chart."""
    for group in groups:
        if match := re.fullmatch(group.pattern, name):
            return group.title, group.label(match[1])
    label = name.replace("_", " ")
    return label[:1].upper() + label[1:], label


def _points(lines: Sequence[dict[str, Any]], value: Value, *, rounding: float = 0.0) -> list[tuple[float, float]]:
    """Return pairs of step and finite value. Values closer to 0 than `rounding` become 0."""
    values = ((float(line["step"]), value(line)) for line in lines)
    pairs = ((step, number) for step, number in values if number is not None and math.isfinite(number))
    return [(step, 0.0 if abs(number) < rounding else number) for step, number in pairs]


_FOLDER = Path(__file__).parent
_MAX_POINTS = 2000  # maximum number of points per line; longer lines are reduced to means and extremes of equal parts
_NUM_DIGITS = 6


def chart_values(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the template values that a page needs to draw `curves`: `json`, `scripts` and `style`."""
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
    # Escape "<": otherwise, text could close the script element.
    text = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    uplot = _FOLDER / "uplot"
    scripts = ((uplot / "uPlot.iife.min.js").read_text(), (_FOLDER / "charts.js").read_text())
    return {"json": text, "scripts": scripts, "style": (uplot / "uPlot.min.css").read_text()}


def _line(line: Line) -> dict[str, Any]:
    """Return a line as x, y, means for smoothing, and the number of points that each mean represents."""
    size = -(-len(line.points) // (_MAX_POINTS // 2)) if len(line.points) > _MAX_POINTS else 1
    parts = [line.points[begin : begin + size] for begin in range(0, len(line.points), size)]
    columns: dict[str, Any] = {"label": escape_invisible(line.label), "x": [], "y": [], "mean": [], "count": []}
    for part in parts:
        mean = sum(y for _, y in part) / len(part)
        extremes = sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
        for x, y in extremes:
            columns["x"].append(x)
            columns["y"].append(float(f"{y:.{_NUM_DIGITS}g}"))
            columns["mean"].append(float(f"{mean:.{_NUM_DIGITS}g}"))
            columns["count"].append(len(part) / len(extremes))
    return columns


_MAIN_SETTINGS = ("preset", "model", "batch", "steps", "lr", "num_frames", "size_px", "seed")


def write_page(run: RunFolder) -> None:
    """Render the page from the files of the run."""
    publish_page("report.html.j2", run.page, **page_of(run))


def page_of(run: RunFolder) -> dict[str, Any]:
    """Return the template values of a run's page."""
    lines = read_lines(run.metrics)
    facts = run.read_facts()
    task = str(facts.get("task", DEFAULT))
    evaluations = evaluations_of(task)
    settings = flatten({str(key): value for key, value in read_values(run.settings).items()})
    curves = training_curves(lines)
    charts_of_evaluations = evaluation_curves(
        lines, [group for evaluation in evaluations for group in evaluation.curves]
    )
    # Each data folder of a mixture, with the number of samples drawn from it so far, including failed samples.
    counts = lines[-1].get("sources", {}) if lines else {}
    sources = [{**source, "count": counts.get(source["name"], 0)} for source in facts.get("sources", [])]
    total = sum(source["count"] for source in sources)
    # The page first shows the most important settings, and the settings that differ from their defaults.
    settings_class = find_task(task).settings if task in task_names() else TrainingSettings
    defaults = flatten(plain_values(asdict(settings_class())))
    return {
        "name": run.name,
        "command": show_urls(shlex.join(["train", task, "--config", str(run.settings), "--out", f"{run.path}-again"])),
        "facts": facts,
        "chosen": {
            name: ", ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in settings.items()
            if name in _MAIN_SETTINGS or str(value) != str(defaults.get(name, value))
        },
        "settings": settings,
        "summary": _summary(lines),
        "sources": [{**source, "trained": source["count"] / total if total else 0.0} for source in sources],
        "curves": curves,
        "evaluation_curves": charts_of_evaluations,
        "charts": chart_values([*charts_of_evaluations, *curves]),
        "results": _results(run, evaluations, trained_split=settings.get("split")),
        "weights": [_weights(start) for start in initial_weights(facts).values()],
        "failures": read_lines(run.failures),
    }


def _results(run: RunFolder, evaluations: Sequence[EvaluationSpec], *, trained_split: object) -> list[dict[str, Any]]:
    """Return the results of evaluations: first on the run's data, with the training split last; then on other data."""
    order = {evaluation.result_name: index for index, evaluation in enumerate(evaluations)}
    results = []
    for path in run.results():
        result = read_object(path)
        if result.get("evaluation") not in order:
            raise UserError(
                f"{path} is the result of an unknown evaluation: {result.get('evaluation')}",
                hint="install the package that provides the evaluation (see packages in run.json), or remove the file",
            )
        try:
            results.append({**result, **_shown_result(result, evaluations[order[result["evaluation"]]])})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UserError(
                f"{path} is damaged: {error!r}", hint="remove the file, or run the evaluation again"
            ) from error
    return sorted(
        results,
        key=lambda result: (
            bool(result["other_data"]),
            bool(result["overridden"]),
            order[result["evaluation"]],
            result["split"] == trained_split,
        ),
    )


def _shown_result(result: dict[str, Any], evaluation: EvaluationSpec) -> dict[str, Any]:
    """Return the values of a result that a page needs in addition to the stored result."""
    source = {"other_data": other_data(result), "is_part_of_own_data": result.get("is_part_of_own_data", False)}
    section = evaluation.section if result.get(evaluation.pictures) else None
    table = table_of(evaluation.table, result)
    return {
        **source,
        "split": str(result["split"]),
        "table": table,
        "overridden": ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in result.get("overrides", {}).items()
        ),
        "section": section
        and load_template(section).render(
            result={**result, **source}, title=table.title, class_views=map(class_view, result.get("by_class", []))
        ),
        "strips": evaluation.strips(result) if section and evaluation.strips else [],
    }


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    if not lines:
        return {"num_steps": 0}
    # In the first step, caches and the loader's queue are still empty.
    later_lines = lines[1:] or lines
    took_s = sum(line["step_s"] for line in later_lines)
    waited_s = sum(line["data_wait_s"] for line in later_lines)
    last_lines = lines[-NUM_LAST:]
    memory_gb = [line["gpu_memory_gb"] for line in lines if "gpu_memory_gb" in line]
    mfu = [line["mfu"] for line in later_lines if "mfu" in line]
    return {
        "num_steps": lines[-1]["step"],
        "first_loss": lines[0]["loss"],
        "last_loss": sum(line["loss"] for line in last_lines) / len(last_lines),
        "num_last": len(last_lines),
        "took": duration_text(sum(line["step_s"] for line in lines)),
        "samples_per_s": sum(line["samples_per_s"] * line["step_s"] for line in later_lines) / took_s,
        "wait_share": waited_s / took_s,
        "epochs": lines[-1].get("epoch"),  # streams have no epochs
        "memory_gb": max(memory_gb, default=None),
        "mfu": sum(mfu) / len(mfu) if mfu else None,
    }


def initial_weights(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of run.json about initial weights: `weights`, and parts such as `decoder_weights`."""
    return {name: value for name, value in facts.items() if name.endswith("weights") and isinstance(value, dict)}


def _weights(report: dict[str, Any]) -> dict[str, Any]:
    """Return how the tensors of the initial weights were used. Equal changes in several blocks share a row."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for change in report["changes"]:
        name = re.sub(r"\.\d+\.", ".*.", change["origin"] or change["name"])
        groups.setdefault((change["kind"], name, change["why"]), []).append(change)
    rows = []
    for (kind, name, why), changes in groups.items():
        row = {"kind": kind, "name": name, "why": why, "count": len(changes)}
        for key in ("old", "new"):
            shape = changes[0].get(key)
            row[key] = "" if shape is None else " x ".join(map(str, shape)) or "one number"
        rows.append(row)
    return {"source": report["source"], "num_copied": report["num_copied"], "rows": rows}


def publish_page(template: str, path: Path, **values: Any) -> None:
    """Render a template in this folder, and publish the page."""
    page = load_template(Path(__file__).with_name(template)).render(**values, scripts=values["charts"]["scripts"])
    publish_bytes(path, page.encode())
