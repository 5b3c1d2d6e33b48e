"""Settings of `train dual-encoder`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import CaptionSettings, LatentSettings
from clipmill.train.config.evaluation import EVERY, EvaluatedData, EvaluationSettings
from clipmill.train.config.fields import FIRST_RUN, help_group
from clipmill.train.config.model import DualEncoderInit, DualEncoderTowers, Tower, check_picture
from clipmill.train.losses.settings import Loss

LOSS = help_group("Loss", 6)
# Named protocols of text-video retrieval; `retrieval` is the plain one (clipmill.train.tasks.dual_encoder.protocols).
RetrievalName = Literal["retrieval", "msrvtt-1ka", "paragraph", "vatex", "clip-benchmark"]
ProtocolName = Literal["retrieval", "msrvtt-1ka", "paragraph", "vatex", "clip-benchmark", "mir", "egomcq", "zero-shot"]
RETRIEVAL_NAMES: tuple[RetrievalName, ...] = get_args(RetrievalName)
TEMPERATURE = Range(1e-4, 1e4)
_SOFTMAX, _RANKS = "_dual_softmax", ("median_rank",)


def _retrieval_numbers(kind: str = "", *, numbers: tuple[str, ...] = ("r1", "r5", "r10", *_RANKS)) -> tuple[str, ...]:
    return tuple(f"{way}{kind}_{number}" for way in ("text_to_video", "video_to_text") for number in numbers)


# The metrics that a protocol logs during training.
_NUMBERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(RETRIEVAL_NAMES, _retrieval_numbers()),
    "mir": tuple(
        f"{direction}_{name}"
        for direction in ("average", "video_to_text", "text_to_video")
        for name in ("mean_ap", "ndcg")
    ),
    "egomcq": ("inter_accuracy", "intra_accuracy"),
    "zero-shot": ("top1", "top5", "mean_class_accuracy"),
}


@dataclass(frozen=True, kw_only=True)
class DualEncoderEvaluation(EvaluationSettings):
    """How a dual encoder is evaluated."""

    lower_is_better = tuple(name for kind in ("", _SOFTMAX) for name in _retrieval_numbers(kind, numbers=_RANKS))

    protocol: Annotated[ProtocolName, EVERY] = "retrieval"
    """Evaluation protocol. retrieval: R@k and median rank; msrvtt-1ka, paragraph, vatex, clip-benchmark: the same by
    the rules of these benchmarks; mir: EK-100's mAP and nDCG; egomcq: EgoVLP's multiple choice; zero-shot:
    classification by prompts. Data of --evaluate.shards can have their own: DATA@SPLIT:PROTOCOL."""
    dual_softmax: Annotated[float | None, TEMPERATURE, EVERY] = None
    """Retrieval: also log R@k with dual softmax at this temperature of the cosines, under names of their own."""
    relevancy: Annotated[Path | None, EVERY] = None
    """mir: relevancy matrix, .pkl or .npy. Default: computed from verb and noun classes."""
    sentences: Annotated[Path | None, EVERY] = None
    """mir: CSV file whose `narration` column has the sentences of --evaluate.relevancy, in its order."""
    questions: Annotated[Path | None, EVERY] = None
    """egomcq: its file of questions, egomcq.json."""
    classes: Annotated[Path | None, EVERY] = None
    """zero-shot: text file, one class per line. Default: the labels of the captions."""
    templates: Annotated[Path | None, EVERY] = None
    """zero-shot: text file, one prompt template with {} per line. Default: the bare class name."""
    label: Annotated[str | None, EVERY] = None
    """zero-shot: label column of the captions, such as verb."""

    def number_names(self, one: EvaluatedData) -> tuple[str, ...]:
        """Names of the metrics of its protocol, also with dual softmax."""
        protocol = one.protocol or self.protocol
        has_more = self.dual_softmax is not None and protocol in RETRIEVAL_NAMES
        return _NUMBERS.get(protocol, ()) + (_retrieval_numbers(_SOFTMAX) if has_more else ())

    def without_effect(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Settings of protocols that none of the evaluations uses."""
        try:
            used = {one.protocol or self.protocol for one in self.evaluated_data()}
        except UserError:
            return  # one of `rules`
        for name, protocols in _OF_PROTOCOL.items():
            flag = self.flag(name)
            if self.every and flag in typed and used.isdisjoint(protocols):
                other = self.flag("protocol")
                yield UserError(
                    f"{flag} is {typed[flag]}, which has no effect: {other} is {', '.join(sorted(used))}",
                    hint=f"leave it out, or use {other} {' or '.join(protocols)}",
                    flags=(flag, other),
                )

    def protocol_named(self, name: str) -> ProtocolName:
        """The protocol called `name`; raises UserError if it is unknown."""
        known: dict[str, ProtocolName] = {one: one for one in get_args(ProtocolName)}
        if name not in known:
            raise UserError(
                f"{self.flag('shards')} names the protocol {name!r}",
                hint=f"protocols: {', '.join(known)}",
                flags=(self.flag("shards"),),
            )
        return known[name]


