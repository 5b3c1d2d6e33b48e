"""Masked autoencoding of clips: what a video tower learns from videos alone (VideoMAE), as pixels or as latents.

Shape suffixes: B batch, C channels, T frames, H and W pixels, F frames of a segment of latents.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manifests.errors import UserError
from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.data.batch import Batch
from train.data.chance import uniform
from train.data.chunk_clips import ChunkClips
from train.data.chunk_set import videos_of_split
from train.data.decoding.clip import Views
from train.data.latents.loader import LatentLoader
from train.data.latents.records import FrameShape
from train.data.remote.address import is_remote
from train.data.remote.folder import open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.mae.masking import Masking
from train.mae.objective import MaskedReconstruction
from train.mae.settings import MaeSettings, check_mask
from train.models.attention import AttentionDoor
from train.models.cubes import CubeGrid
from train.models.dual_encoder import size_of
from train.models.masked_autoencoder import MaskedAutoencoder
from train.models.transformer import blocks_of, compile_blocks
from train.models.video_vit import VideoViTSize
from train.objective import Objective
from train.probe.in_loop import LoopProbe
from train.probe.settings import ProbeEvaluation
from train.tasks.clips import clip_shape, loader_settings
from train.tasks.latents import LATENT_PATCH, check_latents, size_on_latents, window
from train.weights.converted import IMAGENET_MEAN, IMAGENET_STD
from train.weights.loading import Loaded, copy_into, fit_to
from train.weights.sources import Say, Source

Samples = ChunkClips | LatentLoader


class MaeTask:
    """The task of `train mae`."""

    name = "mae"

    def __init__(self, settings: MaeSettings, *, door: AttentionDoor, device: torch.device) -> None:
        self._settings, self._door, self._device = settings, door, device
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
        if names_tars(settings.shards):
            raise UserError(
                f"{settings.shards} is a stream of tars, and train mae reads data folders",
                hint="name the data folder that prep made",
            )
        if settings.input == "latents":
            return self._latents(split, world)
        folder = open_data_folder(settings.shards, cache=settings.cache)
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
        if is_remote(settings.shards):
            raise UserError(
                f"--input latents cannot be read from {settings.shards}: latents are mapped into memory",
                hint="copy the data folder to this machine",
            )
        latents = LatentLoader(
            Path(settings.shards),
            split=split,
            segment=settings.segment,
            batch=world.share(settings.batch),
            seed=settings.seed,
            rank=world.rank,
            num_ranks=world.size,
            text=False,
        )
        check_latents(latents, num_frames=settings.num_frames, segment=settings.segment)
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
        settings = self._settings
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        std = (settings.init.pixel_std or IMAGENET_STD) if settings.input == "pixels" else None
        return MaskedReconstruction(inputs, self.masking(samples), size=self._size(samples), std=std)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of encoder and decoder."""
        return blocks_of(model)

    def masking(self, samples: Samples) -> Masking:
        """Draws the masks of clips as `samples` has them."""
        settings, size = self._settings, self._size(samples)
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
            latents_BTCHW = window(batch["latents"][rows], num_frames=settings.num_frames, within_B=within_B)
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

    def _size(self, samples: Samples) -> VideoViTSize:
        return encoder_size(self._settings, None if isinstance(samples, ChunkClips) else samples.frame_shape)

    def _autoencoder(self, samples: Samples) -> MaskedAutoencoder:
        settings = self._settings
        return MaskedAutoencoder(
            self._size(samples),
            decoder_depth=settings.decoder_depth,
            image_px=_side(settings, samples),
            num_frames=settings.num_frames,
            attend=self._door.attend,
            towers=settings.towers,
        )


def encoder_size(settings: MaeSettings, latents: FrameShape | None) -> VideoViTSize:
    """The size of the encoder, for pictures or for latents of a shape."""
    size = size_of(settings.model, settings.towers).video
    return size if latents is None else size_on_latents(size, latents)


def _side(settings: MaeSettings, samples: Samples) -> int:
    return settings.size_px if isinstance(samples, ChunkClips) else samples.frame_shape.height
