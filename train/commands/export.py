"""`train export`: a run's weights as a folder that others open; `--init.weights` reads it too."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from manifests.errors import UserError
from train.run.checkpoint import read_weights
from train.run.folder import open_run
from train.tasks.caption.export import exported_captioner
from train.tasks.caption.task import CaptionTask
from train.tasks.classify.export import exported_classifier
from train.tasks.classify.task import ClassifyTask
from train.tasks.dual_encoder.export import FrameEmbedding, exported_clip
from train.tasks.dual_encoder.task import DualEncoderTask
from train.tasks.mae.export import exported_autoencoder
from train.tasks.mae.task import MaeTask
from train.weights.conversion import require_finite
from train.weights.exported import publish_folder

ExportFormat = Literal["open_clip", "hf", "videomae"]


def export_run(
    run_path: Path,
    *,
    form: ExportFormat,
    out: Path,
    frame_embedding: FrameEmbedding = "mean",
    checkpoint: Path | None = None,
    say: Callable[[str], None],
) -> None:
    """Writes the weights of a run's latest checkpoint, or of the one that is named.

    Raises:
        UserError: there is no checkpoint, its weights are not finite, `out` is there already, or the format cannot hold
            such a model.
    """
    run = open_run(run_path)
    path = checkpoint or run.require_checkpoint()
    task = run.require_facts().get("task", DualEncoderTask.name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already", hint="use another --out")
    if frame_embedding != "mean" and task != DualEncoderTask.name:
        raise UserError(
            f"--frame-embedding is about the pictures of a dual encoder, and {run.path} is a run of train {task}",
            hint="leave it out",
        )
    weights = read_weights(path)
    require_finite(weights, source=path)
    if task == DualEncoderTask.name:
        exported = exported_clip(run, weights, checkpoint=path, form=form, frame_embedding=frame_embedding)
    elif task == MaeTask.name:
        exported = exported_autoencoder(run, weights, form=form)
    elif task == CaptionTask.name:
        exported = exported_captioner(run, weights, form=form)
    elif task == ClassifyTask.name:
        exported = exported_classifier(run, weights, form=form)
    else:
        raise UserError(
            f"{run.path} is a run of train {task}, which no format has a place for",
            hint="name a run of train dual-encoder, mae, classify or caption",
        )
    publish_folder(out, exported.write)
    for remark in exported.remarks:
        say(remark)
    say(f"{path.name} of {run.path} as {form} in {out}")
