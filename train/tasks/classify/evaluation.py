"""Score a trained classifier on a split; the classes of a run."""

from manifests.errors import UserError
from train.data.classes import ClassList
from train.data.decoding.clip import Views
from train.distributed.world import World
from train.evaluation.runner import OpenedRun, Score, describe_clip
from train.run.folder import RunFolder
from train.tasks.classify.settings import ClassEvaluation

_PROTOCOL = "probabilities are means over views"
_PARTS = "; those of verbs and nouns are sums over their actions"


def score_run(opened: OpenedRun, wanted: ClassEvaluation) -> Score:
    """Score a run's latest checkpoint on all clips of a split.

    Raises:
        UserError: there are no such clips.
        FailedWork: nothing could be decoded.
    """
    settings, trained, task = opened.settings, opened.trained, opened.task
    classes: ClassList = task.classes
    views = Views(num_clips=wanted.clips, num_crops=wanted.crops)
    samples = task.samples(wanted.split, World(), views=views)
    model = trained.fill(task.build_model(samples))
    with trained.precision.autocast():
        found = task.score(model, samples, World(), views=views)
    num_classes = {name: len(set(part.tolist())) for name, part in classes.parts.items()}
    suffix = "" if len(views) == 1 else f"-{wanted.clips}x{wanted.crops}"
    return Score(
        name=f"classification-{wanted.split}{suffix}",
        samples=samples,
        clip=describe_clip(
            settings, views=views, mean_of="probabilities", is_consecutive=settings.sampling == "stride"
        ),
        values={
            "label": classes.label,
            "num_classes": {**num_classes, classes.label: len(classes)},
            "protocol": _PROTOCOL + (_PARTS if classes.parts else ""),
            "num_samples": found.num_samples,
            "numbers": found.metrics,
        },
        failed=found.failed,
    )


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
