"""What an exported folder keeps of the run that it was made of: how clips are shown, and what no tensor says.

    OUT/clipmill/settings.yaml   the settings of the model; without the data, paths and initial weights of the run
    OUT/clipmill/run.json        task, classes, decoder, side of latents; SHA-256 of the weights that it belongs to
    OUT/clipmill/tokenizer.json  of a captioner

Other libraries do not read it. `train eval OUT` shows a model the clips that its run was evaluated on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.publish import publish_bytes, publish_json
from train.config.fields import deferred_checks
from train.config.files import save_settings
from train.config.model import Init
from train.config.training import TrainingSettings
from train.engine.attention_choice import CHOICE_FACT
from train.evaluation.runner import OpenedRun
from train.run.checkpoint import file_facts
from train.run.folder import RunFolder
from train.weights.sources import weights_file

FOLDER = "clipmill"
_OWNER = "exported_weights"
# Of the machine and the data of the training.
_LEFT_OUT = ("shards", "cache", "out", "track", "evaluate", "parallel", "best", "device")


def write_record(folder: Path, opened: OpenedRun) -> None:
    """Write the record of exported weights into their folder."""
    settings, record = opened.settings, RunFolder(folder / FOLDER)
    defaults: TrainingSettings = type(settings)()
    init = Init(pixel_mean=settings.init.pixel_mean, pixel_std=settings.init.pixel_std)
    facts: dict[str, Any] = {"task": opened.spec.name, **opened.task.facts()}
    # Which attention it was trained with: others round differently.
    facts |= {name: value for name, value in opened.trained.facts.items() if name in ("attention", CHOICE_FACT)}
    if getattr(settings, "input", "pixels") == "latents":
        shape = opened.shape
        facts["latents"] = {"channels": shape.size.video.num_channels, "side": shape.image_px}
    weights = weights_file(folder)
    record.path.mkdir()
    with deferred_checks():
        save_settings(
            replace(settings, init=init, **{name: getattr(defaults, name) for name in _LEFT_OUT}), record.settings
        )
    publish_json(record.facts, {**facts, _OWNER: {"file": weights.name, **file_facts(weights)}})
    for name, content in opened.task.files().items():
        publish_bytes(record.path / name, content)


def read_record(folder: Path) -> RunFolder | None:
    """The record in an exported folder as the folder of a run without checkpoints; None if there is none.

    Raises:
        UserError: it is damaged, or belongs to other weights than those in the folder.
    """
    record = RunFolder(folder / FOLDER)
    if not record.settings.is_file():
        return None
    weights, owner = weights_file(folder), record.require_facts().get(_OWNER)
    if owner != {"file": weights.name, **file_facts(weights)}:
        raise UserError(
            f"{record.path} belongs to other weights than {weights.name}, which has changed since the export",
            hint=f"to use {weights.name} as the weights of another project, remove {record.path}",
        )
    return record
