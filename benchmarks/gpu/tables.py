"""Format the results of a GPU as a page of Markdown: environment, targets with figures, all tables and all failures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import cell, table

_ERROR = "error"
_MOST_CHARS = 400


def page_of(path: Path) -> str:
    """Return the page for a JSON file of `benchmarks.gpu`."""
    found: dict[str, Any] = json.loads(path.read_bytes())
    environment, measurements = found["environment"], found["measurements"]
    chip = "Dry run" if found["is_dry_run"] else environment.get("gpu", "Unknown chip")
    lines = [f"# {chip}", ""]
    if found["is_dry_run"]:
        lines += ["A test of the program with tiny sizes on a CPU: the figures are meaningless.", ""]
    shown = {name: value for name, value in environment.items() if value != "none"}
    lines += table([{"of": name.replace("_", " "), "": value} for name, value in shown.items()])
    rows = [_target_row(one["name"], target) for one in measurements for target in one["targets"]]
    if found["is_dry_run"]:
        rows = [{**row, "outcome": "a dry run"} for row in rows]
    lines += ["", "## Targets", "", *(table(rows) if rows else ["No figure with a target was measured."])]
    for measurement in measurements:
        lines += ["", f"## {measurement['name']}", "", *_measurement_lines(measurement)]
    if found["running"]:
        lines += ["", f"The run ended during the measurement: {found['running']}."]
    return "\n".join(lines)


def _target_row(measurement: str, target: Mapping[str, Any]) -> dict[str, Any]:
    figure, goal, is_at_most = target["figure"], target["goal"], target["is_at_most"]
    verdict = "not measured"
    if figure is not None:
        missed = figure / goal - 1 if is_at_most else 1 - figure / goal
        verdict = "met" if missed <= 0 else f"missed by {missed:.0%}"
    bound = f"at {'most' if is_at_most else 'least'} {cell(goal)}"
    return {"table": measurement, "what": target["what"], "figure": figure, "target": bound, "outcome": verdict}


def _measurement_lines(measurement: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if rows := measurement["rows"]:
        lines += table([{key: value for key, value in row.items() if key != _ERROR} for row in rows])
    if skipped := measurement["skipped"]:
        lines.append(f"Not measured: {skipped}.")
    if error := measurement["error"]:
        lines.append(f"Not measured: `{_last_line(error)}`")
    failed = [(next(iter(row.values())), row[_ERROR]) for row in rows if row.get(_ERROR)]
    if failed:
        lines += ["", *(f"- {cell(name)} failed: `{_short(text)}`" for name, text in failed)]
    if notes := measurement["notes"]:
        lines += ["", *(f"- {note}" for note in notes)]
    return [*lines, "", f"Measured in {measurement['seconds']:.0f} s."] if rows else lines


def _last_line(text: str) -> str:
    return _short((text.strip().splitlines() or [""])[-1])


def _short(text: str) -> str:
    text = " ".join(text.split()).replace("`", "'")
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 4]} ..."
