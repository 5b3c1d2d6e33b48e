"""`TaskSpec` of the classifier, and its evaluation."""

from dataclasses import dataclass
from typing import Any

from train.evaluation.probe.spec import PROBE, flags_named
from train.evaluation.tables import FEW_CLASSES, Row, Table, protocol_of, share_cell
from train.spec import EvaluationSpec, ExportRequest, Features, TaskSpec
from train.tasks.classify.settings import ClassEvaluation, ClassifySettings


@dataclass(frozen=True, kw_only=True)
class ClassificationFlags:
    """Flags of `train eval classification`."""

    split: str = "val"
    """Split to score."""
    clips: int = 1
    """Looks at each clip, at different moments; probabilities are averaged over all views."""
    crops: int = 1
    """Squares that each look is cut out as, along the longer side; 1 is the centre."""

    def __post_init__(self) -> None:
        with flags_named({"--evaluate.": "--"}):
            self.evaluation()

    def evaluation(self) -> ClassEvaluation:
        """The settings that training has for it."""
        return ClassEvaluation(split=self.split, clips=self.clips, crops=self.crops)


def _make(settings: Any, *, run: Any, **opened: Any) -> Any:
    from train.tasks.classify.evaluation import read_run_classes
    from train.tasks.classify.task import ClassifyTask

    # The data may have labels that it did not have when the run began.
    return ClassifyTask(settings, classes=None if run is None else read_run_classes(run), **opened)


def _effective(settings: Any, source: Any, say: Any) -> Any:
    from train.weights.effective import effective_clip_settings

    return effective_clip_settings(settings, source, say=say)


def _workloads(settings: Any, num_clips: int) -> Any:
    from train.engine.attention_choice import video_workloads

    return video_workloads(settings, num_clips)


def _score(opened: Any, wanted: Any) -> Any:
    from train.tasks.classify.evaluation import score_run

    return score_run(opened, wanted.evaluation())


def _export(request: ExportRequest) -> Any:
    from train.tasks.mae.export import exported_classifier

    return exported_classifier(request.run, request.weights, form=request.form)


def classification_table(result: dict[str, Any]) -> Table:
    """A row for each kind of class."""
    rows = []
    for name, num_classes in result["num_classes"].items():
        shares = [result["numbers"][f"{name}_{key}"] for key in ("top1", "top5", "mean_class")]
        chances = [min(k / num_classes, 1.0) for k in (1, 5, 1)]
        cells = [share_cell(share, chance) for share, chance in zip(shares, chances, strict=True)]
        if num_classes <= FEW_CLASSES:
            cells[1] = share_cell(None)
        rows.append(Row(name, f"{result['num_samples']:,} clips, {num_classes:,} classes", tuple(cells)))
    protocol = protocol_of(result, f"{result['num_samples']:,} clips")
    return Table("Classification", ("top-1", "top-5", "mean class"), tuple(rows), protocol)


CLASSIFICATION = EvaluationSpec(
    name="classification",
    help="Accuracies of a classifier: top-1, top-5 and mean over classes; of verbs and nouns where there are labels.",
    example="train eval classification runs/classes --shards data --clips 5 --crops 3",
    run_help="Folder that train classify --out made.",
    settings=ClassificationFlags,
    score=_score,
    table=classification_table,
)
TASK = TaskSpec(
    name="classify",
    help="Fine-tune a video tower to classify clips.",
    example="train classify --shards data --init.weights runs/first --label class --out runs/classes",
    settings=ClassifySettings,
    make=_make,
    effective=_effective,
    workloads=_workloads,
    evaluations=(CLASSIFICATION, PROBE),
    formats={
        "hf": "VideoMAEForVideoClassification.from_pretrained('OUT')",
        "videomae": "a checkpoint as VideoMAE's own",
    },
    export=_export,
    features=Features(
        description="what the last layer sees",
        inputs=lambda task: task.inputs,
        is_consecutive=lambda settings: settings.sampling == "stride",
    ),
)