_OF_PROTOCOL: dict[str, tuple[str, ...]] = {
    "dual_softmax": RETRIEVAL_NAMES,
    **dict.fromkeys(("relevancy", "sentences"), ("mir",)),
    "questions": ("egomcq",),
    **dict.fromkeys(("classes", "templates", "label"), ("zero-shot",)),
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DualEncoderSettings(LatentSettings):
    """Settings of `train dual-encoder`."""

    command = "dual-encoder"
    of_other_data: ClassVar[Mapping[str, Any]] = {"captions": CaptionSettings()}
    least_batch = 2
    only_kind = "clip"

    towers: Annotated[DualEncoderTowers, groups.TOWERS] = field(default_factory=DualEncoderTowers)
    init: Annotated[DualEncoderInit, groups.MODEL, groups.SEVERAL] = field(default_factory=DualEncoderInit)
    text_tower: Annotated[Literal["trained", "frozen"], groups.MODEL, FIRST_RUN] = "trained"
    """Text tower. frozen: the embeddings made by prep text take its place."""
    captions: Annotated[CaptionSettings, groups.CAPTIONS] = field(default_factory=CaptionSettings)
    """Which caption of a clip a sample shows."""
    loss: Annotated[Loss, LOSS] = field(default_factory=Loss)
    """Contrastive loss."""
    evaluate: Annotated[DualEncoderEvaluation, groups.EVALUATION] = field(default_factory=DualEncoderEvaluation)

    def tower_names(self) -> tuple[Tower, ...]:
        """The towers that the model has: stored embeddings take the place of a text tower."""
        return ("video",) if self.text_tower == "frozen" else ("video", "text")

    def rules(self) -> Iterator[UserError]:
        """Yields batches without negatives, and settings that do not suit the input or the text tower."""
        yield from super().rules()
        if self.reads_latents and self.captions.min_relevancy is not None:
            yield UserError(
                "--captions.min-relevancy draws captions for clips, not for segments of latents",
                hint="leave it out, or use --input pixels",
                flags=("--captions.min-relevancy",),
            )
        if self.batch < self.least_batch:
            yield UserError(
                f"--batch is {self.batch}",
                hint="it must be at least 2: a contrastive loss needs negatives",
                flags=("--batch",),
            )
        if not self.reads_latents:
            yield from errors_of(check_picture, self.model, self.towers, size_px=self.size_px)
        if self.text_tower == "frozen" and self.init.text is not None:
            yield UserError(
                f"--init.text is {self.init.text}, and stored embeddings take the place of the text tower",
                hint="leave out --init.text or --text-tower frozen",
                flags=("--init.text",),
            )
        if self.text_tower == "frozen" and self.towers.embedding_width is not None:
            yield UserError(
                f"--towers.embedding-width is {self.towers.embedding_width}, and stored embeddings have their own",
                hint="leave it out with --text-tower frozen",
                flags=("--towers.embedding-width",),
            )
