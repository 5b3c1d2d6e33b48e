"""What the tasks that train a video tower on clips have in common.

A task outside of clipmill may derive from `ClipTask` too; the loop asks only for `train.engine.task.StartableTask`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.config.training import ClipSettings
from train.data.batch import Batch
from train.models.attention import AttentionBackend
from train.models.transformer import blocks_of, compile_blocks
from train.weights.conversion import LOGIT_SCALE
from train.weights.loading import Loaded, copy_into, fit_to
from train.weights.sources import Say, Source

# Parts of other models that a video tower is not initialised from: prefix of their tensors, description.
UNUSED_PARTS = {
    "text.": "the text tower",
    "head.": "a classifier's last layer (head)",
    "video.proj": "the projection (video.proj)",
    LOGIT_SCALE: "the temperature (logit_scale)",
    "decoder.": "the decoder and its mask token (decoder)",
}
Settings = TypeVar("Settings", bound=ClipSettings)
Samples = TypeVar("Samples")
Rgb = tuple[float, float, float]
Model = TypeVar("Model", bound=nn.Module)


class ClipTask(Generic[Settings, Samples, Model]):
    """Settings, device, initial weights and model input of a task; the task adds samples, model and objective."""

    def __init__(self, settings: Settings, *, attention: AttentionBackend, device: torch.device) -> None:
        self._settings, self._attention, self._device = settings, attention, device
        self._start: Loaded | None = None

    def new_model(self, samples: Samples) -> Model:
        """A model with new weights, for clips as `samples` has them."""
        raise NotImplementedError

    def fit_weights(self, model: Model, source: Source, *, say: Say) -> Loaded:
        """Fit weights to a model on the meta device."""
        return fit_to(model, source, allow=self._settings.init.allow, say=say)

    def start_from(self, source: Source, samples: Samples, *, say: Say) -> Loaded:
        """Make `build_model` initialise models from these weights.

        Raises:
            UserError: they do not fit, and nothing explains why.
        """
        with torch.device("meta"):
            model = self.new_model(samples)
        self._start = self.fit_weights(model, source, say=say)
        return self._start

    def build_model(self, samples: Samples) -> Model:
        """A model for clips as `samples` has them, with the weights to start from if there are any."""
        model = self.new_model(samples)
        if self._start is not None:
            copy_into(model, self._start)
        if self._settings.compile:
            compile_blocks(model)
        return model

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of all transformers."""
        return blocks_of(model)

    def facts(self) -> dict[str, Any]:
        """Entries of run.json; none by default."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Files that the run keeps; none by default."""
        return {}

    def pixels(self, batch: Batch, rows: slice, *, mean: Rgb, std: Rgb, is_training: bool) -> torch.Tensor:
        """Normalised clips [B, C, T, H, W] of some rows of a batch, augmented in training.

        Args:
            mean, std: of each channel, unless --init.pixel-mean and --init.pixel-std give others.
        """
        settings, init = self._settings, self._settings.init
        positions = batch["position"][rows].numpy() if is_training else None
        return to_model_input(
            batch["video"][rows],
            batch["colour"][rows],
            size_px=settings.size_px,
            mean=init.pixel_mean or mean,
            std=init.pixel_std or std,
            draw=None if positions is None else draw(positions, settings.augment, seed=settings.seed),
        )


def without_parts(source: Source, parts: Mapping[str, str], *, model: str, say: Say) -> Source:
    """Weights without the parts that a model has no place for; it is printed which these are.

    Args:
        parts: prefix of tensor names -> description.
        model: such as "a classifier", for the message.
    """
    tensors = source.converted.tensors
    unused = {name: prefix for name in tensors for prefix in parts if name.startswith(prefix)}
    if unused:
        which = ", ".join(description for prefix, description in parts.items() if prefix in unused.values())
        say(f"weights: not used, because {model} has no such parts: {which}")
    kept = {name: tensor for name, tensor in tensors.items() if name not in unused}
    return replace(source, converted=replace(source.converted, tensors=kept))
