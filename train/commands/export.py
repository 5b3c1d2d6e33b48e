"""The command `train export`: write weights as a folder for other libraries, `--init.weights` and `train eval`."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.train.commands.training import docstring
from clipmill.train.config.clips import AS_TRAINED, Overrides, Weights
from clipmill.train.config.shards import local_folder, require_weights_exist
from clipmill.train.registry import tasks, tasks_where
from clipmill.train.run.folder import RunFolder, is_run
from clipmill.train.spec import ExportRequest, take_tags


def export(
    weights: Weights,
    *,
    form: Annotated[str, Parameter(name="--format")],
    out: Path,
    frame_embedding: Literal["mean", "zero"] = "mean",
    checkpoint: Path | None = None,
    shown: Overrides = AS_TRAINED,
) -> None:
    """Export weights. The help text is assembled below, because it lists the formats of all tasks."""
    export_run(
        weights, form=form, out=out, frame_embedding=frame_embedding, checkpoint=checkpoint, overrides=shown, say=print
    )


_PACKAGES = {"onnx": ("onnx", "onnxscript")}  # the extra of the same name installs them
_FORMATS = [(task.name, form, opens) for task in tasks() for form, opens in task.formats.items()]
export.__doc__ = docstring(
    "Write the weights of a run, or other weights, as a folder that other libraries can open.\n\n"
    "Task, format, and the expression that opens the folder OUT:\n\n"
    + "\n".join(f"    {a:12} {b:9} {c}" for a, b, c in _FORMATS),
    example="train export runs/first --format open_clip --out exported",
    weights="Run folder, exported folder, weights file, NAME:TAG of open_clip, or hf:NAME on the Hub.",
    form=f"Format: {', '.join(dict.fromkeys(form for _, form, _ in _FORMATS))}.",
    out="New folder to write.",
    frame_embedding="Temporal embedding of single images, for dual encoders: mean over all frames, or zero.",
    checkpoint="Checkpoint of the run. Default: the latest.",
)


def export_run(
    weights: str | Path,
    *,
    form: str,
    out: Path,
    frame_embedding: Literal["mean", "zero"] = "mean",
    checkpoint: Path | None = None,
    overrides: Overrides = AS_TRAINED,
    say: Callable[[str], None],
) -> None:
    """Write a checkpoint of a run (by default the latest), or other weights, in an export format.

    Raises:
        UserError: The weights do not exist or are not finite, `checkpoint` is not a checkpoint of the run, `out` exists
            and is not an empty folder, or the format is unknown, needs a missing package, or does not support this
            model.
    """
    _require_format(form)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already", hint="use another --out")
    require_weights_exist(weights, takes_tags=take_tags(tasks_where()))
    with Activity("importing torch"):
        from clipmill.train.config.clips import OpenOptions
        from clipmill.train.evaluation.opening import open_weights_as, write_record
        from clipmill.train.report.card import CARD_FILE, model_card
        from clipmill.train.run.checkpoint import checkpoint_step
        from clipmill.train.weights.conversion import require_finite
        from clipmill.train.weights.exported import publish_folder
        from clipmill.train.weights.sources import complete_weights

    run, path = RunFolder(local_folder(weights)), checkpoint
    if is_run(run.path):
        path = run.require_checkpoint() if checkpoint is None else _find_checkpoint(run, checkpoint)
        run.require_facts()
    options = OpenOptions(overrides=overrides, is_without_data=bool(overrides.given_values()), checkpoint=path)
    opened = open_weights_as(tasks_where(), weights, options, say=say)
    spec, task = opened.spec, opened.spec.name
    subject = f"{weights} is a run" if opened.run is not None else f"{weights} holds weights"
    if spec.export is None:
        exportable = [spec.name for spec in tasks() if spec.export is not None]
        raise UserError(
            f"{subject} of train {task}, which has no export format",
            hint=f"use a run or other weights of train {', '.join(exportable)}",
        )
    if frame_embedding != "mean" and not spec.has_frame_embedding:
        raise UserError(
            f"--frame-embedding applies only to dual encoders, but {subject} of train {task}",
            hint="omit --frame-embedding",
            flags=("--frame-embedding",),
        )
    if path is not None and not opened.overrides.given_values():
        tensors = complete_weights(path)
    else:
        tensors = opened.trained.fill(opened.task.build_model(None)).state_dict()
    _require_views(opened.settings, form)
    require_finite(tensors, source=path or weights)
    request = ExportRequest(
        title=str(weights),
        settings=opened.settings,
        task=opened.task,
        weights=tensors,
        shape=opened.shape,
        logits=opened.logits(),
        format_name=form,
        frame_embedding=frame_embedding,
    )
    exported = spec.export(request)
    if opened.settings.views is not None and not exported.usage:
        exported = replace(exported, model_input=exported.model_input or "a single view")

    step = None if path is None else checkpoint_step(path)
    card = model_card(opened, exported, form=form, opener=spec.formats[form], folder=out.name, step=step)

    def write(folder: Path) -> None:
        exported.write(folder)
        if not exported.usage:
            write_record(folder, opened)
        (folder / CARD_FILE).write_text(card)

    with Activity(f"writing {out}"):
        publish_folder(out, write)
    for remark in exported.remarks:
        say(remark)
    say(f"exported {weights if path is None else f'{path.name} of {weights}'} to {out}, in format {form}")
    say(f"open it with: {spec.formats[form].replace('OUT', str(out))}")


def _require_views(settings: Any, form: str) -> None:
    """Raise a UserError if a format does not support a model that takes several views."""
    if settings.views is None or form in ("torch", "onnx"):
        return
    if settings.towers.views == "concat" or form == "lm":
        raise UserError(
            f"the model takes the views {settings.views} ({settings.towers.views}), but --format {form} takes one view",
            hint="use --format torch or onnx, or use the weights directly: train eval and load_model read them",
            flags=("--format",),
        )


def _require_format(form: str) -> None:
    """Raise a UserError if a format is unknown, or needs packages that are missing."""
    names = dict.fromkeys(name for _, name, _ in _FORMATS)
    if form not in names:
        raise UserError(
            f"there is no format {form} (--format)", hint=f"use one of {', '.join(names)}", flags=("--format",)
        )
    if missing_packages := [name for name in _PACKAGES.get(form, ()) if find_spec(name) is None]:
        raise UserError(
            f"--format {form} needs {' and '.join(missing_packages)}",
            hint=f"pip install 'clipmill[{form}]'",
            flags=("--format",),
        )


def _find_checkpoint(run: RunFolder, path: Path) -> Path:
    """Return the local path of a checkpoint of the run.

    Raises:
        UserError: The path is not a checkpoint of the run, so the run's settings may not fit the weights.
    """
    from clipmill.train.run.checkpoint import all_checkpoints

    checkpoints = all_checkpoints(run.checkpoints).values()
    if mirror_of(run.path) is not None:
        path = run.checkpoints / path.name
    if path.resolve() not in {checkpoint.resolve() for checkpoint in checkpoints}:
        names = ", ".join(sorted(map(str, checkpoints)))
        raise UserError(
            f"{path} is not a checkpoint of {run.path}",
            hint=f"use a checkpoint of the run ({names})" if names else "wait until the run has written a checkpoint",
        )
    return path
