"""`TaskSpec` of `train dual-encoder`, its settings, and the flags and tables of its evaluations.

This module imports no heavy library, so that help and the checks of flags are fast.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import Checked, Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import CaptionSettings, LatentSettings
from clipmill.train.config.evaluation import EVERY, EvaluatedData, EvaluationSettings
from clipmill.train.config.fields import FIRST_RUN, help_group
from clipmill.train.config.model import DualEncoderInit, DualEncoderTowers, Tower, check_frame_size
from clipmill.train.evaluation.probe import PROBE
from clipmill.train.evaluation.tables import (
    BASELINE_KEYS,
    CLASSES_SECTION,
    MAJORITY,
    Cell,
    Row,
    Table,
    protocol_of,
    share_cell,
)
from clipmill.train.losses.settings import Loss
from clipmill.train.spec import CurveGroup, EvaluationSpec, Features, FirstRun, TaskSpec

LOSS = help_group("Loss", 6)
# Protocols of text-video retrieval (clipmill.train.tasks.dual_encoder.protocols). `retrieval` is the plain protocol.
RetrievalName = Literal["retrieval", "msrvtt-1ka", "paragraph", "vatex", "clip-benchmark"]
ProtocolName = Literal["retrieval", "msrvtt-1ka", "paragraph", "vatex", "clip-benchmark", "mir", "egomcq", "zero-shot"]
RETRIEVAL_NAMES: tuple[RetrievalName, ...] = get_args(RetrievalName)
TEMPERATURE = Range(1e-4, 1e4)
_SOFTMAX, _RANKS = "_dual_softmax", ("median_rank",)


def _retrieval_metrics(kind: str = "", *, metrics: tuple[str, ...] = ("r1", "r5", "r10", *_RANKS)) -> tuple[str, ...]:
    return tuple(f"{way}{kind}_{metric}" for way in ("text_to_video", "video_to_text") for metric in metrics)


# Metrics that each protocol logs during training.
_METRICS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(RETRIEVAL_NAMES, _retrieval_metrics()),
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
    """Settings for the evaluation of a dual encoder, during or after training."""

    lower_is_better = tuple(name for kind in ("", _SOFTMAX) for name in _retrieval_metrics(kind, metrics=_RANKS))

    protocol: Annotated[ProtocolName, EVERY] = "retrieval"
    """Evaluation protocol. retrieval: R@k and median rank; msrvtt-1ka, paragraph, vatex, clip-benchmark: the same
    metrics with the rules of these benchmarks; mir: mAP and nDCG as in EK-100; egomcq: multiple choice as in EgoVLP;
    zero-shot: classification with prompts. A value of --evaluate.shards can name a different protocol:
    DATA@SPLIT:PROTOCOL."""
    dual_softmax: Annotated[float | None, TEMPERATURE, EVERY] = None
    """Retrieval: also log R@k with dual softmax, under separate names. The value is the temperature by which cosine
    similarities are divided."""
    relevancy: Annotated[Path | None, EVERY] = None
    """mir: file with the relevancy matrix, .pkl or .npy. Default: computed from verb and noun classes."""
    sentences: Annotated[Path | None, EVERY] = None
    """mir: CSV file whose `narration` column lists the sentences of --evaluate.relevancy, in the order of the matrix's
    columns."""
    questions: Annotated[Path | None, EVERY] = None
    """egomcq: question file (egomcq.json)."""
    classes: Annotated[Path | None, EVERY] = None
    """zero-shot: text file with one class per line. Default: the labels of the captions."""
    templates: Annotated[Path | None, EVERY] = None
    """zero-shot: text file with one prompt template per line; {} stands for the class name. Default: the class name
    without a template."""
    label: Annotated[str | None, EVERY] = None
    """zero-shot: label column of the captions, such as verb."""

    def metric_names(self, data: EvaluatedData) -> tuple[str, ...]:
        """Return the names of the metrics that the protocol logs, including metrics with dual softmax."""
        protocol = data.protocol or self.protocol
        has_softmax = self.dual_softmax is not None and protocol in RETRIEVAL_NAMES
        return _METRICS.get(protocol, ()) + (_retrieval_metrics(_SOFTMAX) if has_softmax else ())

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield an error for each flag that none of the protocols in use reads."""
        try:
            protocols_in_use = {data.protocol or self.protocol for data in self.evaluated_data()}
        except UserError:
            return  # `rules` yields this error
        for name, protocols in _PROTOCOLS_OF_SETTING.items():
            flag = self.flag(name)
            if self.every and flag in typed and protocols_in_use.isdisjoint(protocols):
                protocol_flag = self.flag("protocol")
                yield UserError(
                    f"{flag} is {typed[flag]}, which has no effect: "
                    f"{protocol_flag} is {', '.join(sorted(protocols_in_use))}",
                    hint=f"omit it, or use {protocol_flag} {' or '.join(protocols)}",
                    flags=(flag, protocol_flag),
                )

    def find_protocol(self, name: str) -> ProtocolName:
        """Return the protocol with this name.

        Raises:
            UserError: No protocol has this name.
        """
        protocols: dict[str, ProtocolName] = {protocol: protocol for protocol in get_args(ProtocolName)}
        if name not in protocols:
            raise UserError(
                f"{self.flag('shards')} names the protocol {name!r}, which does not exist",
                hint=f"use one of: {', '.join(protocols)}",
                flags=(self.flag("shards"),),
            )
        return protocols[name]


