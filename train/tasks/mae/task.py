"""Masked autoencoding of clips: what a video tower learns from videos alone (VideoMAE), as pixels or as latents.

Shape suffixes: B batch, C channels, T frames, H and W pixels, F frames of a segment of latents.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.config.evaluation import ProbeEvaluation
from train.data.batch import Batch
from train.data.chunks import videos_of_split
from train.data.decoding.clip import Views
from train.data.frame_sampling import window_frames
from train.data.inputs import (
    LATENT_PATCH,
    clip_shape,
    loader_settings,
    open_folder,
    open_latents,
    size_on_latents,
)
from train.data.latents.loader import LatentLoader
from train.data.remote.folder import open_data_folder
from train.device.random import uniform
from train.distributed.world import World
from train.evaluation.probe.in_loop import LoopProbe
from train.losses.objective import Objective
from train.models.attention import AttentionBackend
from train.models.dual_encoder import size_of
from train.models.masked_autoencoder import MaskedAutoencoder
from train.models.transformer import blocks_of, compile_blocks
from train.models.video_vit import CubeGrid, VideoViTSize
from train.tasks.mae.masks import Masking
from train.tasks.mae.objective import MaskedReconstruction
from train.tasks.mae.samples import ChunkClips
from train.tasks.mae.settings import MaeSettings, check_mask
from train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD
from train.weights.loading import Loaded, copy_into, fit_to
from train.weights.sources import Say, Source

Samples = ChunkClips | LatentLoader


class MaeTask:
    """The task of `train mae`."""

    name = "mae"

    def __init__(self, settings: MaeSettings, *, attention: AttentionBackend, device: torch.device) -> None:
        self._settings, self._attention, self._device = settings, attention, device
        self._start: Loaded | None = None
        self._probe: LoopProbe | None = None
        self.columns: tuple[str, ...] = ("latents",) if settings.input == "latents" else ("video",)

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def files(self) -> dict[str, bytes]:
        """None."""
        return {}

    def training_set(self, world: World) -> Samples:
        """This rank's part of the chunks, or of the segments of latents, of the split that the settings name.

        Raises:
            UserError: there are none, they cannot be cut and masked as the settings say, or the data has no such split
                to evaluate on.
        """
        settings = self._settings
        samples = self.samples(settings.split, world, per_chunk=settings.samples_per_chunk)
        if settings.evaluate.split != ProbeEvaluation.split:
            # The run looks at it when all is done. The default may be missing: then it looks at what it trained on.
            videos_of_split(open_data_folder(settings.shards, cache=settings.cache).path, settings.evaluate.split)
        if settings.evaluate.every:
            # Made now, so that a mistake in its settings ends the run before it begins.
            self._probe = LoopProbe(settings, settings.evaluate, inputs=self.inputs, world=world, device=self._device)
        return samples

    def samples(self, split: str, world: World, *, per_chunk: int = 1) -> Samples:
        """This rank's part of the samples of any split.

        Args:
            per_chunk: samples of each chunk.

        Raises:
            UserError: there are none, or they do not fit the settings.
        """
        settings = self._settings
        if settings.input == "latents":
            return self._latents(split, world)
        folder = open_folder(settings, reason="train mae reads data folders")
        return ChunkClips(
            folder.path,
            split=split,
            shape=clip_shape(settings, views=Views()),
            loading=replace(loader_settings(settings, world, device=self._device), group=per_chunk),
            same_frames=settings.repeat == "masks",
            decode=settings.decode,
            tars=folder.tars,
        )

    def _latents(self, split: str, world: World) -> LatentLoader:
        settings = self._settings
        latents = open_latents(
            partial(LatentLoader, text=False), settings, segment=settings.segment, split=split, world=world
        )
        check_mask(settings.mask_ratio, num_places=(latents.frame_shape.height // LATENT_PATCH) ** 2)
        return latents

    def start_from(self, source: Source, samples: Samples, *, say: Say) -> Loaded:
        """Has `build_model` give models these weights, once they fit.

        Raises:
            UserError: they do not, and nothing explains why.
        """
        with torch.device("meta"):
            model = self._autoencoder(samples)
        self._start = fit_to(model, source, allow=self._settings.init.allow, say=say)
        return self._start

    def build_model(self, samples: Samples) -> MaskedAutoencoder:
        """Encoder and decoder, for clips as `samples` has them."""
        model = self._autoencoder(samples)
        if self._start is not None:
            copy_into(model, self._start)
        if self._settings.compile:
            compile_blocks(model)
        return model

    def build_objective(self, samples: Samples, world: World) -> Objective:
        """The error of what is reconstructed."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        return MaskedReconstruction(inputs, self.masking(samples), size=self.size(samples), std=self.std)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of encoder and decoder."""
        return blocks_of(model)

    @property
    def std(self) -> Sequence[float] | None:
        """By which the clips' channels are divided; None where they are not."""
        return (self._settings.init.pixel_std or IMAGENET_STD) if self._settings.input == "pixels" else None

    def size(self, samples: Samples) -> VideoViTSize:
        """The size of the encoder, for clips as `samples` has them."""
        size = size_of(self._settings.model, self._settings.towers).video
        return size if isinstance(samples, ChunkClips) else size_on_latents(size, samples.frame_shape)

    def masking(self, samples: Samples) -> Masking:
        """Draws the masks of clips as `samples` has them."""
        settings, size = self._settings, self.size(samples)
        side = _side(settings, samples) // size.patch_px
        return Masking(settings, CubeGrid(settings.num_frames // size.cube_frames, side, side))

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of some rows of a batch, as the model takes them."""
        settings, init = self._settings, self._settings.init
        positions = batch["position"][rows].numpy()
        if batch["input"] == "latents":
            within_B = None
            if is_training:
                within_B = uniform(positions, 1, seed=settings.seed, purpose="window")[:, 0]
            latents_BTCHW = window_frames(batch["latents"][rows], num_frames=settings.num_frames, offset_B=within_B)
            return latents_BTCHW.float().transpose(1, 2)
        return to_model_input(
            batch["video"][rows],
            batch["colour"][rows],
            size_px=settings.size_px,
            mean=init.pixel_mean or IMAGENET_MEAN,
            std=init.pixel_std or IMAGENET_STD,
            draw=draw(positions, settings.augment, seed=settings.seed) if is_training else None,
        )

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Numbers of the probes that the settings name, as `<split>/<name>`."""
        return {} if self._probe is None else self._probe(model, world)

    def _autoencoder(self, samples: Samples) -> MaskedAutoencoder:
        settings = self._settings
        return MaskedAutoencoder(
            self.size(samples),
            decoder_depth=settings.decoder_depth,
            image_px=_side(settings, samples),
            num_frames=settings.num_frames,
            attend=self._attention.attend,
            towers=settings.towers,
        )


def _side(settings: MaeSettings, samples: Samples) -> int:
    return settings.size_px if isinstance(samples, ChunkClips) else samples.frame_shape.height
