"""The record of its run in an exported folder: how clips are shown, and facts that no tensor shows.

    OUT/clipmill/settings.yaml   the settings of the model; without the data, paths and initial weights of the run
    OUT/clipmill/run.json        task, classes, decoder, side of latents
    OUT/clipmill/tokenizer.json  of a captioner
    OUT/clipmill/files.json      size and SHA-256 of these files, of the weights and of their configuration

The weights are whole: adapters are merged, and the settings of the record have neither adapters nor frozen parts.
Other libraries do not read it. `train eval OUT` shows a model the clips that its run was evaluated on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_bytes, publish_json
from clipmill.manifests.settings import deferred_checks
from clipmill.train.config.files import save_settings
from clipmill.train.config.model import Init
from clipmill.train.config.training import TrainingSettings
from clipmill.train.evaluation.runner import OpenedRun
from clipmill.train.models.attention_choice import CHOICE_FACT
from clipmill.train.run.checkpoint import file_facts
from clipmill.train.run.environment import PACKAGES_FACT
from clipmill.train.run.folder import RunFolder, read_object
from clipmill.train.weights.exported import EXTRAS_FILE
from clipmill.train.weights.files import weights_file

FOLDER = "clipmill"
_FILES = "files.json"
# What is read besides the weights and the record, and says how the model computes.
_BESIDE = (EXTRAS_FILE, "config.json", "open_clip_config.json")
# Of the machine and the data of the training, and of what was trained of the model.
_LEFT_OUT = (
    "shards",
    "mix",
    "cache",
    "cache_size",
    "out",
    "track",
    "evaluate",
    "parallel",
    "best",
    "device",
    "freeze",
    "lora",
)


def write_record(folder: Path, opened: OpenedRun) -> None:
    """Write the record of exported weights into their folder."""
    settings, record = opened.settings, RunFolder(folder / FOLDER)
    defaults: TrainingSettings = type(settings)()
    init = Init(pixel_mean=settings.init.pixel_mean, pixel_std=settings.init.pixel_std)
    facts: dict[str, Any] = {"task": opened.spec.name, **opened.task.facts()}
    # Which attention it was trained with: others round differently. Which other packages its parts are of.
    kept = ("attention", CHOICE_FACT, PACKAGES_FACT)
    facts |= {name: value for name, value in opened.trained.facts.items() if name in kept}
    if settings.reads_latents:
        shape = opened.shape
        facts["latents"] = {"channels": shape.size.video.num_channels, "side": shape.image_px}
    record.path.mkdir()
    with deferred_checks():
        save_settings(
            replace(settings, init=init, **{name: getattr(defaults, name) for name in _LEFT_OUT}), record.settings
        )
    publish_json(record.facts, facts)
    for name, content in opened.task.files().items():
        publish_bytes(record.path / name, content)
    files = [weights_file(folder), *_files_beside(folder), *sorted(record.path.iterdir())]
    publish_json(record.path / _FILES, {path.relative_to(folder).as_posix(): file_facts(path) for path in files})


def read_record(folder: Path) -> RunFolder | None:
    """The record in an exported folder as the folder of a run without checkpoints; None if there is none.

    Raises:
        UserError: it is damaged, belongs to other weights than those in the folder, or a file that the model was
            exported with has changed or is missing.
    """
    record = RunFolder(folder / FOLDER)
    if not record.settings.is_file() and not (record.path / _FILES).is_file():
        return None
    weights, known = weights_file(folder), read_object(record.path / _FILES)
    if known.get(weights.name) != file_facts(weights):
        raise UserError(
            f"{record.path} belongs to other weights than {weights.name}, which has changed since the export",
            hint=f"to use {weights.name} as the weights of another project, remove {record.path}",
        )
    for name in sorted({*known, *(path.name for path in _files_beside(folder))}):
        path = folder / name
        if not path.is_file() or known.get(name) != file_facts(path):
            raise UserError(
                f"{path} {'has changed since the export' if path.is_file() else 'is missing, which was exported'}",
                hint=f"export again; to use {weights.name} as the weights of another project, remove {record.path}",
            )
    return record


def _files_beside(folder: Path) -> list[Path]:
    return [folder / name for name in _BESIDE if (folder / name).is_file()]
