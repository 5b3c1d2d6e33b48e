"""Writes the results of one GPU as a page: the environment, targets and figures, all tables, and all failures.

    python -m benchmarks.gpu.tables OUT

Reads correctness.xml, speed.json and feeding.json in OUT, as far as they exist, and writes OUT/<chip>.md, for example
nvidia-h200.md; dry-run.md after a dry run.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from manifests.errors import UserError, run_command
from manifests.publish import published

SPEED, FEEDING, CORRECTNESS = "speed.json", "feeding.json", "correctness.xml"
_TITLES = {CORRECTNESS: "Correctness", SPEED: "Speed", FEEDING: "Feeding it"}
_ERROR = "error"
_MOST_CHARS = 400


def main() -> None:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder with the results of the parts")
    arguments = parser.parse_args()
    run_command(lambda: print(write_page(arguments.out)))


def write_page(out: Path) -> Path:
    """Write the page of the results in `out`.

    Raises:
        UserError: there are no results, or a file is damaged.
    """
    parts = {name: _read(out / name) for name in (SPEED, FEEDING) if (out / name).is_file()}
    xml = out / CORRECTNESS
    if not parts and not xml.is_file():
        raise UserError(f"{out} has no results", hint=f"give a folder with {CORRECTNESS}, {SPEED} or {FEEDING}")
    chip = _chip(parts)
    lines = [f"# {chip}", "", *_environment_lines(parts), "", "## Targets", "", *_target_lines(parts)]
    lines += ["", f"## {_TITLES[CORRECTNESS]}", "", *_correctness_lines(xml)]
    for name in (SPEED, FEEDING):
        lines += ["", f"## {_TITLES[name]}", "", *(_part_lines(parts[name]) if name in parts else ["Not measured."])]
    path = out / f"{re.sub(r'[^a-z0-9]+', '-', chip.lower()).strip('-')}.md"
    with published(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict) or not {"environment", "is_dry_run", "measurements"} <= found.keys():
        raise _damaged(path, "not a result of a part")
    return found


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} cannot be read: {why}", hint="run the part again, or remove the file")


def _chip(parts: Mapping[str, Any]) -> str:
    if any(part["is_dry_run"] for part in parts.values()):
        return "Dry run"
    return next((part["environment"]["gpu"] for part in parts.values() if "gpu" in part["environment"]), "Unknown chip")


def _environment_lines(parts: Mapping[str, Any]) -> list[str]:
    lines = []
    if any(part["is_dry_run"] for part in parts.values()):
        lines += ["Tiny sizes on a CPU, as a test of the programs: the figures are meaningless.", ""]
    found: dict[str, str] = {}
    for part in parts.values():
        found = {**part["environment"], **found}
    if not found:
        return [*lines, "The environment is unknown: neither speed nor feeding was measured."]
    if len({part["environment"]["commit"] for part in parts.values()}) > 1:
        lines += ["**The parts were measured at different commits.**", ""]
    shown = {name: value for name, value in found.items() if value != "none"}
    return [*lines, *table([{"of": name.replace("_", " "), "": value} for name, value in shown.items()])]


def _target_lines(parts: Mapping[str, Any]) -> list[str]:
    rows = []
    for part in parts.values():
        for measurement in part["measurements"]:
            rows += [_target_row(measurement["name"], target) for target in measurement.get("targets", [])]
    if any(part["is_dry_run"] for part in parts.values()):
        rows = [{**row, "outcome": "a dry run"} for row in rows]
    return table(rows) if rows else ["No figure with a target was measured."]


def _target_row(measurement: str, target: Mapping[str, Any]) -> dict[str, Any]:
    figure, goal, is_at_most = target["figure"], target["goal"], target["is_at_most"]
    verdict = "not measured"
    if figure is not None:
        missed = figure / goal - 1 if is_at_most else 1 - figure / goal
        verdict = "met" if missed <= 0 else f"missed by {missed:.0%}"
    bound = f"at {'most' if is_at_most else 'least'} {cell(goal)}"
    return {"table": measurement, "what": target["what"], "figure": figure, "target": bound, "outcome": verdict}


def _part_lines(part: Mapping[str, Any]) -> list[str]:
    environment = part["environment"]
    lines = [f"Commit {environment['commit']}, {environment['date']}."]
    for measurement in part["measurements"]:
        lines += ["", f"### {measurement['name']}", "", *_measurement_lines(measurement)]
    if part.get("running"):
        lines += ["", f"The run ended during the measurement: {part['running']}."]
    return lines


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


def _correctness_lines(path: Path) -> list[str]:
    """Return counts, failed and skipped tests by name, and the records of the tests."""
    if not path.is_file():
        return ["Not measured."]
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except ElementTree.ParseError as error:
        raise _damaged(path, str(error)) from None
    counted = {
        key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    }
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    passed = counted["tests"] - counted["failures"] - counted["errors"] - counted["skipped"]
    failed = counted["failures"] + counted["errors"]
    lines = [f"{passed} passed, {failed} failed, {counted['skipped']} skipped, in {seconds:.0f} s."]
    cases = [case for suite in suites for case in suite.iter("testcase")]
    recorded = []
    for title, tags in (("Failed", ("failure", "error")), ("Skipped", ("skipped",))):
        found = [(case, one) for case in cases for one in case if one.tag in tags]
        if found:
            lines += ["", f"{title}:", ""]
            lines += [f"- {_test_name(case)}: `{_short(one.get('message') or one.text or '')}`" for case, one in found]
    for case in cases:
        for one in case.iter("property"):
            recorded.append({"test": _test_name(case), "what": one.get("name"), "value": one.get("value")})
    return [*lines, "", *table(recorded)] if recorded else lines


def _test_name(case: ElementTree.Element) -> str:
    file = (case.get("classname") or "").rpartition(".")[2]
    return f"{file}: {case.get('name')}" if file else str(case.get("name"))


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format a Markdown table with the columns of all rows, except columns without any value."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if any(row.get(key) is not None for row in rows)]
    headings = ["variant" if key == "way" else key for key in columns]
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell(row.get(key)) for key in columns)} |" for row in rows]


def cell(value: object) -> str:
    """Format a table cell: at least three digits of a number, and an empty cell for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split()).replace("|", "\\|")


def _last_line(text: str) -> str:
    return _short((text.strip().splitlines() or [""])[-1])


def _short(text: str) -> str:
    text = " ".join(text.split()).replace("`", "'")
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 4]} ..."


if __name__ == "__main__":
    main()