_PROTOCOLS_OF_SETTING: dict[str, tuple[str, ...]] = {
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
    other_data_values: ClassVar[Mapping[str, Any]] = {"captions": CaptionSettings()}
    min_batch = 2
    only_kind = "clip"

    towers: Annotated[DualEncoderTowers, groups.TOWERS] = field(default_factory=DualEncoderTowers)
    init: Annotated[DualEncoderInit, groups.MODEL, groups.SEVERAL] = field(default_factory=DualEncoderInit)
    text_tower: Annotated[Literal["trained", "frozen"], groups.MODEL, FIRST_RUN] = "trained"
    """Text tower. trained: train a text tower; frozen: use stored embeddings from prep text instead."""
    captions: Annotated[CaptionSettings, groups.CAPTIONS] = field(default_factory=CaptionSettings)
    """Choice of each sample's caption."""
    loss: Annotated[Loss, LOSS] = field(default_factory=Loss)
    """Contrastive loss."""
    evaluate: Annotated[DualEncoderEvaluation, groups.EVALUATION] = field(default_factory=DualEncoderEvaluation)

    def tower_names(self) -> tuple[Tower, ...]:
        """Return the towers of the model. Stored embeddings replace the text tower."""
        return ("video",) if self.text_tower == "frozen" else ("video", "text")

    def rules(self) -> Iterator[UserError]:
        """Yield errors for a batch without negatives, and for settings that do not fit the input or the text tower."""
        yield from super().rules()
        if self.reads_latents and self.captions.min_relevancy is not None:
            yield UserError(
                "--captions.min-relevancy draws captions for clips, not for segments of latents",
                hint="omit it, or use --input pixels",
                flags=("--captions.min-relevancy",),
            )
        if self.batch < self.min_batch:
            yield UserError(
                f"--batch is {self.batch}, but a contrastive loss needs at least 2 samples",
                hint="use --batch 2 or more",
                flags=("--batch",),
            )
        if not self.reads_latents:
            yield from errors_of(check_frame_size, self.model, self.towers, size_px=self.size_px)
        if self.text_tower == "frozen" and self.init.text is not None:
            yield UserError(
                f"--init.text is {self.init.text}, but --text-tower frozen uses stored embeddings, not a text tower",
                hint="omit --init.text or --text-tower frozen",
                flags=("--init.text",),
            )
        if self.text_tower == "frozen" and self.towers.embedding_width is not None:
            yield UserError(
                f"--towers.embedding-width is {self.towers.embedding_width}, but stored embeddings have a fixed width",
                hint="omit it with --text-tower frozen",
                flags=("--towers.embedding-width",),
            )


MAX_CLIPS = 100
_RUNS = "Run folder of train dual-encoder."
_DIRECTIONS = {"text_to_video": "text → video", "video_to_text": "video → text"}


@dataclass(frozen=True, kw_only=True)
class ClipFlags(Checked):
    """Flags of all evaluations of a dual encoder."""

    split: str = "val"
    """Split to evaluate on."""
    clips: Annotated[int, Range(1, MAX_CLIPS)] = 1
    """Number of temporal views per clip. The embeddings of the views are averaged. Latents have a single view."""


@dataclass(frozen=True, kw_only=True)
class RetrievalFlags(ClipFlags):
    """Flags of `train eval retrieval`."""

    protocol: RetrievalName = "retrieval"
    """Protocol that defines the texts, clips and correct pairs. retrieval: all captions of the split; other protocols:
    the rules of a benchmark. Data that do not fit the rules are rejected."""
    dual_softmax: Annotated[float | None, TEMPERATURE] = None
    """Also report recall with dual softmax, in separate rows. The value is the temperature by which cosine similarities
    are divided. Dual softmax uses all queries of the test set together."""

    def evaluation(self) -> DualEncoderEvaluation:
        """Return the settings for an evaluation with these flags."""
        return DualEncoderEvaluation(split=self.split, protocol=self.protocol, dual_softmax=self.dual_softmax)


@dataclass(frozen=True, kw_only=True)
class MirFlags(ClipFlags):
    """Flags of `train eval mir`."""

    split: str = "test"
    """Split to evaluate on."""
    relevancy: Path | None = None
    """File with the relevancy matrix (clips x sentences): .npy, or the published .pkl, which is read without executing
    code. Default: computed from verb and noun classes."""
    sentences: Path | None = None
    """CSV file whose `narration` column lists the sentences of --relevancy, in the order of the matrix's columns.
    Default: the distinct captions, in the order of the manifest."""

    def evaluation(self) -> DualEncoderEvaluation:
        """Return the settings for an evaluation with these flags."""
        return DualEncoderEvaluation(
            protocol="mir", split=self.split, relevancy=self.relevancy, sentences=self.sentences
        )


@dataclass(frozen=True, kw_only=True)
class EgoMcqFlags(ClipFlags):
    """Flags of `train eval egomcq`."""

    questions: Path | None = None
    """Question file (egomcq.json). Required. Use the file that was passed to prep manifest ego4d."""

    def evaluation(self) -> DualEncoderEvaluation:
        """Return the settings for an evaluation with these flags."""
        return DualEncoderEvaluation(protocol="egomcq", split=self.split, questions=self.questions)


@dataclass(frozen=True, kw_only=True)
class ZeroShotFlags(ClipFlags):
    """Flags of `train eval zero-shot`."""

    classes: Path | None = None
    """Text file with one class per line and alternative names separated by |, or the class table of EPIC-KITCHENS-100.
    Default: the labels of the captions."""
    templates: Path | None = None
    """Text file with one prompt template per line; {} stands for the class name. Default: the class name without a
    template."""
    label: str | None = None
    """Label column of the captions, such as verb. Required if there are several label columns."""

    def evaluation(self) -> DualEncoderEvaluation:
        """Return the settings for an evaluation with these flags."""
        return DualEncoderEvaluation(
            protocol="zero-shot",
            split=self.split,
            classes=self.classes,
            templates=self.templates,
            label=self.label,
        )


def retrieval_table(result: dict[str, Any]) -> Table:
    """Return a table of recall and median rank in both directions, followed by rows with dual softmax if computed."""
    rows, dual = [], result.get("dual_softmax", {})
    is_plain = result.get("protocol_name", "retrieval") == "retrieval"
    suffix = "" if is_plain else f", {result['protocol_name']}" + (" (incomplete)" if result["incomplete"] else "")
    kinds = ((result, suffix), (dual, f"{suffix}, dual softmax")) if dual else ((result, suffix),)
    for directions, kind in kinds:
        for key, name in _DIRECTIONS.items():
            scores = directions[key]
            cells = [share_cell(share, scores["chance"][k]) for k, share in scores["recall"].items()]
            cells.append(Cell(f"{scores['median_rank']:.1f}", f"{scores['chance_median_rank']:.0f}"))
            detail = (
                f"{count_noun(scores['num_queries'], 'query', 'queries')}, {scores['gallery_size']:,} to choose from"
            )
            rows.append(Row(name + kind, detail, tuple(cells)))
    to_video, to_text = (result[key] for key in _DIRECTIONS)
    texts, clips = ("distinct text", "clip") if is_plain else ("text", "video")
    sizes = f"{count_noun(to_video['num_queries'], texts)}, {count_noun(to_text['num_queries'], clips)}"
    notes = "; ".join(result.get("notes", ()))
    protocol = protocol_of(result, sizes, notes=notes, dual_softmax=dual.get("rule", ""))
    columns = (*(f"R@{k}" for k in to_video["recall"]), "median rank")
    return Table(result.get("title", "Text-video retrieval"), columns, tuple(rows), protocol)


def mir_table(result: dict[str, Any]) -> Table:
    """Return a table of graded mAP and nDCG in both directions, and their means over the directions."""
    rows = []
    for key in ("video_to_text", "text_to_video"):
        scores = result[key]
        cells = (
            share_cell(scores["mean_ap"], scores["chance_mean_ap"]),
            share_cell(scores["ndcg"], scores["chance_ndcg"]),
        )
        num_scored = scores["num_queries"] - scores["num_without_ap"]
        detail = f"{count_noun(num_scored, 'query', 'queries')}, {scores['gallery_size']:,} to rank"
        rows.append(Row(_DIRECTIONS[key], detail, cells))
    means = []
    for name in ("mean_ap", "ndcg"):
        chances = [result[key][f"chance_{name}"] for key in _DIRECTIONS]
        chance = None if None in chances else sum(chances) / len(chances)
        means.append(share_cell(result["average"][name], chance))
    # Results of earlier versions repeat the word "relevancy".
    relevancy = result["relevancy"].removeprefix("relevancy of ").removeprefix("relevancy ")
    is_computed = relevancy.startswith("computed from ")
    rows.append(Row("average" if is_computed else f"average, {relevancy}", "of both directions", tuple(means)))
    protocol = protocol_of(result, result["coverage"], relevancy=relevancy, left_out=_undefined_text(result))
    title = f"Multi-instance retrieval (EK-100 MIR, {'computed relevancy' if is_computed else relevancy})"
    return Table(title, ("mAP", "nDCG"), tuple(rows), protocol, headline=-1)


def egomcq_table(result: dict[str, Any]) -> Table:
    """Return a table of accuracies for questions with clips from different videos, and with clips from one video."""
    kinds = {"inter": "inter-video", "intra": "intra-video"}
    cells = tuple(share_cell(result[kind]["accuracy"], result[kind]["chance"]) for kind in kinds)
    sizes = ", ".join(count_noun(result[kind]["num_questions"], f"{name} question") for kind, name in kinds.items())
    rows = (Row("accuracy", sizes, cells),)
    protocol = protocol_of(result, sizes, questions=result["questions"])
    question_count = result["inter"]["num_questions"], f"{kinds['inter']} question"
    return Table("EgoMCQ", tuple(kinds.values()), rows, protocol, averaged_items=question_count)


def zero_shot_table(result: dict[str, Any]) -> Table:
    """Return a table of top-1, top-5 and mean class accuracy."""
    top, baseline = result["top"], result["majority_baseline"]
    shares = [*top.values(), result["mean_class_accuracy"]]
    cells = [share_cell(share, baseline[key]) for share, key in zip(shares, BASELINE_KEYS, strict=True)]
    clips, num_without = count_noun(result["num_clips"], "clip"), result["num_without_class"]
    detail = f"{clips}, {count_noun(result['num_classes'], 'class', 'classes')}"
    left_out = f"{count_noun(num_without, 'clip')} without a class" if num_without else ""
    classes = f"{result['classes']}, {result['num_classes_seen']:,} of them have clips; {result['prompts']}"
    protocol = protocol_of(result, clips, classes=classes, left_out=left_out)
    columns = (*(f"top-{k}" for k in top), "mean class")
    rows = (Row("accuracy", detail, tuple(cells)),)
    return Table("Zero-shot classification", columns, rows, protocol, reference=MAJORITY)


def _undefined_text(result: dict[str, Any]) -> str:
    parts = []
    for direction, query in (("video_to_text", "clip"), ("text_to_video", "sentence")):
        scores = result[direction]
        if scores["num_without_ap"]:
            parts.append(f"no AP for {count_noun(scores['num_without_ap'], query)} without an item of relevancy 1")
        if scores["num_without_ndcg"]:
            parts.append(f"no nDCG for {count_noun(scores['num_without_ndcg'], query)} without a relevant item")
    return "; ".join(parts)


def _strips(result: dict[str, Any]) -> list[dict[str, Any]]:
    best_clips = [(query["text"], query["found"][0]) for query in result["examples"]]
    return [{"words": text, "frames": clip["frames"], "is_right": clip["is_right"]} for text, clip in best_clips]


def _recall(group: str) -> str:
    return f"R@{group}"


def _direction(group: str) -> str:
    return group.replace("_to_", " → ")


RETRIEVAL = EvaluationSpec(
    name="retrieval",
    help="Evaluate text-video retrieval: R@1, R@5, R@10 and median rank in both directions, with chance levels.",
    example="train eval retrieval runs/first --shards data",
    run_help=_RUNS,
    settings=RetrievalFlags,
    score=import_late("clipmill.train.tasks.dual_encoder.evaluation:score_run"),
    table=retrieval_table,
    pictures="examples",
    section=Path(__file__).with_name("retrievals.html.j2"),
    strips=_strips,
    curves=(
        CurveGroup(r"text_to_video_dual_softmax_r(\d+)", "Recall with dual softmax, text → video, %", _recall),
        CurveGroup(r"video_to_text_dual_softmax_r(\d+)", "Recall with dual softmax, video → text, %", _recall),
        CurveGroup(r"(.+)_dual_softmax_median_rank", "Median rank with dual softmax", _direction),
        CurveGroup(r"text_to_video_r(\d+)", "Recall, text → video, %", _recall),
        CurveGroup(r"video_to_text_r(\d+)", "Recall, video → text, %", _recall),
        CurveGroup(r"(.+)_median_rank", "Median rank", _direction),
    ),
)
MIR = EvaluationSpec(
    name="mir",
    help="Evaluate multi-instance retrieval (EPIC-KITCHENS-100): mAP and nDCG in both directions, and their mean.",
    example="train eval mir runs/ek100 --shards data --relevancy relevancy.pkl",
    run_help=_RUNS,
    settings=MirFlags,
    score=import_late("clipmill.train.tasks.dual_encoder.evaluation:score_run"),
    table=mir_table,
    pictures="examples",
    section=Path(__file__).with_name("retrievals.html.j2"),
    strips=_strips,
    curves=(
        CurveGroup(r"(.+)_mean_ap", "mAP, %", _direction),
        CurveGroup(r"(.+)_ndcg", "nDCG, %", _direction),
    ),
)
EGOMCQ = EvaluationSpec(
    name="egomcq",
    help="Evaluate EgoMCQ (multiple choice among five clips of Ego4D): inter-video and intra-video accuracy.",
    example="train eval egomcq runs/ego4d --shards data --questions egomcq.json",
    run_help=_RUNS,
    needs="--questions egomcq.json",
    settings=EgoMcqFlags,
    score=import_late("clipmill.train.tasks.dual_encoder.evaluation:score_run"),
    table=egomcq_table,
    curves=(CurveGroup(r"(inter|intra)_accuracy", "EgoMCQ accuracy, %"),),
)
ZERO_SHOT = EvaluationSpec(
    name="zero-shot",
    help="Evaluate zero-shot classification with prompts: top-1, top-5 and mean class accuracy.",
    example="train eval zero-shot runs/first --shards data --classes classes.txt",
    run_help=_RUNS,
    settings=ZeroShotFlags,
    score=import_late("clipmill.train.tasks.dual_encoder.evaluation:score_run"),
    table=zero_shot_table,
    pictures="by_class",
    section=CLASSES_SECTION,
    curves=(CurveGroup(r"(top\d+|mean_class_accuracy)", "Zero-shot accuracy, %"),),
)
TASK = TaskSpec(
    name="dual-encoder",
    help="Train a CLIP-style dual encoder with a contrastive loss.",
    example="train dual-encoder --shards data --preset tiny --steps 200 --out runs/first",
    settings=DualEncoderSettings,
    make=import_late("clipmill.train.tasks.dual_encoder.task:DualEncoderTask"),
    effective_settings=import_late("clipmill.train.tasks.dual_encoder.task:effective_settings"),
    evaluations=(RETRIEVAL, MIR, EGOMCQ, ZERO_SHOT, PROBE),
    formats={
        "open_clip": "create_model('local-dir:OUT')",
        "hf": "CLIPModel.from_pretrained('OUT')",
        "timm": "timm.create_model('local-dir:OUT', pretrained=True)",
        "torch": "torch.export.load('OUT/model.pt2'), the video tower",
        "onnx": "InferenceSession('OUT/model.onnx'), the video tower",
    },
    export=import_late("clipmill.train.tasks.dual_encoder.export:exported_clip"),
    adopt=import_late("clipmill.train.tasks.dual_encoder.export:adopted_clip"),
    adoptable="a CLIP with both towers",
    adopts_tags=True,
    has_frame_embedding=True,
    features=Features(description="the video tower's features, before the projection", inputs=lambda task: task.clips),
    first_run=FirstRun(
        cpu_preset="tiny",
        gpu_preset="b16-ego4d",
        weights="ViT-B-16:openai",
        latents_flags="--preset tiny-latents",
        no_text_flags="--text-tower trained",
        can_search=True,
    ),
    pipeline="zero-shot-image-classification",
)
