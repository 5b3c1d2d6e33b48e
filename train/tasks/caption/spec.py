"""`TaskSpec` of the captioner, and its evaluation."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import Checked, Range
from clipmill.train.evaluation.tables import Cell, Row, Table, protocol_of
from clipmill.train.spec import CurveGroup, EvaluationSpec, Features, FirstRun, TaskSpec
from clipmill.train.tasks.caption.settings import DECODING, METRIC_LABELS, CaptionerSettings, DecodingSettings

# Columns of the table; the first one is the metric that captioners are compared by.
_CAPTION_COLUMNS = {
    "cider_d": "CIDEr-D",
    "bleu4": "BLEU-4",
    "meteor": "METEOR",
    "rouge_l": "ROUGE-L",
    "cider": "CIDEr",
    "spice": "SPICE",
    "exact_match": "exact match",
}


@dataclass(frozen=True, kw_only=True)
class CaptionFlags(Checked):
    """Flags of `train eval caption`."""

    split: str = "val"
    """Split to evaluate on."""
    max_samples: Annotated[int, Range(least=1)] = 100_000
    """Maximum number of clips: every k-th of the split, with the smallest sufficient k (12 of 52: 11, every 5th)."""
    spice_jars: Path | None = None
    """Folder of the two jar files that SPICE needs. Default: SPICE is left out."""
    decoding: Annotated[DecodingSettings | None, DECODING] = None
    """How captions are generated. Default: as in training."""


def caption_table(result: dict[str, Any]) -> Table:
    """The metrics of captions, and those of the best constant caption."""
    shown = [name for name in _CAPTION_COLUMNS if name in result["means"]]
    constant = result["constant"]
    rows = [
        (
            "captions",
            f"{count_noun(result['num_samples'], 'clip')}, {count_noun(result['num_references'], 'reference')}",
            result["means"],
        ),
        ("constant caption", "the same caption for every clip", constant["means"]),
    ]
    table_rows = []
    for label, detail, means in rows:
        cells = [_caption_cell(name, means.get(name)) for name in shown]
        cells.append(Cell(f"{result['loss']:.3f}" if label == "captions" else "-"))
        table_rows.append(Row(label, detail, tuple(cells), is_baseline=label != "captions"))
    absent = "; ".join(f"no {_CAPTION_COLUMNS[name]}: {reason}" for name, reason in result["absent"].items())
    protocol = protocol_of(
        result,
        f"{count_noun(result['num_samples'], 'clip')} (hash of their names {result['ids_hash']}); all metrics "
        "times 100",
        captions=result["decoding"],
        loss=result["loss_rule"],
        constant_caption=f"“{constant['caption']}”: {constant['chosen']}",
        left_out=absent,
    )
    columns = (*(_CAPTION_COLUMNS[name] for name in shown), "loss")
    return Table("Captions", columns, tuple(table_rows), protocol)


def _caption_cell(name: str, value: float | None) -> Cell:
    if value is None:
        return Cell("-")
    # CIDEr has no upper bound, so it has no bar.
    return Cell(f"{100 * value:.1f}", share=None if name.startswith("cider") else min(max(value, 0.0), 1.0))


def _strips(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"words": clip["caption"], **{name: clip[name] for name in ("frames", "is_right")}} for clip in result["said"]
    ]


def _curves() -> tuple[CurveGroup, ...]:
    groups = []
    for name, words in METRIC_LABELS.items():
        title = words[:1].upper() + words[1:] + ", times 100"
        groups.append(CurveGroup(f"({re.escape(name)})", title, lambda group: METRIC_LABELS[group]))
    return tuple(groups)


CAPTIONS = EvaluationSpec(
    name="caption",
    result="captions",
    help="Evaluate a captioner: CIDEr-D, BLEU, METEOR, ROUGE-L, SPICE and exact match against all references.\n\n"
    "The best constant caption is the baseline. Captions are also written in COCO results format.",
    example="train eval caption runs/captions --shards data --decoding.method beam",
    run_help="Run folder of train caption.",
    settings=CaptionFlags,
    score=import_late("clipmill.train.tasks.caption.evaluation:score_run"),
    table=caption_table,
    pictures="said",
    section=Path(__file__).with_name("examples.html.j2"),
    strips=_strips,
    curves=_curves(),
)
TASK = TaskSpec(
    name="caption",
    help="Train a captioner: a video encoder and a GPT-2 with cross-attention, or any causal language model.",
    example="train caption --shards data --preset tiny --out runs/captions",
    settings=CaptionerSettings,
    make=import_late("clipmill.train.tasks.caption.task:CaptionTask"),
    kept=import_late("clipmill.train.tasks.caption.decoder:kept_decoder"),
    effective=import_late("clipmill.train.tasks.caption.model:effective_settings"),
    evaluations=(CAPTIONS,),
    start_lines=import_late("clipmill.train.tasks.caption.decoder:start_lines"),
    formats={
        "hf": "VisionEncoderDecoderModel.from_pretrained('OUT')",
        "lm": "AutoModelForCausalLM.from_pretrained('OUT/lm')",
    },
    export=import_late("clipmill.train.tasks.caption.export:exported_captioner"),
    adopt=import_late("clipmill.train.tasks.caption.export:adopted_captioner"),
    adopted="a captioner of TimeSformer and GPT-2",
    features=Features(
        description="the encoder's class token, or the mean of its tokens where it has none",
        inputs=lambda task: task.inputs,
    ),
    first_run=FirstRun(on_cpu="tiny"),
    pipeline="video-text-to-text",
)
