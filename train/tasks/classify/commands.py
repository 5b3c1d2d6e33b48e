"""What `train eval classification` does, once its flags are read."""

import shlex
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from train.data.classes import ClassList
from train.data.decoding.clip import Views
from train.distributed.world import World
from train.engine.trained_run import open_trained_run, read_settings
from train.evaluation.examples import clip_in_words
from train.report.results import write_page
from train.run.folder import RunFolder, open_run
from train.tasks.classify.settings import ClassEvaluation, ClassifySettings
from train.tasks.classify.task import ClassifyTask

_PROTOCOL = "probabilities are means over views"
_OF_PARTS = "; those of verbs and nouns are sums over their actions"


def evaluate_classifier(run_path: Path, wanted: ClassEvaluation, *, shards: str | None) -> dict[str, Any]:
    """Scores a run's latest checkpoint on all clips of a split, and adds the result to its page.

    Raises:
        UserError: there is no such run, it is of another task, or there are no such clips.
        FailedWork: nothing could be decoded.
    """
    run = open_run(run_path)
    run.require_task(ClassifyTask.name)
    classes = read_run_classes(run)
    settings = read_settings(run, ClassifySettings, shards=shards)
    trained = open_trained_run(run, settings)
    task = ClassifyTask(settings, attention=trained.attention, device=trained.device, classes=classes)
    views = Views(num_clips=wanted.clips, num_crops=wanted.crops)
    samples = task.samples(wanted.split, World(), views=views)
    model = trained.fill(task.build_model(samples))
    with trained.precision.autocast():
        found = task.score(model, samples, World(), views=views)
    result = {
        "evaluation": "classification",
        "split": wanted.split,
        **run.data_facts(shards),
        "step": trained.step,
        "weights": trained.weights,
        "data": samples.describe(),
        "variant": samples.variant_name,
        "clip": clip_in_words(settings, views=views, mean_of="probabilities", is_in_row=settings.sampling == "stride"),
        "label": classes.label,
        "num_classes": {
            **{name: len(set(part.tolist())) for name, part in classes.parts.items()},
            classes.label: len(classes),
        },
        "protocol": _PROTOCOL + (_OF_PARTS if classes.parts else ""),
        "num_samples": found.num_samples,
        "numbers": found.numbers,
        "failed": [failure.as_json() for failure in found.failed],
        "command": _command(run, wanted, shards=shards),
    }
    suffix = "" if len(views) == 1 else f"-{wanted.clips}x{wanted.crops}"
    run.write_evaluation(f"classification-{wanted.split}{suffix}", result)
    write_page(run)
    return result


def _command(run: RunFolder, wanted: ClassEvaluation, *, shards: str | None) -> str:
    words = ["train", "eval", "classification", str(run.path), "--split", wanted.split]
    words += [] if shards is None else ["--shards", shards]
    words += ["--clips", str(wanted.clips), "--crops", str(wanted.crops)]
    return shlex.join(words)


# The classes that a run of `train classify` tells apart.


def read_run_classes(run: RunFolder) -> ClassList:
    """The classes that a run was trained on.

    Raises:
        UserError: it is no run of `train classify`.
    """
    try:
        facts = run.require_facts()
        return ClassList(facts["classes"]["label"], tuple(facts["classes"]["names"]))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} names no classes: {run.path} is no run of train classify",
            hint="other runs are scored by other commands: train eval --help",
        ) from error
