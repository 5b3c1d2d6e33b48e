"""The data of a task by its settings: data folders, how clips are made and loaded, and segments of latents."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from manifests.errors import UserError
from train.config.training import ClipSettings, is_remote
from train.data.decoding.clip import ClipShape, Views
from train.data.decoding.pictures import SIMPLE_SHARE
from train.data.frame_sampling import Sampling
from train.data.latents.loader import LatentLoader
from train.data.latents.segments import FrameShape
from train.data.loader import LoaderSettings
from train.data.remote import DataFolder, open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.models.video_vit import VideoViTSize

# A VAE scales a side down by 8, so that a patch of 2 covers as much of the frame as one of 16 pixels.
LATENT_PATCH = 2

Latents = TypeVar("Latents", bound=LatentLoader)


def open_folder(settings: ClipSettings, *, reason: str) -> DataFolder:
    """Open the data folder of a task that cannot read a stream of tars, for `reason`.

    Raises:
        UserError: the settings name tars, or the folder cannot be read.
    """
    if names_tars(settings.shards):
        raise UserError(
            f"{settings.shards} is a stream of tars, and {reason}", hint="name the data folder that prep made"
        )
    return open_data_folder(settings.shards, cache=settings.cache)


def open_labelled_folder(settings: ClipSettings) -> DataFolder:
    """Open the data folder of a task that needs labels; raises UserError like `open_folder`."""
    return open_folder(settings, reason="labels are in the manifest of a data folder")


def clip_shape(settings: ClipSettings, *, views: Views) -> ClipShape:
    """How clips are made; `views` are those of an evaluation."""
    return ClipShape(
        sampling=Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride),
        size_px=settings.size_px,
        crop=settings.crop,
        min_crop_area=settings.min_crop_area,
        simple_share=settings.size_px / settings.short_side_px if settings.short_side_px else SIMPLE_SHARE,
        views=views,
    )


def loader_settings(settings: ClipSettings, world: World, *, device: torch.device) -> LoaderSettings:
    """How this rank's share of the batches is loaded."""
    batch = world.share(settings.batch)
    return LoaderSettings(
        batch=batch,
        num_threads=settings.workers,
        num_ahead=batch * settings.batches_ahead,
        seed=settings.seed,
        group=settings.samples_per_chunk,
        rank=world.rank,
        num_ranks=world.size,
        pin=device.type == "cuda",
    )


def open_segments(
    make: Callable[..., Latents],
    settings: ClipSettings,
    *,
    segment: str,
    split: str,
    world: World,
    batch: int | None = None,
) -> Latents:
    """Open this rank's share of the segments of latents of a split.

    Args:
        make: `LatentLoader` or a subclass, with the arguments that only it takes.
        segment: length of a segment, as in `LatentLoader`.
        batch: samples in this rank's batch; by default its share of the settings'.

    Raises:
        UserError: there are none, they are not on this machine, or they do not fit the settings.
    """
    if is_remote(settings.shards) or names_tars(settings.shards):
        raise UserError(
            f"--input latents cannot be read from {settings.shards}: latents are mapped into memory",
            hint="copy the data folder to this machine",
        )
    latents = make(
        Path(settings.shards),
        split=split,
        segment=segment,
        batch=batch or world.share(settings.batch),
        seed=settings.seed,
        rank=world.rank,
        num_ranks=world.size,
    )
    shape, length = latents.frame_shape, latents.segment_frames
    if settings.num_frames > length:
        raise UserError(
            f"--num-frames {settings.num_frames}: a segment of {segment} has {length} frames",
            hint=f"use --num-frames {length} or fewer, or a longer --segment",
        )
    if shape.height != shape.width or shape.height % LATENT_PATCH:
        raise UserError(
            f"latents of {shape.height} x {shape.width} cannot be cut into squares of {LATENT_PATCH}",
            hint=f"make them with a --size that gives an even side: {latents.variant_name}",
        )
    return latents


def size_on_latents(size: VideoViTSize, shape: FrameShape) -> VideoViTSize:
    """The tower's size for latents of a shape."""
    return replace(size, patch_px=LATENT_PATCH, num_channels=shape.channels)
