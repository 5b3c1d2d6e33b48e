"""Settings of the evaluation in the loop: a group of the training settings, off by default."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manifests.errors import UserError

# The numbers that a protocol logs while a model is trained.
NUMBERS: dict[str, tuple[str, ...]] = {
    "retrieval": tuple(
        f"{direction}_{name}"
        for direction in ("text_to_video", "video_to_text")
        for name in ("r1", "r5", "r10", "median_rank")
    ),
    "mir": tuple(
        f"{direction}_{name}"
        for direction in ("average", "video_to_text", "text_to_video")
        for name in ("mean_ap", "ndcg")
    ),
    "zero-shot": ("top1", "top5", "mean_class_accuracy"),
}


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """On what, and how often, a model is evaluated while it is trained."""

    every: int = 0
    """Steps from one evaluation to the next; the last step has one too; 0 for none."""
    split: str = "val"
    """Split to evaluate on."""
    max_samples: int = 5000
    """Samples at most: every k-th of the split, with the smallest k that is enough."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("max_samples", 2)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise UserError(f"--evaluate.{flag} is {getattr(self, name)}", hint=f"it must be {least} or more")


@dataclass(frozen=True, kw_only=True)
class DualEncoderEvaluation(EvaluationSettings):
    """How a dual encoder is evaluated."""

    protocol: Literal["retrieval", "mir", "zero-shot"] = "retrieval"
    """retrieval: R@k and median rank; mir: EK-100's mAP and nDCG; zero-shot: classes by prompts."""
    relevancy: Path | None = None
    """mir: .pkl or .npy of relevancies; of verb and noun classes when left out."""
    sentences: Path | None = None
    """mir: CSV whose `narration` column has the sentences of --evaluate.relevancy, in its order."""
    classes: Path | None = None
    """zero-shot: text file, one class a line; from the labels of the captions when left out."""
    templates: Path | None = None
    """zero-shot: text file, one template with {} a line."""
    label: str | None = None
    """zero-shot: label column of the captions, as `verb`."""
