"""Open a trained run: its latest checkpoint, and the device, precision and attention to use it with."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn

from manifests.errors import UserError
from train.config.files import load_settings
from train.config.training import ClipSettings, require_same, shaping
from train.device.precision import Precision, choose_device, open_precision
from train.engine.attention_choice import as_before
from train.models.adapters import remove_adapters
from train.models.attention import AttentionBackend, open_attention
from train.run.checkpoint import read_metadata, read_table
from train.run.folder import RunFolder
from train.weights.sources import whole_weights

Settings = TypeVar("Settings", bound=ClipSettings)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Generic[Settings]):
    """The latest checkpoint of a run, and what to run its model with.

    Attributes:
        settings: of the run, with the requested data.
        step: of the checkpoint.
        weights: description of the weights (EMA or not) and of the precision.
    """

    run: RunFolder
    settings: Settings
    checkpoint: Path
    step: int
    weights: str
    device: torch.device
    attention: AttentionBackend
    precision: Precision

    def fill(self, model: Model) -> Model:
        """Load the weights into a model, the EMA weights if the run has them, on the device and in evaluation mode.

        Adapters are merged: the model has none afterwards.

        Raises:
            UserError: the weights are damaged, or do not fit the model.
        """
        remove_adapters(model)
        model.to(self.device)
        try:
            model.load_state_dict(whole_weights(self.checkpoint))
        except RuntimeError as error:
            raise UserError(
                f"{self.checkpoint} does not fit the model of {self.run.settings}: "
                f"{str(error).splitlines()[-1].strip()}",
                hint="were settings changed by hand? put back what the run was trained with",
            ) from error
        return model.eval()


def read_settings(run: RunFolder, kind: type[Settings], *, shards: str | None = None) -> Settings:
    """The settings of a run.

    Args:
        shards: data that replaces the run's own.

    Raises:
        UserError: they cannot be read, or are those of another task.
    """
    settings = load_settings(run.settings, kind)
    return settings if shards is None else replace(settings, shards=shards)


def open_trained_run(run: RunFolder, settings: Settings) -> TrainedRun[Settings]:
    """Open the latest checkpoint of a run, without data or a model.

    Raises:
        UserError: there is no checkpoint, it is damaged, the settings are not those that it was trained with, or this
            machine lacks what they require.
    """
    checkpoint = run.require_checkpoint()
    facts = read_metadata(checkpoint)
    require_same(
        facts.settings,
        shaping(settings),
        where=str(checkpoint),
        hint=f"was {run.settings} changed by hand? put back what the run was trained with",
    )
    device = choose_device(settings.device)
    # The backend that the run was trained with, if that was on a GPU too.
    is_measured = settings.attention == "auto" and device.type == "cuda" and not settings.compile
    before = as_before(run.read_facts(), device_type=device.type) if is_measured else None
    attention = before or open_attention(settings.attention, device_type=device.type, compiles=settings.compile)
    precision = open_precision(settings.precision, device_type=device.type)
    has_averages = any(name.startswith("ema.") for name in read_table(checkpoint))
    which = "moving average of the weights" if has_averages else "the weights themselves"
    return TrainedRun(
        run=run,
        settings=settings,
        checkpoint=checkpoint,
        step=facts.step,
        weights=f"{which}, {precision.name}",
        device=device,
        attention=attention,
        precision=precision,
    )
