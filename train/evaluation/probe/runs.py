"""The video tower of a run, whatever it was trained for: with its weights, and with those it might have begun with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manifests.errors import UserError
from train.config.training import ClipSettings
from train.data.batch import Batch
from train.distributed.world import World
from train.engine.trained_run import TrainedRun, read_settings
from train.run.folder import RunFolder
from train.tasks.classify.commands import read_run_classes
from train.tasks.classify.settings import ClassifySettings
from train.tasks.classify.task import ClassifyTask
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.dual_encoder.task import DualEncoderTask
from train.tasks.mae.settings import MaeSettings
from train.tasks.mae.task import MaeTask

FEATURES = {
    MaeTask.name: "mean of the encoder's tokens of all cubes, none masked",
    DualEncoderTask.name: "the video tower's class token, before the projection",
    ClassifyTask.name: "what the last layer sees",
}
_SETTINGS: dict[str, type[ClipSettings]] = {
    MaeTask.name: MaeSettings,
    DualEncoderTask.name: DualEncoderSettings,
    ClassifyTask.name: ClassifySettings,
}


@dataclass(frozen=True)
class ProbedRun:
    """A run's models, in evaluation mode on the device.

    Attributes:
        trained: with the weights of the latest checkpoint.
        random: with weights as the run's seed draws them.
        inputs: clips [B, C, T, H, W] of a batch, as the tower takes them in an evaluation.
    """

    trained: nn.Module
    random: nn.Module
    inputs: Callable[[Batch], torch.Tensor]


def read_clip_settings(run: RunFolder, *, shards: str | None) -> tuple[str, ClipSettings]:
    """The task of a run, and its settings.

    Args:
        shards: data folder in place of the run's own.

    Raises:
        UserError: it is a run of a task that has no tower to probe.
    """
    task = str(run.require_facts().get("task", DualEncoderTask.name))
    if task not in _SETTINGS:
        raise UserError(
            f"{run.path} is a run of train {task}: it has no video tower that can be probed",
            hint=f"name a run of train {', '.join(_SETTINGS)}",
        )
    return task, read_settings(run, _SETTINGS[task], shards=shards)


def open_probed_run(trained: TrainedRun[ClipSettings], *, split: str) -> ProbedRun:
    """Reads the weights of a run.

    Args:
        split: whose samples say how large clips are.

    Raises:
        UserError: they do not fit the settings.
    """
    task, inputs = _open_task(trained)
    samples: Any = task.samples(split, World())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trained.settings.seed)
        random = task.build_model(samples).to(trained.device).eval()
    return ProbedRun(trained.fill(task.build_model(samples)), random, inputs)


def _open_task(trained: TrainedRun[ClipSettings]) -> tuple[Any, Callable[[Batch], torch.Tensor]]:
    settings, attention, device = trained.settings, trained.attention, trained.device
    if isinstance(settings, MaeSettings):
        autoencoder = MaeTask(settings, attention=attention, device=device)
        return autoencoder, autoencoder.inputs
    if isinstance(settings, ClassifySettings):
        classifier = ClassifyTask(settings, attention=attention, device=device, classes=read_run_classes(trained.run))
        return classifier, classifier.inputs
    assert isinstance(settings, DualEncoderSettings)
    towers = DualEncoderTask(settings, attention=attention, device=device)
    return towers, towers.clips


def shows_row(settings: ClipSettings) -> bool:
    """Whether the frames of latents that a run looks at are neighbours."""
    if isinstance(settings, ClassifySettings):
        return settings.sampling == "stride"
    return isinstance(settings, MaeSettings)
