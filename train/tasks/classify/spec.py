"""`TaskSpec` of `train classify`, its settings, and the flags and the table of its evaluation.

This module imports no heavy library, so that help and the checks of flags are fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import FRACTION, Checked, GoesWith, Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import Augment, LatentSettings
from clipmill.train.config.evaluation import EVERY, EvaluationSettings
from clipmill.train.config.fields import FIRST_RUN, help_group
from clipmill.train.config.model import LIBRARY, check_frame_size
from clipmill.train.evaluation.probe import PROBE
from clipmill.train.evaluation.tables import (
    BASELINE_KEYS,
    CLASSES_SECTION,
    FEW_CLASSES,
    MAJORITY,
    Row,
    Table,
    protocol_of,
    share_cell,
)
from clipmill.train.spec import EvaluationSpec, Features, FirstRun, TaskSpec

CLASSES = help_group("Classes", 6)
VIEWS = Range(1, 100)
_ALPHA = Range(0, 100)


@dataclass(frozen=True, kw_only=True)
class ClassEvaluation(EvaluationSettings):
    """Settings for the evaluation of a classifier during training."""

    # EVERY is omitted, because the split is always read: its classes are also classes of the model.
    split: str = "val"
    clips: Annotated[int, VIEWS, EVERY] = 1
    """Number of temporal views per clip. Probabilities are averaged over all views."""
    crops: Annotated[int, VIEWS, EVERY] = 1
    """Number of spatial crops per view, spread along the longer side. 1: the centre; 3: both ends and the centre."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClassifySettings(LatentSettings):
    """Settings of `train classify`."""

    command = "classify"
    has_head = True

    segment: Annotated[str | None, groups.CLIPS, GoesWith("input", ("latents",))] = None
    """Length of a segment of latents, such as 5s. A segment's label comes from the caption that covers most of the
    segment. Default: the stored segments of a video VAE; 5s for other latents."""
    repeats: Annotated[int, groups.CLIPS, Range(1, 1000)] = 1
    """Number of samples per clip, with different frames and crops (repeated augmentation). The clip is decoded once."""
    label: Annotated[str, CLASSES, FIRST_RUN] = "class"
    """Label column with the classes: class (Kinetics), action (EPIC-KITCHENS: verb and noun), or any other label."""
    dropout: Annotated[float, CLASSES, FRACTION] = 0.0
    """Dropout probability before the classification head."""
    label_smoothing: Annotated[float, CLASSES, FIRST_RUN, FRACTION] = 0.0
    """Label smoothing: fraction of the target that is spread over all classes."""
    mixup: Annotated[float, CLASSES, FIRST_RUN, _ALPHA] = 0.0
    """Alpha of mixup's Beta distribution; 0 disables mixup. With --cutmix, each batch uses one of the two."""
    cutmix: Annotated[float, CLASSES, FIRST_RUN, _ALPHA] = 0.0
    """Alpha of CutMix's Beta distribution; 0 disables CutMix."""
    evaluate: Annotated[ClassEvaluation, groups.EVALUATION] = field(default_factory=ClassEvaluation)

    def rules(self) -> Iterator[UserError]:
        """Yield errors for towers that the task or the input does not support, and for settings without effect."""
        yield from super().rules()
        if (kind := self.towers.kind) not in (None, "clip", "videomae", LIBRARY):
            yield UserError(
                f"--towers.kind is {kind}, a tower that this task does not support",
                hint="use clip or videomae",
                flags=("--towers.kind",),
            )
        if not self.reads_latents:
            yield from errors_of(check_frame_size, self.model, self.towers, size_px=self.size_px)
        else:
            yield from self._latent_rules()
        if (self.mixup or self.cutmix) and self.batch < 2:
            yield UserError(
                f"--batch is {self.batch}, but --mixup and --cutmix mix two clips",
                hint="use --batch 2 or more",
                flags=("--batch", "--mixup", "--cutmix"),
            )

    def _latent_rules(self) -> Iterator[UserError]:
        for option in fields(Augment):
            if getattr(self.augment, option.name) != option.default:
                yield UserError(
                    f"{self.augment.flag(option.name)} applies to pixels, not to latents",
                    hint="omit it with --input latents, or use --input pixels",
                    flags=(self.augment.flag(option.name),),
                )
        if self.repeats > 1:
            yield UserError(
                f"--repeats is {self.repeats}, which saves no work, because latents are not decoded",
                hint="omit it with --input latents",
                flags=("--repeats",),
            )
        if self.sampling == "lavila":
            yield UserError(
                "--sampling lavila applies to the frames of clips, not to segments of latents",
                hint="use --sampling uniform, or stride for consecutive frames",
                flags=("--sampling",),
            )


@dataclass(frozen=True, kw_only=True)
class ClassificationFlags(Checked):
    """Flags of `train eval classification`."""

    split: str = "val"
    """Split to evaluate on."""
    clips: Annotated[int, VIEWS] = 1
    """Number of temporal views per clip. Probabilities are averaged over all views."""
    crops: Annotated[int, VIEWS] = 1
    """Number of spatial crops per view, spread along the longer side. 1: the centre; 3: both ends and the centre."""

    classes: Annotated[tuple[Path, ...], Parameter(negative="")] = ()
    """Class file, as for train eval zero-shot. Its names replace class numbers in the results. For actions, use the
    flag twice: first for the file of verbs, then for the file of nouns."""

    def evaluation(self) -> ClassEvaluation:
        """Return the settings for an evaluation with these flags."""
        return ClassEvaluation(split=self.split, clips=self.clips, crops=self.crops)


def classification_table(result: dict[str, Any]) -> Table:
    """Return a table with one row for the label and, for actions, rows for verbs and nouns."""
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
    help="Evaluate a classifier: top-1, top-5 and mean class accuracy; also for verbs and nouns, if they are labelled.",
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
    run_arguments=import_late("clipmill.train.tasks.classify.evaluation:classes_of_run"),
    effective_settings=import_late("clipmill.train.weights.source:effective_clip_settings"),
    evaluations=(CLASSIFICATION, PROBE),
    formats={
        "hf": "VideoMAEForVideoClassification.from_pretrained('OUT')",
        "videomae": "VideoMAE's code, as a checkpoint",
        "torch": "torch.export.load('OUT/model.pt2'), the logits",
        "onnx": "InferenceSession('OUT/model.onnx'), the logits",
    },
    export=import_late("clipmill.train.tasks.classify.export:exported_classifier"),
    adopt=import_late("clipmill.train.tasks.classify.export:adopted_classifier"),
    adoptable="a VideoMAE with a last layer",
    features=Features(
        description="input of the last layer",
        inputs=lambda task: task.inputs,
        is_consecutive=lambda settings: settings.sampling == "stride",
    ),
    first_run=FirstRun(cpu_preset="tiny", gpu_preset="k400-videomae", needs_label=True),
    pipeline="video-classification",
)
