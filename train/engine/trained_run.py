"""Open a trained run: one of its checkpoints, and the device, precision and attention backend for its model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.device.precision import Precision, choose_device, open_precision
from clipmill.train.models.attention import AttentionBackend, open_attention
from clipmill.train.models.attention_choice import needs_choice, previous_backend
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.models.transformer import remove_adapters
from clipmill.train.optim.parameters import rename_as_in
from clipmill.train.run.checkpoint import content_of, read_metadata, read_table
from clipmill.train.run.folder import RunFolder, require_trained_with
from clipmill.train.weights.conversion import CONV
from clipmill.train.weights.sources import complete_weights

Settings = TypeVar("Settings", bound=ClipSettings)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Generic[Settings]):
    """Trained weights from a run or another source, with the device, precision and attention backend for their model.

    Attributes:
        run: Run folder; None for weights from another source.
        facts: Content of the run's run.json; {} for weights from another source.
        settings: Settings of the model, with the requested overrides.
        step: Step of the checkpoint; None for weights from another source.
        weights: Description of the weights (EMA or not) and of the precision.
        load: Function that copies the weights into a model on the device.
    """

    run: RunFolder | None
    facts: dict[str, Any]
    settings: Settings
    step: int | None
    weights: str
    device: torch.device
    attention: AttentionBackend
    precision: Precision
    load: Callable[[nn.Module], None]

    def fill(self, model: Model) -> Model:
        """Load the weights into a model, and return the model on the device, in evaluation mode.

        If the run has EMA weights, they are loaded. Adapters are merged into the weights, except in a language model.

        Raises:
            UserError: The weights are damaged, or do not fit the model.
        """
        remove_adapters(model)
        model.to(self.device)
        self.load(model)
        return model.eval()


def open_trained_run(run: RunFolder, settings: Settings, *, checkpoint: Path | None = None) -> TrainedRun[Settings]:
    """Open a checkpoint of a run, by default the latest one. No data are opened, and no model is built.

    Raises:
        UserError: There is no checkpoint, the checkpoint is damaged or was trained with other settings, or this machine
            lacks what the settings require.
    """
    checkpoint = checkpoint or run.require_checkpoint()
    facts = read_metadata(checkpoint)
    require_trained_with(checkpoint, settings, file=run.settings)
    has_averages = any(name.startswith("ema.") for name in read_table(checkpoint))
    averaging = "moving average of the weights" if has_averages else "weights without averaging"

    def load(model: nn.Module) -> None:
        try:
            model.load_state_dict(rename_as_in(model, complete_weights(checkpoint)))
        except RuntimeError as error:
            raise UserError(
                f"{checkpoint} does not fit the model of {run.settings}: {str(error).splitlines()[-1].strip()}",
                hint="restore the settings that the run was trained with; they may have been changed by hand",
            ) from error

    return prepare_run(settings, run=run, facts=run.read_facts(), step=facts.step, weights=averaging, load=load)


def shape_of_run(run: RunFolder, settings: ClipSettings) -> ModelShape:
    """Return the dimensions of a run's model, from the table of its latest checkpoint.

    Raises:
        UserError: There is no checkpoint.
    """
    path = run.require_checkpoint()
    sizes = {name: entry["size"] for name, entry in read_table(path).items()}
    base_tensors = content_of(path).get("base", {}).get("tensors", {})  # omitted from a checkpoint with adapters
    sizes |= {f"model.{name}": size for name, size in base_tensors.items()}
    size, image_px = size_of(settings.model, settings.towers, num_views=settings.num_views), settings.size_px
    if (conv := sizes.get(f"model.{CONV}")) is not None:
        size = replace(size, video=replace(size.video, num_channels=conv[1], patch_px=conv[-1]))
    if (projection := sizes.get("model.video.proj")) is not None:
        size = replace(size, embedding_width=projection[1])
    if settings.reads_latents:
        latents = run.read_facts().get("latents")
        image_px = int(latents["side"]) if isinstance(latents, dict) and "side" in latents else 0
    return ModelShape(size=size, image_px=image_px)


def prepare_run(
    settings: Settings,
    *,
    run: RunFolder | None,
    facts: dict[str, Any],
    step: int | None,
    weights: str,
    load: Callable[[nn.Module], None],
) -> TrainedRun[Settings]:
    """Return the weights with the device, precision and attention that the settings specify.

    Args:
        facts, weights: See `TrainedRun`. The function appends the precision to `weights`.

    Raises:
        UserError: This machine lacks what the settings require.
    """
    device = choose_device(settings.device)
    # Prefer the backend that the run was trained with, if it can be used on this device.
    previous = previous_backend(facts, device_type=device.type) if needs_choice(settings, device=device) else None
    precision = open_precision(settings.precision, device_type=device.type)
    return TrainedRun(
        run=run,
        facts=facts,
        settings=settings,
        step=step,
        weights=f"{weights}, {precision.name}",
        device=device,
        attention=previous or open_attention(settings.attention, device_type=device.type, compiles=settings.compile),
        precision=precision,
        load=load,
    )
