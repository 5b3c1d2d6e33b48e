"""Settings of the evaluation during training."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from manifests.errors import UserError
from train.config.fields import FIRST_RUN, Checked, GoesWith, Range

EVERY = GoesWith("every", use="STEPS")

# The metrics that a protocol logs during training.
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
class EvaluationSettings(Checked):
    """On what, and how often, a model is evaluated during training."""

    prefix = "evaluate"

    every: Annotated[int, FIRST_RUN, Range(least=0)] = 0
    """Steps between evaluations; 0: none. The last step is evaluated too."""
    split: Annotated[str, EVERY] = "val"
    """Split to evaluate on."""
    max_samples: Annotated[int, Range(least=2), EVERY] = 5000
    """Maximum number of samples: every k-th of the split, with the smallest sufficient k."""


@dataclass(frozen=True, kw_only=True)
class DualEncoderEvaluation(EvaluationSettings):
    """How a dual encoder is evaluated."""

    protocol: Annotated[Literal["retrieval", "mir", "zero-shot"], EVERY] = "retrieval"
    """Evaluation protocol. retrieval: R@k and median rank; mir: EK-100's mAP and nDCG; zero-shot: classification by
    prompts."""
    relevancy: Annotated[Path | None, EVERY] = None
    """mir: relevancy matrix, .pkl or .npy. Default: computed from verb and noun classes."""
    sentences: Annotated[Path | None, EVERY] = None
    """mir: CSV file whose `narration` column has the sentences of --evaluate.relevancy, in its order."""
    classes: Annotated[Path | None, EVERY] = None
    """zero-shot: text file, one class per line. Default: the labels of the captions."""
    templates: Annotated[Path | None, EVERY] = None
    """zero-shot: text file, one prompt template with {} per line. Default: the bare class name."""
    label: Annotated[str | None, EVERY] = None
    """zero-shot: label column of the captions, such as verb."""


Method = Literal["knn", "linear"]
METHODS: tuple[Method, ...] = ("knn", "linear")
NEIGHBOURS = Range(1, 10_000)

# Metrics of each method and label: top-1 and top-5 over clips, and the mean over classes of their top-1.
PROBE_NUMBERS = ("top1", "top5", "mean_class")


@dataclass(frozen=True, kw_only=True)
class ProbeEvaluation(EvaluationSettings):
    """Which labels are predicted from frozen features, and how; `max_samples` of those that are scored."""

    # The split is read in any case: for reconstructions at the end.
    split: str = "val"
    """Split to evaluate on, and to take the reconstructed clips of the results page from."""
    labels: Annotated[tuple[str, ...], FIRST_RUN, EVERY] = ()
    """Labels to predict from frozen features. They are labels of the captions, such as motion."""
    methods: Annotated[tuple[Method, ...], EVERY] = ("knn",)
    """knn: k-nearest-neighbour classifier; linear: linear probe trained on the features."""
    neighbours: Annotated[int, NEIGHBOURS, EVERY] = 20
    """knn: number of neighbours (k)."""
    temperature: Annotated[float, Range(1e-3, 1e3), EVERY] = 0.07
    """knn: temperature; the vote of a neighbour has weight exp(cosine / temperature)."""
    max_bank: Annotated[int, Range(least=2), EVERY] = 20_000
    """Maximum number of samples of the training split, spread evenly, for neighbours and the linear probe."""

    def rules(self) -> Iterator[UserError]:
        """There is something to predict, by something, and nothing twice."""
        if self.every and not self.labels:
            yield UserError(
                f"--evaluate.every is {self.every}, and there is no label to tell from features",
                hint="name labels of the captions: --evaluate.labels LABEL",
            )
        yield from named_once(self.flag("labels"), self.labels)
        yield from named_once(self.flag("methods"), self.methods, known=METHODS)


def named_once(flag: str, values: tuple[str, ...], *, known: tuple[str, ...] = ()) -> Iterator[UserError]:
    """Yields the mistakes of a flag with several values: one twice, or none where there are some to choose from."""
    if len(set(values)) < len(values):
        yield UserError(f"{flag} names one twice: {', '.join(values)}", hint="name each once")
    if known and not values:
        yield UserError(f"{flag} names none", hint=f"there are {', '.join(known)}")


def number_names(wanted: ProbeEvaluation) -> tuple[str, ...]:
    """The metrics of the evaluation during training, without the split: what --best can name."""
    return tuple(
        f"{label}_{method}_{name}" for label in wanted.labels for method in wanted.methods for name in PROBE_NUMBERS
    )
