"""`TaskSpec` of the masked autoencoder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from clipmill.train.config.fields import Checked, Range
from clipmill.train.evaluation.pages import Cell, Row, Table, counted, percent, protocol_of
from clipmill.train.evaluation.probe.spec import PROBE
from clipmill.train.spec import EvaluationSpec, ExportRequest, Features, TaskSpec
from clipmill.train.tasks.mae.settings import MaeSettings, without_effect


@dataclass(frozen=True, kw_only=True)
class ReconstructionFlags(Checked):
    """Flags of `train eval reconstruction`."""

    split: str = "val"
    """Split to evaluate on."""
    max_samples: Annotated[int, Range(least=1)] = 1000
    """Maximum number of clips: every k-th of the split, with the smallest sufficient k (12 of 52: every 5th, 11)."""


def _make(settings: Any, *, run: Any, **opened: Any) -> Any:
    from clipmill.train.tasks.mae.task import MaeTask

    return MaeTask(settings, **opened)


def _effective(settings: Any, source: Any, say: Any) -> Any:
    from clipmill.train.weights.effective import effective_clip_settings

    if unused := without_effect(settings):
        say(f"without effect with --input {settings.input}, given or from a preset: {', '.join(unused)}")
    return effective_clip_settings(settings, source, say=say)


def _score(opened: Any, wanted: Any) -> Any:
    from clipmill.train.tasks.mae.evaluation import score_run

    return score_run(opened, wanted)


def _at_end(run: Any, settings: Any, say: Any) -> None:
    from clipmill.train.tasks.mae.evaluation import reconstruct_at_end

    reconstruct_at_end(TASK, RECONSTRUCTION, run, settings, say=say)


def _export(request: ExportRequest) -> Any:
    from clipmill.train.tasks.mae.export import exported_autoencoder

    return exported_autoencoder(request)


def _adopt(source: Any, path: Path, say: Any) -> Any:
    from clipmill.train.tasks.mae.export import adopted_autoencoder

    return adopted_autoencoder(source, path, say=say)


def reconstruction_table(result: dict[str, Any]) -> Table:
    """The loss next to that of predicting the mean of each cube."""
    loss, flat = result["loss"], result["flat_loss"]
    explained = 1 - loss / flat if flat else None
    cells = (
        Cell(f"{loss:.4f}", baseline=f"mean of each cube {flat:.4f}"),
        Cell(f"{flat:.4f}"),
        Cell(percent(explained), share=None if explained is None else min(max(explained, 0.0), 1.0)),
    )
    clips = counted(result["num_samples"], "clip")
    detail = f"{clips}, {percent(result['share_hidden'])} masked"
    more = {"mask": result["mask"], "split": result["split_chosen"]}
    protocol = protocol_of(result, clips, **more)
    columns = ("loss", "baseline", "explained")
    return Table(
        "Reconstruction of masked cubes", columns, (Row(f"clips of {result['split']}", detail, cells),), protocol
    )


def _strips(result: dict[str, Any]) -> list[dict[str, Any]]:
    clip = result["shown"][0]
    rows = (("original", clip["original"]), ("masked", clip["masked"]), ("reconstruction", clip["filled"]))
    return [{"words": name, "frames": frames, "is_right": None} for name, frames in rows]


RECONSTRUCTION = EvaluationSpec(
    name="reconstruction",
    help="Evaluate the reconstruction of masked patches: loss on a split, and examples on the results page.",
    example="train eval reconstruction runs/mae --shards data",
    run_help="Run folder of train mae.",
    settings=ReconstructionFlags,
    score=_score,
    table=reconstruction_table,
    pictures="shown",
    section=Path(__file__).with_name("reconstructions.html.j2"),
    strips=_strips,
)
TASK = TaskSpec(
    name="mae",
    help="Pre-train a video tower as a masked autoencoder (VideoMAE); needs no captions.",
    example="train mae --shards data --preset tiny --out runs/masked",
    settings=MaeSettings,
    make=_make,
    effective=_effective,
    evaluations=(PROBE, RECONSTRUCTION),
    at_end=_at_end,
    formats={"hf": "VideoMAEForPreTraining.from_pretrained('OUT')", "videomae": "VideoMAE's code, as a checkpoint"},
    export=_export,
    adopt=_adopt,
    features=Features(
        description="mean of the encoder's tokens of all cubes, none masked",
        inputs=lambda task: task.inputs,
        is_consecutive=lambda settings: True,
    ),
)
