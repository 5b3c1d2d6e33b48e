"""Classifiers with a videomae tower as VideoMAE's own checkpoints, and for VideoMAEForVideoClassification."""

from collections.abc import Sequence
from typing import Any

from manifests.errors import UserError
from train.config.files import load_settings
from train.run.folder import RunFolder
from train.tasks.classify.evaluation import read_run_classes
from train.tasks.classify.settings import ClassifySettings
from train.weights.conversion import Tensors, kind_of_tensors
from train.weights.exported import Exported, require_format
from train.weights.hf_videomae import exported_videomae


def exported_classifier(run: RunFolder, weights: Tensors, *, form: str) -> Exported:
    """A classifier with a videomae tower.

    Raises:
        UserError: the format cannot hold it, or it has another tower.
    """
    if kind_of_tensors(weights) != "videomae":
        raise UserError(
            f"{run.path} is a classifier with CLIP's tower, which no format has a place for",
            hint="export the run of train dual-encoder, or a classifier with --towers.kind videomae",
        )
    require_format(form, ("hf", "videomae"), what="a classifier of videos")
    settings = load_settings(run.settings, ClassifySettings)
    # VideoMAE's own checkpoints do not name the classes.
    classes = read_run_classes(run).names if form == "hf" else ()
    return exported_videomae(run, settings, weights, form=form, model=classifier_config(classes))


def classifier_config(classes: Sequence[str]) -> dict[str, Any]:
    """The values of a VideoMAEForVideoClassification's configuration besides those of its encoder."""
    return {
        "architectures": ["VideoMAEForVideoClassification"],
        "use_mean_pooling": True,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: index for index, name in enumerate(classes)},
        "problem_type": "single_label_classification",
    }
