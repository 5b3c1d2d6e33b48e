"""`load_model`: trained weights as an object that embeds clips and captions.

    model = load_model("runs/first")
    video_BE = model.encode_video(frames)               # uint8 RGB [B, T, H, W, 3]
    text_BE = model.encode_text(["a dog catches a frisbee"])
    similarity_BB = video_BE @ text_BE.T

Shape suffixes: B clips or texts, C channels, T frames, H and W pixels, N tokens, D width, E embedding width.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import interpolate

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.train.config.clips import ClipSettings, OpenOptions, Overrides
from clipmill.train.config.training import Device
from clipmill.train.data.arguments import (
    name_arguments_in_errors,
    require_choice,
    require_device,
    require_whole_numbers,
)
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.frame_sampling import SamplingRule
from clipmill.train.device.transfer import send
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.features import tower_of
from clipmill.train.evaluation.identity import identity_of, normalisation_of
from clipmill.train.evaluation.opening import open_weights_as
from clipmill.train.evaluation.runner import OpenedRun
from clipmill.train.models.captioner import VideoTower
from clipmill.train.models.dual_encoder import DualEncoder
from clipmill.train.registry import tasks_where
from clipmill.train.weights.architecture import Logits

Clips = Batch | torch.Tensor | NDArray[np.uint8] | NDArray[np.float32]
_RGB, _CLIP_DIMS = 3, 5
_TEXTS_AT_ONCE = 256


class LoadedModel:
    """Model in evaluation mode on a device, returned by `load_model`.

    Attributes:
        opened: Opened weights, with their settings and task.
        model: Network of the task.
        remarks: Messages about the weights, such as which temporal and positional embeddings were interpolated.
    """

    def __init__(self, opened: OpenedRun, model: nn.Module, *, remarks: Sequence[str] = ()) -> None:
        self.opened, self.model, self.remarks = opened, model, tuple(remarks)

    def samples(self, split: str, **options: Any) -> Any:
        """Open the samples of a split. For a run's own data, the column variants used in training are read.

        Args:
            options: Additional arguments for the task's `samples` method.
        """
        from clipmill.train.run.variants import reading_variants_of_run

        opened = self.opened
        with reading_variants_of_run(opened.title, opened.shards, say=lambda line: sys.stderr.write(f"{line}\n")):
            return opened.task.samples(split, World(), **options)

    @property
    def settings(self) -> ClipSettings:
        """Effective settings: number, sampling and size of the frames, normalisation, towers."""
        return cast(ClipSettings, self.opened.settings)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.opened.trained.device

    @property
    def has_text(self) -> bool:
        """True if texts can be encoded."""
        return isinstance(self.model, DualEncoder) and self.model.text is not None

    @property
    def logit_scale(self) -> float | None:
        """Factor for cosines, 1 / temperature; None if the weights do not contain a temperature."""
        log_scale = self._logits.log_scale
        return None if log_scale is None else math.exp(log_scale)

    @property
    def logit_bias(self) -> float | None:
        """Bias that SigLIP adds to the logits; None if the model has no bias."""
        return self._logits.bias

    @cached_property
    def _logits(self) -> Logits:
        return self.opened.logits()

    def __repr__(self) -> str:
        count = f"{sum(parameter.numel() for parameter in self.model.parameters()):,} parameters on {self.device}"
        return f"<LoadedModel of train {self.opened.spec.name}, {count}: {self.description}>"

    @property
    def description(self) -> str:
        """Source, step and precision of the weights, and number, sampling and size of the frames, as text."""
        trained, settings = self.opened.trained, self.settings
        step = "" if trained.step is None else f" (step {trained.step})"
        clip = f"T = {count_noun(settings.num_frames, 'frame')}, {settings.sampling}, {settings.size_px} px"
        return f"{self.opened.title}{step}: {trained.weights}; {clip}"

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the tensors and settings that determine the outputs. A run and its exports have the same hash.

        The hash does not depend on file names, nor on device and precision, which affect only rounding.
        """
        return identity_of(self.model, self.settings, task=self.opened.spec.name)

    @torch.no_grad()
    def encode_video(self, clips: Clips, *, tokens: bool = False) -> torch.Tensor:
        """Embed clips.

        Args:
            clips: Batch from the loader; uint8 RGB frames [B, T, H, W, 3], whose centre square is resized to
                `settings.size_px` if necessary; or float clips [B, C, T, H, W], normalised for the model. A model with
                several views takes [B, V, ...].
            tokens: True to return all tokens of the video tower, after its last norm. The class token, if there is one,
                comes first.

        Returns:
            float32 tensor on the model's device: tokens [B, N, D] if `tokens` is True. Otherwise, dual encoders return
            unit-length embeddings [B, E], and other models return the pooled features [B, D] that probes use.

        Raises:
            UserError: The shape of the clips does not fit the model.
        """
        with self.opened.trained.precision.autocast():
            clips_BCTHW = self._clips(clips)
            if not len(clips_BCTHW):  # the towers need at least one clip to determine the output shape
                return self._encode_clips(clips_BCTHW.new_zeros(1, *clips_BCTHW.shape[1:]), tokens=tokens)[:0]
            return self._encode_clips(clips_BCTHW, tokens=tokens)

    def _encode_clips(self, clips_BCTHW: torch.Tensor, *, tokens: bool) -> torch.Tensor:
        if tokens:
            return cast(VideoTower, self.model.video).tokens(clips_BCTHW).float()
        if isinstance(self.model, DualEncoder):
            return self.model.embed_video(clips_BCTHW).float()
        return tower_of(self.model).features(clips_BCTHW).float()

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> torch.Tensor:
        """Embed texts as unit-length vectors, float32 [B, E] on the model's device.

        Raises:
            UserError: The model has no text tower, or the values are not strings.
        """
        if not isinstance(self.model, DualEncoder) or self.model.text is None:
            raise UserError(
                f"{self.opened.title} has no text tower: it was trained with train {self.opened.spec.name}",
                hint="use the weights of a dual encoder that was trained with a text tower",
            )
        if isinstance(texts, str):
            raise UserError(f"encode_text takes a list of strings, not the single string {texts!r}", hint=_TEXTS_HINT)
        try:
            strings: list[Any] = list(texts)
        except TypeError:
            message = f"encode_text takes a list of strings, not {quote_value(texts)}"
            raise UserError(message, hint=_TEXTS_HINT) from None
        for text in strings:
            if not isinstance(text, str):
                message = f"encode_text takes strings, but the list contains {quote_value(text)}"
                raise UserError(message, hint=_TEXTS_HINT)
        tokenize = self.model.tokenize
        parts = [torch.empty(0, self.opened.shape.size.embedding_width, device=self.device)]
        with self.opened.trained.precision.autocast():
            for start in range(0, len(strings), _TEXTS_AT_ONCE):
                ids = np.stack([tokenize(text) for text in strings[start : start + _TEXTS_AT_ONCE]])
                parts.append(self.model.embed_text(send(ids, self.device)).float())
        return torch.cat(parts)

    def _clips(self, clips: Clips) -> torch.Tensor:
        """Return normalised clips [B, C, T, H, W] on the device."""
        if isinstance(clips, Mapping):
            if "video" in clips and clips["video"].ndim == _CLIP_DIMS + len(self._views):
                return self._normalise_rgb(clips["video"])
            features = self.opened.spec.features
            assert features is not None  # load_model opens only tasks with features
            return features.inputs(self.opened.task)(to_device(clips, self.device))
        try:
            array = torch.as_tensor(clips)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"encode_video takes clips, not {quote_value(clips)}", hint=_CLIPS_HINT) from None
        if array.dtype == torch.uint8:
            return self._normalise_rgb(array)
        shape, count = self.opened.shape, self.settings.num_frames
        expected_shape = (*self._views, shape.size.video.num_channels, count, shape.image_px, shape.image_px)
        if tuple(array.shape[1:]) != expected_shape:
            raise UserError(
                f"clips have shape {tuple(array.shape)}, "
                f"but the model takes [B, {', '.join(map(str, expected_shape))}]",
                hint=_CLIPS_HINT,
            )
        return send(array, self.device).float()

    @property
    def _views(self) -> tuple[int, ...]:
        """Dimension of the views in the shape of a clip, as a tuple; empty for a model with a single view."""
        return (self.settings.num_views,) if self.settings.num_views > 1 else ()

    def _normalise_rgb(self, frames: torch.Tensor) -> torch.Tensor:
        """Convert RGB frames to normalised clips. Centre squares of a different size are resized."""
        if not self._views:
            return self._normalise_view(frames)
        if frames.ndim != 1 + _CLIP_DIMS or tuple(frames.shape[1:2]) != self._views:
            names = ", ".join(self.settings.view_names)
            raise UserError(
                f"frames of shape {tuple(frames.shape)} are not [B, {self._views[0]}, T, H, W, 3]",
                hint=f"pass the frames of the views {names}",
            )
        return self._normalise_view(frames.flatten(0, 1)).unflatten(0, (-1, *self._views))

    def _normalise_view(self, frames_BTHWC: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        if settings.reads_latents:
            raise UserError(f"{self.opened.title} takes latents, not RGB frames", hint="encode the frames first")
        if frames_BTHWC.ndim != _CLIP_DIMS or frames_BTHWC.shape[-1] != _RGB:
            raise UserError(f"frames of shape {tuple(frames_BTHWC.shape)} are not [B, T, H, W, 3]", hint=_CLIPS_HINT)
        if frames_BTHWC.shape[1] != settings.num_frames:
            raise UserError(
                f"clips have {count_noun(frames_BTHWC.shape[1], 'frame')}, but the model takes {settings.num_frames}",
                hint=f"select {settings.num_frames} frames, or pass num_frames to load_model",
            )
        frames_BTCHW = send(frames_BTHWC, self.device).permute(0, 1, 4, 2, 3).float() / 255
        height, width = frames_BTCHW.shape[-2:]
        side, size_px = min(height, width), settings.size_px
        top, left = (height - side) // 2, (width - side) // 2
        frames_BTCHW = frames_BTCHW[..., top : top + side, left : left + side]
        if side != size_px:
            flat = interpolate(frames_BTCHW.flatten(0, 1), size=(size_px, size_px), mode="bilinear", antialias=True)
            frames_BTCHW = flat.unflatten(0, frames_BTHWC.shape[:2])
        mean, std = (
            torch.tensor(values, device=self.device)[:, None, None] for values in normalisation_of(self.settings)
        )
        return ((frames_BTCHW - mean) / std).transpose(1, 2)


_CLIPS_HINT = "pass uint8 RGB frames [B, T, H, W, 3], normalised clips [B, C, T, H, W], or a batch from the loader"
_TEXTS_HINT = 'pass a list of strings, such as ["a dog catches a frisbee"]'


@name_arguments_in_errors
def load_model(
    weights: str | Path,
    *,
    num_frames: int | None = None,
    sampling: SamplingRule | None = None,
    size_px: int | None = None,
    device: Device = "auto",
    shards: str | None = None,
) -> LoadedModel:
    """Open trained weights as a model in evaluation mode.

    Args:
        weights: Run, exported folder, weights file of AVION, LaViLa or VideoMAE, NAME:TAG of open_clip, or hf:NAME on
            the Hugging Face Hub.
        num_frames: Number of frames per clip. Temporal embeddings are interpolated to this number. Default: the value
            used in training.
        sampling: Frame sampling of the loader. Default: the sampling used in training.
        size_px: Frame size in pixels. Positional embeddings are interpolated to this size. Default: the size used in
            training.
        device: Device of the model; "auto" selects the GPU if there is one.
        shards: Data folder for `samples`. Default: the run's data, with the column variants used in training.

    Raises:
        UserError: The weights or the device do not exist, or the weights are damaged or do not support the requested
            clips.
    """
    numbers = {"num_frames": num_frames, "size_px": size_px}
    require_whole_numbers(**{name: value for name, value in numbers.items() if value is not None})
    if sampling is not None:
        require_choice("sampling", sampling, SamplingRule)
    if device != "auto":
        require_device(device)
    remarks: list[str] = []
    overrides = Overrides(num_frames=num_frames, sampling=sampling, size_px=size_px)
    options = OpenOptions(shards=shards, device=device, overrides=overrides, is_without_data=True)
    opened = open_weights_as(tasks_where(lambda spec: spec.features is not None), weights, options, say=remarks.append)
    model = opened.trained.fill(opened.task.build_model(None))
    return LoadedModel(opened, model, remarks=remarks)
