"""The results page of a run (index.html) and the table that `train eval` prints. One file, nothing to load."""

import json
from pathlib import Path
from typing import Any

from manifests.publish import publish_bytes
from train.chart import Line, line_chart, smoothed
from train.run_folder import RunFolder, read_lines

_TEMPLATE = Path(__file__).parent / "report.html.j2"
DIRECTIONS = {"text_to_video": "text → video", "video_to_text": "video → text"}


def write_page(run: RunFolder) -> None:
    """Writes the page anew from the files of the run."""
    # Markup from jinja2 itself: what the charts return is markup, all else is escaped.
    import yaml
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    lines = read_lines(run.metrics)
    facts: dict[str, Any] = json.loads(run.facts.read_bytes()) if run.facts.exists() else {}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=run.path.resolve().name,
        facts=facts,
        settings=yaml.safe_load(run.settings.read_bytes()),
        summary=_summary(lines),
        loss_chart=Markup(_loss_chart(lines)),
        wait_chart=Markup(_wait_chart(lines)),
        evaluations=_evaluations(run),
        directions=DIRECTIONS,
        failures=read_lines(run.failures),
    )
    publish_bytes(run.page, page.encode())


def describe_retrieval(result: dict[str, Any]) -> str:
    """The table of a retrieval result as text, protocol and chance beside the numbers."""
    rows = [f"{'':14}" + "".join(f"{'R@' + str(k):>9}" for k in (1, 5, 10)) + f"{'median rank':>13}"]
    for key, name in DIRECTIONS.items():
        scores = result[key]
        for label, shares, median in (
            (name, scores["recall"], scores["median_rank"]),
            ("  by chance", scores["chance"], scores["chance_median_rank"]),
        ):
            cells = "".join(f"{100 * share:>7.1f} %" for share in shares.values())
            rows.append(f"{label:14}{cells}{median:>13.1f}")
    to_video, to_text = (result[key] for key in DIRECTIONS)
    rows += [
        f"data: {result['data']}; {result['variant']}",
        f"protocol: {to_video['num_queries']} distinct texts, {to_text['num_queries']} clips; {result['protocol']}",
        f"clip: {result['clip']}; checkpoint of step {result['step']}",
    ]
    return "\n".join(rows)


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    if not lines:
        return {"num_steps": 0}
    # The first step warms caches and fills the loader's queue.
    steady = lines[1:] or lines
    took_s = sum(line["step_s"] for line in steady)
    waited_s = sum(line["data_wait_s"] for line in steady)
    last = lines[-20:]
    return {
        "num_steps": lines[-1]["step"],
        "first_loss": lines[0]["loss"],
        "last_loss": sum(line["loss"] for line in last) / len(last),
        "took_s": took_s,
        "samples_per_s": sum(line["samples_per_s"] * line["step_s"] for line in steady) / took_s,
        "wait_share": waited_s / took_s,
        "epochs": lines[-1].get("epoch"),  # a stream does not know how long one is
    }


def _loss_chart(lines: list[dict[str, Any]]) -> str:
    points = [(line["step"], line["loss"]) for line in lines]
    return line_chart([Line(points, "raw"), Line(smoothed(points), "smooth")], x_label="step", y_label="loss")


def _wait_chart(lines: list[dict[str, Any]]) -> str:
    points = [(line["step"], 100 * line["data_wait_s"] / line["step_s"]) for line in lines[1:]]
    return line_chart(
        [Line(points, "raw"), Line(smoothed(points), "smooth")],
        x_label="step",
        y_label="share of a step spent waiting for data, percent",
        y_from_zero=True,
    )


def _evaluations(run: RunFolder) -> list[dict[str, Any]]:
    paths = sorted(run.evaluation("any").parent.glob("retrieval-*.json"))
    return [json.loads(path.read_bytes()) for path in paths]
