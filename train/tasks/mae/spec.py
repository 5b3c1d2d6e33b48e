"""`TaskSpec` of the masked autoencoder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from clipmill.manifests.formatting import count_noun, percent
from clipmill.manifests.plugins import import_late
from clipmill.manifests.settings import Checked, Range
from clipmill.train.evaluation.probe.spec import PROBE
from clipmill.train.evaluation.tables import Cell, Row, Table, protocol_of
from clipmill.train.spec import EvaluationSpec, Features, FirstRun, TaskSpec
from clipmill.train.tasks.mae.settings import MaeSettings


@dataclass(frozen=True, kw_only=True)
class ReconstructionFlags(Checked):
    """Flags of `train eval reconstruction`."""

    split: str = "val"
    """Split to evaluate on."""
    max_samples: Annotated[int, Range(least=1)] = 1000
    """Maximum number of clips: every k-th of the split, with the smallest sufficient k (12 of 52: 11, every 5th)."""


def reconstruction_table(result: dict[str, Any]) -> Table:
    """The loss next to that of predicting the mean of each cube."""
    loss, flat = result["loss"], result["flat_loss"]
    explained = 1 - loss / flat if flat else None
    cells = (
        Cell(f"{loss:.4f}", baseline=f"mean of each cube {flat:.4f}"),
        Cell(f"{flat:.4f}"),
        Cell(percent(explained), share=None if explained is None else min(max(explained, 0.0), 1.0)),
    )
    clips = count_noun(result["num_samples"], "clip")
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
    score=import_late("clipmill.train.tasks.mae.evaluation:score_run"),
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
    make=import_late("clipmill.train.tasks.mae.task:MaeTask"),
    effective=import_late("clipmill.train.tasks.mae.task:effective_settings"),
    evaluations=(PROBE, RECONSTRUCTION),
    at_end=import_late("clipmill.train.tasks.mae.evaluation:reconstruct_at_end"),
    formats={"hf": "VideoMAEForPreTraining.from_pretrained('OUT')", "videomae": "VideoMAE's code, as a checkpoint"},
    export=import_late("clipmill.train.tasks.mae.export:exported_autoencoder"),
    adopt=import_late("clipmill.train.tasks.mae.export:adopted_autoencoder"),
    adopted="a VideoMAE",
    features=Features(
        description="mean of the encoder's tokens of all cubes, none masked",
        inputs=lambda task: task.inputs,
        is_consecutive=lambda settings: True,
    ),
    first_run=FirstRun(on_cpu="tiny", on_gpu="mae-b16-k400", on_latents="--preset mae-latents", needs_captions=False),
    pipeline="feature-extraction",
)
