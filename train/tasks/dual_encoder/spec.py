"""`TaskSpec` of the dual encoder, and its evaluations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from train.config.evaluation import DualEncoderEvaluation
from train.evaluation.probe.spec import PROBE
from train.evaluation.tables import Cell, Row, Table, protocol_of, share_cell
from train.spec import CurveGroup, EvaluationSpec, ExportRequest, Features, TaskSpec
from train.tasks.dual_encoder.settings import DualEncoderSettings

MAX_CLIPS = 100
_RUNS = "Folder that train dual-encoder --out made."
_DIRECTIONS = {"text_to_video": "text → video", "video_to_text": "video → text"}


@dataclass(frozen=True, kw_only=True)
class RetrievalFlags:
    """Flags of `train eval retrieval`."""

    split: str = "val"
    """Split to score."""
    clips: int = 1
    """Looks at each clip, at different moments; their embeddings are averaged."""

    def __post_init__(self) -> None:
        if not 1 <= self.clips <= MAX_CLIPS:
            raise UserError(f"--clips is {self.clips}", hint=f"use 1 to {MAX_CLIPS}; latents are looked at once")

    def evaluation(self) -> DualEncoderEvaluation:
        """The settings that training has for it."""
        return DualEncoderEvaluation(split=self.split)


@dataclass(frozen=True, kw_only=True)
class MirFlags(RetrievalFlags):
    """Flags of `train eval mir`."""

    split: str = "test"
    """Split to score."""
    relevancy: Path | None = None
    """Table of clips by sentences, .npy or the published .pkl (read without running it); computed from verb and noun
    classes when left out."""
    sentences: Path | None = None
    """CSV whose column `narration` has the sentences, in the order of the relevancy; when left out the captions'
    distinct texts in their order."""

    def evaluation(self) -> DualEncoderEvaluation:
        """The settings that training has for it."""
        return DualEncoderEvaluation(
            protocol="mir", split=self.split, relevancy=self.relevancy, sentences=self.sentences
        )


@dataclass(frozen=True, kw_only=True)
class ZeroShotFlags(RetrievalFlags):
    """Flags of `train eval zero-shot`."""

    classes: Path | None = None
    """Text file, one class a line, several names of it set apart by |; from the captions' labels when left out."""
    templates: Path | None = None
    """Text file, one template a line, with {} for the name; the bare name when left out."""
    label: str | None = None
    """Label of the captions that is the class, such as verb; needed where there are several."""

    def evaluation(self) -> DualEncoderEvaluation:
        """The settings that training has for it."""
        return DualEncoderEvaluation(
            protocol="zero-shot",
            split=self.split,
            classes=self.classes,
            templates=self.templates,
            label=self.label,
        )


def _make(settings: Any, *, run: Any, **opened: Any) -> Any:
    from train.tasks.dual_encoder.task import DualEncoderTask

    return DualEncoderTask(settings, **opened)


def _effective(settings: Any, source: Any, say: Any) -> Any:
    from train.tasks.dual_encoder.task import effective_settings

    return effective_settings(settings, source, say=say)


def _workloads(settings: Any, num_clips: int) -> Any:
    from train.tasks.dual_encoder.task import workloads_of

    return workloads_of(settings, num_clips)


def _score(opened: Any, wanted: Any) -> Any:
    from train.tasks.dual_encoder.evaluation import score_run

    return score_run(opened, wanted.evaluation(), num_clips=wanted.clips)


def _export(request: ExportRequest) -> Any:
    from train.tasks.dual_encoder.export import exported_clip

    return exported_clip(
        request.run,
        request.weights,
        checkpoint=request.checkpoint,
        form=request.form,
        frame_embedding=request.frame_embedding,
    )


def retrieval_table(result: dict[str, Any]) -> Table:
    """Recall and median rank in both directions."""
    rows = []
    for key, name in _DIRECTIONS.items():
        scores = result[key]
        cells = [share_cell(share, scores["chance"][k]) for k, share in scores["recall"].items()]
        cells.append(Cell(f"{scores['median_rank']:.1f}", f"{scores['chance_median_rank']:.0f}"))
        detail = f"{scores['num_queries']:,} queries, {scores['gallery_size']:,} to choose from"
        rows.append(Row(name, detail, tuple(cells)))
    to_video, to_text = (result[key] for key in _DIRECTIONS)
    sizes = f"{to_video['num_queries']} distinct texts, {to_text['num_queries']} clips"
    columns = (*(f"R@{k}" for k in to_video["recall"]), "median rank")
    return Table("Text-video retrieval", columns, tuple(rows), protocol_of(result, sizes))


