"""The results page of a run (index.html), rendered from the files of the run."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import duration_text
from clipmill.manifests.publish import publish_bytes
from clipmill.shards.pages.templates import load_template
from clipmill.train.config.files import read_values
from clipmill.train.config.training import TrainingSettings, flatten, plain_values
from clipmill.train.evaluation.by_class import class_view
from clipmill.train.evaluation.tables import table_of
from clipmill.train.registry import DEFAULT, evaluations_of, find_task, task_names
from clipmill.train.report.charts import chart_values
from clipmill.train.report.curves import NUM_LAST, evaluation_curves, training_curves
from clipmill.train.run.folder import RunFolder, read_lines, read_object
from clipmill.train.run.result_names import other_data
from clipmill.train.spec import EvaluationSpec

_SHOWN_SETTINGS = ("preset", "model", "batch", "steps", "lr", "num_frames", "size_px", "seed")


def write_page(run: RunFolder) -> None:
    """Render the page from the files of the run."""
    publish_page("report.html.j2", run.page, **page_of(run))


def page_of(run: RunFolder) -> dict[str, Any]:
    """The values of the page's template."""
    lines = read_lines(run.metrics)
    facts = run.read_facts()
    task = str(facts.get("task", DEFAULT))
    known = evaluations_of(task)
    settings = flatten({str(key): value for key, value in read_values(run.settings).items()})
    curves = training_curves(lines)
    of_evaluations = evaluation_curves(lines, [group for one in known for group in one.curves])
    return {
        "name": run.path.resolve().name,
        "command": _command(run, task),
        "facts": facts,
        "chosen": _chosen_settings(settings, task),
        "settings": settings,
        "summary": _summary(lines),
        "sources": _sources(facts, lines),
        "curves": curves,
        "evaluation_curves": of_evaluations,
        "charts": chart_values([*of_evaluations, *curves]),
        "results": _results(run, known, own_split=settings.get("split")),
        "weights": [_weights(start) for start in initial_weights(facts).values()],
        "failures": read_lines(run.failures),
    }


def _results(run: RunFolder, known: Sequence[EvaluationSpec], *, own_split: object) -> list[dict[str, Any]]:
    """Results of evaluations: those on the run's own data first, those on its training split last."""
    order = {one.result_name: number for number, one in enumerate(known)}
    results = []
    for path in run.results():
        result = read_object(path)
        if result.get("evaluation") not in order:
            raise UserError(
                f"{path} is the result of an evaluation that is unknown here: {result.get('evaluation')}",
                hint="install the package of its task (run.json: packages), or remove the file",
            )
        try:
            results.append({**result, **_shown_result(result, known[order[result["evaluation"]]])})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UserError(f"{path} is damaged: {error!r}", hint="remove it, or run the evaluation again") from error
    return sorted(
        results,
        key=lambda result: (
            bool(result["other_data"]),
            bool(result["overridden"]),
            order[result["evaluation"]],
            result["split"] == own_split,
        ),
    )


def _shown_result(result: dict[str, Any], evaluation: EvaluationSpec) -> dict[str, Any]:
    """What a page shows of a result besides its values."""
    of = {"other_data": other_data(result), "is_part_of_own_data": result.get("is_part_of_own_data", False)}
    section = evaluation.section if result.get(evaluation.pictures) else None
    table = table_of(evaluation.table, result)
    return {
        **of,
        "split": str(result["split"]),
        "table": table,
        "overridden": ", ".join(f"{name.replace('_', ' ')} {one}" for name, one in result.get("overrides", {}).items()),
        "section": section
        and load_template(section).render(
            result={**result, **of}, title=table.title, class_views=map(class_view, result.get("by_class", []))
        ),
        "strips": evaluation.strips(result) if section and evaluation.strips else [],
    }


def _chosen_settings(settings: dict[str, Any], task: str) -> dict[str, Any]:
    """The settings that differ from their defaults, and the most important ones."""
    kind = find_task(task).settings if task in task_names() else TrainingSettings
    defaults = flatten(plain_values(asdict(kind())))
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in settings.items()
        if name in _SHOWN_SETTINGS or str(value) != str(defaults.get(name, value))
    }


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    if not lines:
        return {"num_steps": 0}
    # The first step includes warm-up of caches and of the loader's queue.
    steady = lines[1:] or lines
    took_s = sum(line["step_s"] for line in steady)
    waited_s = sum(line["data_wait_s"] for line in steady)
    last = lines[-NUM_LAST:]
    memory_gb = [line["gpu_memory_gb"] for line in lines if "gpu_memory_gb" in line]
    mfu = [line["mfu"] for line in steady if "mfu" in line]
    return {
        "num_steps": lines[-1]["step"],
        "first_loss": lines[0]["loss"],
        "last_loss": sum(line["loss"] for line in last) / len(last),
        "num_last": len(last),
        "took": duration_text(sum(line["step_s"] for line in lines)),
        "samples_per_s": sum(line["samples_per_s"] * line["step_s"] for line in steady) / took_s,
        "wait_share": waited_s / took_s,
        "epochs": lines[-1].get("epoch"),  # streams have no epochs
        "memory_gb": max(memory_gb, default=None),
        "mfu": sum(mfu) / len(mfu) if mfu else None,
    }


def _sources(facts: dict[str, Any], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The data folders of a mixture, with the number of samples of each so far; failed ones count too."""
    counts = lines[-1].get("sources", {}) if lines else {}
    found = [{**source, "count": counts.get(source["name"], 0)} for source in facts.get("sources", [])]
    total = sum(source["count"] for source in found)
    return [{**source, "trained": source["count"] / total if total else 0.0} for source in found]


def _command(run: RunFolder, task: str) -> str:
    """The command line that repeats the training."""
    return shlex.join(["train", task, "--config", str(run.settings), "--out", f"{run.path}-again"])


def initial_weights(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of run.json about initial weights: `weights`, and those of single parts such as `decoder_weights`."""
    return {name: value for name, value in facts.items() if name.endswith("weights") and isinstance(value, dict)}


def _weights(report: dict[str, Any]) -> dict[str, Any]:
    """How the tensors of initial weights were used; equal changes of several blocks are one row."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for change in report["changes"]:
        name = re.sub(r"\.\d+\.", ".*.", change["origin"] or change["name"])
        groups.setdefault((change["kind"], name, change["why"]), []).append(change)
    rows = []
    for (kind, name, why), its in groups.items():
        shapes = {side: _shape(its[0], side) for side in ("old", "new")}
        rows.append({"kind": kind, "name": name, "why": why, "count": len(its), **shapes})
    return {"source": report["source"], "num_copied": report["num_copied"], "rows": rows}


def _shape(change: dict[str, Any], side: str) -> str:
    shape = change.get(side)
    return "" if shape is None else " x ".join(map(str, shape)) or "one number"


def publish_page(template: str, path: Path, **values: Any) -> None:
    """Publish a page from a template of this folder."""
    page = load_template(Path(__file__).with_name(template)).render(**values, scripts=values["charts"]["scripts"])
    publish_bytes(path, page.encode())
