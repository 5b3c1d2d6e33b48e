"""Settings of the probes: of `train eval probe`, and of the evaluation while a model without captions is trained."""

from dataclasses import dataclass
from typing import Literal

from manifests.errors import UserError
from train.config.evaluation import EvaluationSettings

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
