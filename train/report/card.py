"""The model card of exported weights: README.md, in the form in which the Hugging Face Hub shows it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clipmill.train.config.files import plain_values
from clipmill.train.config.training import flat
from clipmill.train.evaluation.runner import OpenedRun
from clipmill.train.evaluation.tables import Table, table_of
from clipmill.train.registry import evaluations_of
from clipmill.train.report.results import initial_weights
from clipmill.train.run.environment import installed_version
from clipmill.train.run.folder import RunFolder, read_object

CARD_FILE = "README.md"
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s/;,]+/)*([^\s/;,]+)")
_NOT_EVALUATED = "Not evaluated. `train eval` of the run writes the metrics that the next export shows here."
_LEFT_OUT = ("command",)  # lines of a protocol
_LIBRARIES = {"open_clip": "open_clip", "hf": "transformers"}
_SHOWN_SETTINGS = ("model", "num_frames", "sampling", "stride", "size_px", "batch", "steps", "lr", "seed")
_FACTS = ("data", "variant", "precision", "parameters")


def model_card(
    opened: OpenedRun, *, form: str, opens: str, folder: str, step: int | None, remarks: Sequence[str]
) -> str:
    """Return the card of exported weights, in Markdown with YAML metadata. It contains no path of this machine.

    Args:
        opens: the expression that opens the folder OUT in another library.
        folder: name of the folder of weights, for the code that opens it.
        step: of the exported checkpoint; None for weights that are not a run's. Results of other steps are left out.
        remarks: what the format could not hold.
    """
    facts = {} if opened.run is None else opened.run.read_facts()
    tables = [] if opened.run is None else _tables(opened.run, opened.spec.name, step=step)
    name = Path(opened.title).name or opened.title
    sections = {
        "Use": _use(opens, folder=folder),
        "Training": _training(opened, facts, step=step),
        "Evaluation": "\n\n".join(map(_table, tables))
        or "Not evaluated. `train eval` on the run, then `train export`, writes the metrics here.",
        "Limits": "\n".join(f"- {_plain(one)}" for one in [*remarks, *_limits(opened)]),
        "Licence": "No licence has been chosen. Before publishing, replace `license` at the top of this file; the "
        "licences of the training data and of the initial weights apply as well.",
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)
    metadata = _metadata(opened.spec.pipeline, form, tables, name=name)
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n# {_plain(name)}\n\n{_summary(opened)}\n\n{body}\n"


def _metadata(pipeline: str | None, form: str, tables: Sequence[Table], *, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"license": "unknown", "pipeline_tag": pipeline, "tags": ["video", "clipmill"]}
    if form in _LIBRARIES:
        metadata["library_name"] = _LIBRARIES[form]
    results = [
        {
            "task": {"type": pipeline or "other", "name": table.title},
            "dataset": {"name": _private(table.protocol.get("data", "")), "type": "custom"},
            "metrics": [
                {"name": f"{row.label}: {column}", "type": column, "value": round(100 * cell.share, 2)}
                for row in table.rows
                for column, cell in zip(table.columns, row.cells, strict=True)
                if cell.share is not None
            ],
        }
        for table in tables
    ]
    if any(result["metrics"] for result in results):
        metadata["model-index"] = [{"name": name, "results": [result for result in results if result["metrics"]]}]
    return {name: value for name, value in metadata.items() if value is not None}


def _summary(opened: OpenedRun) -> str:
    settings = opened.settings
    kind = opened.spec.name.replace("-", " ")
    return (
        f"A {kind} model for video ({settings.model}), for clips of {settings.num_frames} frames of "
        f"{settings.size_px} x {settings.size_px} pixels. Trained with clipmill {installed_version('clipmill')}."
    )


def _use(opens: str, *, folder: str) -> str:
    quoted, local = json.dumps(folder), json.dumps(f"local-dir:{folder}")
    if found := re.match(r"(\w+)\.from_pretrained", opens):
        lines = [f"from transformers import {found[1]}", "", f"model = {found[1]}.from_pretrained({quoted})"]
    elif opens.startswith("create_model"):
        lines = [
            "import open_clip",
            "",
            f"model, _, preprocess = open_clip.create_model_and_transforms({local})",
            f"tokenizer = open_clip.get_tokenizer({local})",
        ]
    else:
        lines = [f"# {opens}"]
    own = ["from clipmill import load_model", "", f"model = load_model({quoted})"]
    return "\n".join(
        ["```python", *lines, "```", "", "With clipmill, also for clips of video:", "", "```python", *own, "```"]
    )


def _training(opened: OpenedRun, facts: Mapping[str, Any], *, step: int | None) -> str:
    settings = flat(plain_values({name: getattr(opened.settings, name, None) for name in _SHOWN_SETTINGS}))
    rows = [("task", opened.spec.name), *(() if step is None else [("optimizer steps", f"{step:,}")])]
    rows += [(name, str(facts[name])) for name in _FACTS if name in facts]
    rows += [(f"initial {name.replace('_', ' ')}", _start(start)) for name, start in initial_weights(facts).items()]
    rows += [(name.replace("_", " "), str(value)) for name, value in settings.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *(f"| {_plain(name)} | {_plain(text)} |" for name, text in rows)])


def _start(report: Mapping[str, Any]) -> str:
    """The name of initial weights, without the folders of this machine."""
    source = str(report["source"])
    return Path(source).name if "/" in source else source


def _tables(run: RunFolder, task: str, *, step: int | None) -> list[Table]:
    """Results on the run's own data at a step, as trained."""
    known = {one.result_name: one for one in evaluations_of(task)}
    results = [read_object(path) for path in run.results()]
    return [
        table_of(known[result["evaluation"]].table, result)
        for result in results
        if result.get("evaluation") in known and result.get("step") == step and not result.get("overrides")
    ]


def _table(table: Table) -> str:
    lines = [f"### {_plain(table.title)}", "", f"| | {' | '.join(map(_plain, table.columns))} |"]
    lines.append("|---|" + "---|" * len(table.columns))
    for row in table.rows:
        lines.append(f"| {_plain(row.label)} | {' | '.join(_plain(cell.text) for cell in row.cells)} |")
        if any(cell.chance for cell in row.cells):
            lines.append(f"| *chance* | {' | '.join(f'*{_plain(cell.chance)}*' for cell in row.cells)} |")
    protocol = [f"- {_plain(name)}: {_plain(text)}" for name, text in table.protocol.items() if name not in _LEFT_OUT]
    return "\n".join([*lines, "", *protocol])


def _limits(opened: OpenedRun) -> list[str]:
    return [
        "The model reproduces the biases of its training data, and was not tested for uses that affect people.",
        *(["It was not trained here: these are converted weights."] if opened.run is None else []),
    ]


def _plain(text: str) -> str:
    """Text in a cell or line of Markdown: on one line, without markup and paths of this machine."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", _private(" ".join(text.split())))


def _private(text: str) -> str:
    """Text in which absolute paths are reduced to their last part."""
    return _PATH.sub(lambda found: found[1], text)