def mir_table(result: dict[str, Any]) -> Table:
    """Graded mAP and nDCG in both directions, and their mean."""
    rows = []
    for key in ("video_to_text", "text_to_video"):
        scores = result[key]
        cells = (
            share_cell(scores["mean_ap"], scores["chance_mean_ap"]),
            share_cell(scores["ndcg"], scores["chance_ndcg"]),
        )
        detail = f"{scores['num_queries']:,} queries, {scores['gallery_size']:,} to rank"
        rows.append(Row(_DIRECTIONS[key], detail, cells))
    average = result["average"]
    rows.append(Row("average", "of both directions", (share_cell(average["mean_ap"]), share_cell(average["ndcg"]))))
    protocol = protocol_of(result, result["coverage"], relevancy=result["relevancy"], left_out=_undefined(result))
    return Table("Multi-instance retrieval (EK-100 MIR)", ("mAP", "nDCG"), tuple(rows), protocol, headline=-1)


def zero_shot_table(result: dict[str, Any]) -> Table:
    """Top-k and mean class accuracy."""
    top, chance = result["top"], result["chance"]
    cells = [share_cell(share, chance[k]) for k, share in top.items()]
    cells.append(share_cell(result["mean_class_accuracy"], next(iter(chance.values()))))
    detail = f"{result['num_clips']:,} clips, {result['num_classes']:,} classes"
    left_out = f"{result['num_without_class']:,} clips without a class" if result["num_without_class"] else ""
    classes = f"{result['classes']}, {result['num_classes_seen']:,} of them have clips; {result['prompts']}"
    protocol = protocol_of(result, f"{result['num_clips']:,} clips", classes=classes, left_out=left_out)
    columns = (*(f"top-{k}" for k in top), "mean class")
    return Table("Zero-shot classification", columns, (Row("accuracy", detail, tuple(cells)),), protocol)


def _undefined(result: dict[str, Any]) -> str:
    parts = []
    for direction, queries in (("video_to_text", "clips"), ("text_to_video", "sentences")):
        scores = result[direction]
        if scores["num_without_ap"]:
            parts.append(f"{scores['num_without_ap']:,} {queries} with nothing of relevancy 1 have no AP")
        if scores["num_without_ndcg"]:
            parts.append(f"{scores['num_without_ndcg']:,} {queries} with nothing relevant have no nDCG")
    return "; ".join(parts)


def _strips(result: dict[str, Any]) -> list[dict[str, Any]]:
    best = [(query["text"], query["found"][0]) for query in result["examples"]]
    return [{"words": text, "frames": clip["frames"], "is_right": clip["is_right"]} for text, clip in best]


def _direction(group: str) -> str:
    return group.replace("_to_", " → ")


RETRIEVAL = EvaluationSpec(
    name="retrieval",
    help="Text-video retrieval: R@1, R@5, R@10 and median rank in both directions, beside chance.",
    example="train eval retrieval runs/first --shards data",
    run_help=_RUNS,
    settings=RetrievalFlags,
    score=_score,
    table=retrieval_table,
    pictures="examples",
    section=Path(__file__).with_name("retrievals.html.j2"),
    strips=_strips,
    curves=(
        CurveGroup(r"text_to_video_r(\d+)", "Recall, text → video, %", lambda group: f"R@{group}"),
        CurveGroup(r"video_to_text_r(\d+)", "Recall, video → text, %", lambda group: f"R@{group}"),
        CurveGroup(r"(.+)_median_rank", "Median rank", _direction),
    ),
)
MIR = EvaluationSpec(
    name="mir",
    help="Multi-instance retrieval as EPIC-KITCHENS-100 scores it: graded mAP and nDCG, both directions and mean.",
    example="train eval mir runs/ek100 --shards data --relevancy caption_relevancy_EPIC_100_retrieval_test.pkl",
    run_help=_RUNS,
    settings=MirFlags,
    score=_score,
    table=mir_table,
    curves=(
        CurveGroup(r"(.+)_mean_ap", "mAP, %", _direction),
        CurveGroup(r"(.+)_ndcg", "nDCG, %", _direction),
    ),
)
ZERO_SHOT = EvaluationSpec(
    name="zero-shot",
    help="Zero-shot classification: the class whose prompts are nearest; top-1, top-5 and mean class accuracy.",
    example="train eval zero-shot runs/first --shards data --classes classes.txt --templates templates.txt",
    run_help=_RUNS,
    settings=ZeroShotFlags,
    score=_score,
    table=zero_shot_table,
    curves=(CurveGroup(r"(top\d+|mean_class_accuracy)", "Zero-shot accuracy, %"),),
)
TASK = TaskSpec(
    name="dual-encoder",
    help="Train a CLIP-style dual encoder of clips and captions with a contrastive loss.",
    example="train dual-encoder --shards data --preset tiny --steps 200 --out runs/first",
    settings=DualEncoderSettings,
    make=_make,
    effective=_effective,
    workloads=_workloads,
    evaluations=(RETRIEVAL, MIR, ZERO_SHOT, PROBE),
    formats={"open_clip": "create_model('local-dir:OUT')", "hf": "CLIPModel.from_pretrained('OUT')"},
    export=_export,
    has_frame_embedding=True,
    features=Features(
        description="the video tower's class token, before the projection", inputs=lambda task: task.clips
    ),
)
