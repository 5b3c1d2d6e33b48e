"""`train export`: a run's weights as a folder that other libraries open; `--init.weights` reads it too."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.commands.training import docstring
from train.registry import DEFAULT, task_named, task_names
from train.run.folder import RunFolder, open_run
from train.spec import ExportRequest


def export(
    run: Path,
    *,
    form: Annotated[str, Parameter(name="--format")],
    out: Path,
    frame_embedding: Literal["mean", "zero"] = "mean",
    checkpoint: Path | None = None,
) -> None:
    """The command; its help is made below, from the formats of all tasks."""
    export_run(run, form=form, out=out, frame_embedding=frame_embedding, checkpoint=checkpoint, say=print)


_FORMATS = [(name, form, opens) for name in task_names() for form, opens in task_named(name).formats.items()]
export.__doc__ = docstring(
    "Export the weights of a run as a folder for other libraries, which --init.weights reads too.\n\n"
    "Task, format, and what opens the folder OUT:\n\n" + "\n".join(f"    {a:12} {b:9} {c}" for a, b, c in _FORMATS),
    example="train export runs/first --format open_clip --out exported",
    run="Run folder.",
    form=f"Format: {', '.join(dict.fromkeys(form for _, form, _ in _FORMATS))}.",
    out="New folder to write.",
    frame_embedding="Temporal embedding of single images, for dual encoders: mean over all frames, or zero.",
    checkpoint="Checkpoint of the run. Default: the latest.",
)


def export_run(
    run_path: Path,
    *,
    form: str,
    out: Path,
    frame_embedding: Literal["mean", "zero"] = "mean",
    checkpoint: Path | None = None,
    say: Callable[[str], None],
) -> None:
    """Writes the weights of a run's latest checkpoint, or of the one that is named.

    Raises:
        UserError: there is no checkpoint, its weights are not finite, `out` exists already, or the format cannot hold
            such a model.
    """
    from train.weights.conversion import require_finite
    from train.weights.exported import publish_folder
    from train.weights.sources import whole_weights

    run = open_run(run_path)
    path = run.require_checkpoint() if checkpoint is None else _checkpoint_of(run, checkpoint)
    task = str(run.require_facts().get("task", DEFAULT))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already", hint="use another --out")
    spec = task_named(task) if task in task_names() else None
    if spec is None or spec.export is None:
        known = [name for name in task_names() if task_named(name).export is not None]
        raise UserError(
            f"{run.path} is a run of train {task}, which no format has a place for",
            hint=f"name a run of train {', '.join(known)}",
        )
    if form not in {known for _, known, _ in _FORMATS}:
        raise UserError(f"there is no format {form} (--format)", hint=f"train {task} has {', '.join(spec.formats)}")
    if frame_embedding != "mean" and not spec.has_frame_embedding:
        raise UserError(
            f"--frame-embedding is about the pictures of a dual encoder, and {run.path} is a run of train {task}",
            hint="leave it out",
        )
    weights = whole_weights(path)
    require_finite(weights, source=path)
    request = ExportRequest(run=run, weights=weights, checkpoint=path, form=form, frame_embedding=frame_embedding)
    exported = spec.export(request)
    publish_folder(out, exported.write)
    for remark in exported.remarks:
        say(remark)
    say(f"{path.name} of {run.path} as {form} in {out}")


def _checkpoint_of(run: RunFolder, path: Path) -> Path:
    """The named checkpoint, which has to be one of the run's: its settings describe no other weights."""
    from train.run.checkpoint import all_checkpoints

    known = all_checkpoints(run.checkpoints).values()
    if path.resolve() not in {one.resolve() for one in known}:
        names = ", ".join(sorted(str(one) for one in known)) or "it has none"
        raise UserError(f"{path} is not a checkpoint of {run.path}", hint=f"checkpoints of the run: {names}")
    return path
