"""`TaskSpec` of the classifier, and its evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import Checked
from clipmill.train.evaluation.by_class import BASELINE_KEYS
from clipmill.train.evaluation.probe.spec import PROBE
from clipmill.train.evaluation.tables import CLASSES_SECTION, FEW_CLASSES, MAJORITY, Row, Table, protocol_of, share_cell
from clipmill.train.spec import EvaluationSpec, Features, FirstRun, TaskSpec
from clipmill.train.tasks.classify.settings import VIEWS, ClassEvaluation, ClassifySettings


@dataclass(frozen=True, kw_only=True)
class ClassificationFlags(Checked):
    """Flags of `train eval classification`."""

    split: str = "val"
    """Split to evaluate on."""
    clips: Annotated[int, VIEWS] = 1
    """Number of temporal views per clip. Probabilities are averaged over all views."""
    crops: Annotated[int, VIEWS] = 1
    """Number of spatial crops per view, spread over the longer side; 1: the centre, 3: both ends and the centre."""

    classes: Annotated[tuple[Path, ...], Parameter(negative="")] = ()
    """File with names to show instead of class numbers, as of train eval zero-shot. For actions repeat it: the file of
    the verbs, then that of the nouns."""

    def evaluation(self) -> ClassEvaluation:
        """The settings that training has for it."""
        return ClassEvaluation(split=self.split, clips=self.clips, crops=self.crops)


def classification_table(result: dict[str, Any]) -> Table:
    """A row for each kind of class."""
    rows, clips = [], count_noun(result["num_samples"], "clip")
    for name, num_classes in result["num_classes"].items():
        shares = [result["numbers"][f"{name}_{key}"] for key in ("top1", "top5", "mean_class")]
        baseline = result["majority_baseline"][name]
        cells = [share_cell(share, baseline[key]) for share, key in zip(shares, BASELINE_KEYS, strict=True)]
        if num_classes <= FEW_CLASSES:
            cells[1] = share_cell(None)
        rows.append(Row(name, f"{clips}, {count_noun(num_classes, 'class', 'classes')}", tuple(cells)))
    protocol = protocol_of(result, clips)
    return Table("Classification", ("top-1", "top-5", "mean class"), tuple(rows), protocol, reference=MAJORITY)


CLASSIFICATION = EvaluationSpec(
    name="classification",
    help="Evaluate a classifier: top-1, top-5 and mean class accuracy; also of verbs and nouns, if labelled.",
    example="train eval classification runs/classes --shards data --clips 5 --crops 3",
    run_help="Run folder of train classify.",
    settings=ClassificationFlags,
    score=import_late("clipmill.train.tasks.classify.evaluation:score_run"),
    table=classification_table,
    pictures="by_class",
    section=CLASSES_SECTION,
)
TASK = TaskSpec(
    name="classify",
    help="Fine-tune a video tower for clip classification.",
    example="train classify --shards data --preset tiny --label motion --out runs/classes",
    settings=ClassifySettings,
    make=import_late("clipmill.train.tasks.classify.task:ClassifyTask"),
    kept=import_late("clipmill.train.tasks.classify.evaluation:kept_classes"),
    effective=import_late("clipmill.train.weights.effective:effective_clip_settings"),
    evaluations=(CLASSIFICATION, PROBE),
    formats={
        "hf": "VideoMAEForVideoClassification.from_pretrained('OUT')",
        "videomae": "VideoMAE's code, as a checkpoint",
        "torch": "torch.export.load('OUT/model.pt2'), the logits",
        "onnx": "InferenceSession('OUT/model.onnx'), the logits",
    },
    export=import_late("clipmill.train.tasks.classify.export:exported_classifier"),
    adopt=import_late("clipmill.train.tasks.classify.export:adopted_classifier"),
    adopted="a VideoMAE with a last layer",
    features=Features(
        description="what the last layer sees",
        inputs=lambda task: task.inputs,
        is_consecutive=lambda settings: settings.sampling == "stride",
    ),
    first_run=FirstRun(on_cpu="tiny", on_gpu="k400-videomae", needs_label=True),
    pipeline="video-classification",
)
