"""Model card of exported weights: README.md, in the format of the Hugging Face Hub."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clipmill.manifests.formatting import count_noun
from clipmill.train.config.files import plain_values
from clipmill.train.config.training import flatten
from clipmill.train.evaluation.runner import OpenedRun
from clipmill.train.evaluation.tables import Table, table_of
from clipmill.train.registry import evaluations_of
from clipmill.train.report.results import initial_weights
from clipmill.train.run.environment import installed_version
from clipmill.train.run.folder import read_object
from clipmill.train.weights.exported import Export

CARD_FILE = "README.md"
_PATH = re.compile(r"(?<![\w:/])/(?:[^\s/;,]+/)*([^\s/;,]+)")
_OMITTED_LINES = ("command",)  # lines of a protocol that the card omits
_LIBRARIES = {"open_clip": "open_clip", "hf": "transformers", "lm": "transformers"}
_SETTING_NAMES = ("model", "num_frames", "sampling", "stride", "size_px", "batch", "steps", "lr", "seed")
_FACT_NAMES = ("data", "variant", "precision", "parameters")


@dataclass(frozen=True)
class _Result:
    """Result of an evaluation of the exported checkpoint; `name` is the unique name of the result file."""

    name: str
    split: str
    table: Table


def model_card(
    opened_run: OpenedRun, exported: Export, *, form: str, opener: str, folder: str, step: int | None
) -> str:
    """Return the card of exported weights, as Markdown with YAML metadata, without paths of this machine.

    Args:
        opener: Python expression that opens the exported folder, named OUT, in another library.
        folder: Name of the folder with the weights, for the code examples.
        step: Step of the exported checkpoint; None for weights without a run. Results for other steps are omitted.
    """
    facts = {} if opened_run.run is None else opened_run.run.read_facts()
    results = _results(opened_run, step=step)
    name = Path(opened_run.title).name or opened_run.title
    limits = [*exported.remarks]
    limits += ["The model reproduces the biases of its training data, and was not tested for uses that affect people."]
    limits += ["The model was not trained with clipmill: its weights were converted."] if opened_run.run is None else []
    settings = flatten(plain_values({name: getattr(opened_run.settings, name, None) for name in _SETTING_NAMES}))
    rows = [("task", opened_run.spec.name), *(() if step is None else [("optimizer steps", f"{step:,}")])]
    rows += [(name, str(facts[name])) for name in _FACT_NAMES if name in facts]
    rows += [
        (f"initial {name.replace('_', ' ')}", _source_name(start)) for name, start in initial_weights(facts).items()
    ]
    rows += [(name.replace("_", " "), str(value)) for name, value in settings.items() if value is not None]
    sections = {
        "Use": exported.usage or _usage_example(opener, folder=folder),
        "Training": "\n".join(
            ["| | |", "|---|---|", *(f"| {_plain_text(name)} | {_plain_text(text)} |" for name, text in rows)]
        ),
        "Evaluation": "\n\n".join([*_input_note(opened_run, exported), *(_table(result.table) for result in results)])
        if results
        else "Not evaluated. Run `train eval` on the run, then `train export` again, to add metrics.",
        "Limits": "\n".join(f"- {_plain_text(limit)}" for limit in limits),
        "Licence": "No licence has been chosen. Before publishing, replace `license` at the top of this file; the "
        "licences of the training data and of the initial weights apply as well.",
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)
    # The Hub attributes the metrics in the metadata to the model that its users open.
    metadata = _metadata(opened_run.spec.pipeline, form, [] if exported.model_input else results, name=name)
    front_matter = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front_matter}---\n\n# {_plain_text(name)}\n\n{_summary(opened_run)}\n\n{body}\n"


def _metadata(pipeline: str | None, form: str, results: Sequence[_Result], *, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"license": "unknown", "pipeline_tag": pipeline, "tags": ["video", "clipmill"]}
    if form in _LIBRARIES:
        metadata["library_name"] = _LIBRARIES[form]
    entries = [
        {
            "task": {"type": pipeline or "other", "name": f"{result.table.title} ({result.name})"},
            "dataset": {
                "name": _shorten_paths(result.table.protocol.get("data", "")),
                "type": "custom",
                "split": result.split,
            },
            "metrics": [
                {"name": f"{result.name}, {row.label}: {column}", "type": column, "value": round(100 * cell.share, 2)}
                for row in result.table.rows
                if not row.is_baseline
                for column, cell in zip(result.table.columns, row.cells, strict=True)
                if cell.share is not None
            ],
        }
        for result in results
    ]
    if any(entry["metrics"] for entry in entries):
        metadata["model-index"] = [{"name": name, "results": [entry for entry in entries if entry["metrics"]]}]
    return {name: value for name, value in metadata.items() if value is not None}


def _summary(opened_run: OpenedRun) -> str:
    settings = opened_run.settings
    kind = opened_run.spec.name.replace("-", " ")
    return (
        f"A {kind} model for video ({settings.model}), for clips of {count_noun(settings.num_frames, 'frame')} at "
        f"{settings.size_px} x {settings.size_px} pixels. Trained with clipmill {installed_version('clipmill')}."
    )


def _usage_example(opener: str, *, folder: str) -> str:
    folder_text, local_text = json.dumps(folder), json.dumps(f"local-dir:{folder}")
    if match := re.match(r"(\w+)\.from_pretrained", opener):
        lines = [f"from transformers import {match[1]}", "", f"model = {match[1]}.from_pretrained({folder_text})"]
    elif opener.startswith("create_model"):
        lines = [
            "import open_clip",
            "",
            f"model, _, preprocess = open_clip.create_model_and_transforms({local_text})",
            f"tokenizer = open_clip.get_tokenizer({local_text})",
        ]
    else:
        lines = [f"# {opener}"]
    code = ["from clipmill import load_model", "", f"model = load_model({folder_text})"]
    return "\n".join(
        [
            "```python",
            *lines,
            "```",
            "",
            "With clipmill, which can also read video clips:",
            "",
            "```python",
            *code,
            "```",
        ]
    )


def _source_name(report: Mapping[str, Any]) -> str:
    """Return the name of initial weights, without folders of this machine."""
    source = str(report["source"])
    return Path(source).name if "/" in source else source


def _results(opened_run: OpenedRun, *, step: int | None) -> list[_Result]:
    """Return the results of the exported checkpoint with the same overrides (frames and size) as the export."""
    evaluations, overrides = (
        {evaluation.result_name: evaluation for evaluation in evaluations_of(opened_run.spec.name)},
        opened_run.overrides.given_values(),
    )
    results = {} if opened_run.run is None else {path.stem: read_object(path) for path in opened_run.run.results()}
    return [
        _Result(name, str(result["split"]), table_of(evaluations[result["evaluation"]].table, result))
        for name, result in results.items()
        if result.get("evaluation") in evaluations
        and result.get("step") == step
        and result.get("overrides", {}) == overrides
    ]


def _input_note(opened_run: OpenedRun, exported: Export) -> list[str]:
    """Return a note that the metrics apply only to the video model, if other libraries open a different model."""
    if not exported.model_input:
        return []
    num_frames = count_noun(opened_run.settings.num_frames, "frame")
    return [
        f"**These are metrics of the run's video model, which reads clips of {num_frames} and is opened by "
        "`clipmill.load_model`. The model that other libraries open from this folder reads "
        f"{exported.model_input}, computes something else, and was not evaluated.** To evaluate that model, use "
        "`train eval NAME RUN --num-frames 1` (add `--clips N` to average over N frames). `train export RUN "
        "--num-frames 1` then exports that model, with the new metrics in the card."
    ]


def _table(table: Table) -> str:
    lines = [f"### {_plain_text(table.title)}", "", f"| | {' | '.join(map(_plain_text, table.columns))} |"]
    lines.append("|---|" + "---|" * len(table.columns))
    for row in table.rows:
        lines.append(f"| {_plain_text(row.label)} | {' | '.join(_plain_text(cell.text) for cell in row.cells)} |")
        if any(cell.reference for cell in row.cells):
            cells = " | ".join(f"*{_plain_text(cell.reference)}*" if cell.reference else "" for cell in row.cells)
            lines.append(f"| *{table.reference}* | {cells} |")
    protocol = [
        f"- {_plain_text(name)}: {_plain_text(text)}"
        for name, text in table.protocol.items()
        if name not in _OMITTED_LINES
    ]
    return "\n".join([*lines, "", *protocol])


def _plain_text(text: str) -> str:
    """Return text for a Markdown table cell or list item: one line without markup or paths of this machine."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", _shorten_paths(" ".join(text.split())))


def _shorten_paths(text: str) -> str:
    """Return the text with each absolute path reduced to its last component."""
    return _PATH.sub(lambda match: match[1], text)
