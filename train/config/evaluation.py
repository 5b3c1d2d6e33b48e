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


# Settings of the probes: of `train eval probe`, and of the evaluation while a model without captions is trained.


Method = Literal["knn", "linear"]
METHODS: tuple[Method, ...] = ("knn", "linear")

# What each method says of each label: top1 and top5 over clips, and top1 of each class, averaged over the classes.
PROBE_NUMBERS = ("top1", "top5", "mean_class")


@dataclass(frozen=True, kw_only=True)
class ProbeEvaluation(EvaluationSettings):
    """Which labels are read out of frozen features, and how; `max_samples` of those that are scored."""

    labels: tuple[str, ...] = ()
    """Labels of the captions that are told from frozen features, such as motion."""
    methods: tuple[Method, ...] = ("knn",)
    """knn: nearest neighbours; linear: a linear layer trained on the features."""
    neighbours: int = 20
    """knn: neighbours that vote."""
    temperature: float = 0.07
    """knn: a neighbour's vote is exp(cosine / temperature)."""
    max_bank: int = 20_000
    """Samples of the training split at most, spread evenly over it, that neighbours and the linear layer come from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every and not self.labels:
            raise UserError(
                f"--evaluate.every is {self.every}, and there is no label to tell from features",
                hint="name labels of the captions: --evaluate.labels LABEL",
            )
        for name, values in (("labels", self.labels), ("methods", self.methods)):
            if len(set(values)) < len(values):
                raise UserError(f"--evaluate.{name} names one twice: {', '.join(values)}", hint="name each once")
        if not self.methods:
            raise UserError("--evaluate.methods names none", hint=f"there are {', '.join(METHODS)}")
        if not 1 <= self.neighbours <= 10_000:
            raise UserError(f"--evaluate.neighbours is {self.neighbours}", hint="it must be from 1 to 10,000")
        if not 1e-3 <= self.temperature <= 1e3:
            raise UserError(f"--evaluate.temperature is {self.temperature}", hint="it must be from 0.001 to 1,000")
        if self.max_bank < 2:
            raise UserError(f"--evaluate.max-bank is {self.max_bank}", hint="it must be 2 or more")


def number_names(wanted: ProbeEvaluation) -> tuple[str, ...]:
    """The numbers of the evaluation in the loop, without the split: what --best can name."""
    return tuple(
        f"{label}_{method}_{name}" for label in wanted.labels for method in wanted.methods for name in PROBE_NUMBERS
    )
