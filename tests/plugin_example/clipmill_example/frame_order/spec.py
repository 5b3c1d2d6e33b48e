"""Settings, evaluation and spec of the task, which the command line reads without loading torch or the task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.plugins import import_late
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.evaluation import EvaluationSettings
from clipmill.train.evaluation.tables import Row, Table, protocol_of, share_cell
from clipmill.train.spec import CurveGroup, EvaluationSpec, ExportRequest, TaskSpec

_NO_EVALUATION = EvaluationSettings()


@dataclass(frozen=True, kw_only=True)
class FrameOrderSettings(ClipSettings):
    """Settings of `train frame-order`."""

    command = "frame-order"

    evaluate: EvaluationSettings = _NO_EVALUATION
    """Evaluation during training."""


@dataclass(frozen=True, kw_only=True)
class FrameOrderFlags:
    """Flags of `train eval frame-order`."""

    split: str = "val"
    """Split to score."""
    max_samples: int = 1000
    """Maximum number of clips."""


def _table(result: dict[str, Any]) -> Table:
    row = Row("accuracy", f"{result['num_samples']} clips", (share_cell(result["accuracy"], 0.5),))
    return Table("Frame order", ("top-1",), (row,), protocol_of(result, "all clips"))


def _export(request: ExportRequest) -> Any:
    from safetensors.torch import save_file

    from clipmill.train.weights.exported import Export

    def write(folder: Path) -> None:
        save_file(request.weights, folder / "model.safetensors")

    return Export(write=write)


TASK = TaskSpec(
    name="frame-order",
    help="Train a video tower to tell whether the frames of a clip are in order, or reversed.",
    example="train frame-order --shards data",
    settings=FrameOrderSettings,
    make=import_late("clipmill_example.frame_order.task:FrameOrderTask"),
    effective_settings=import_late("clipmill.train.weights.source:effective_clip_settings"),
    evaluations=(
        EvaluationSpec(
            name="frame-order",
            help="Accuracy of the order of frames.",
            example="train eval frame-order runs/order",
            run_help="Folder that train frame-order --out made.",
            settings=FrameOrderFlags,
            score=import_late("clipmill_example.frame_order.task:score_run"),
            table=_table,
            curves=(CurveGroup("(accuracy)", "Frame order, %"),),
        ),
    ),
    formats={"plain": "safetensors.torch.load_file('OUT/model.safetensors')"},
    export=_export,
)
