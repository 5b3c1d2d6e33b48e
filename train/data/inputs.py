"""Latents as tasks show them: their set, which frames of a segment make a clip, and which tower sees them.

Shape suffixes: B batch, F frames of a segment, C channels, H and W values of a latent, K parts of a segment.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from manifests.errors import UserError
from train.config.training import ClipSettings
from train.data.decoding.clip import ClipShape, Views
from train.data.frame_sampling import Sampling
from train.data.latents.loader import LatentLoader
from train.data.latents.records import FrameShape
from train.data.loader import LoaderSettings
from train.data.remote.files import is_remote
from train.data.remote.folder import DataFolder, open_data_folder
from train.data.streams.tars import names_tars
from train.device.transfer import sent
from train.distributed.world import World
from train.models.video_vit import VideoViTSize

# A VAE scales a side down by 8: a patch of 2 is then as much of the picture as one of 16 pixels.
LATENT_PATCH = 2


Latents = TypeVar("Latents", bound=LatentLoader)


class LatentSettings(Protocol):
    """Settings of a task that `--input latents` goes with."""

    @property
    def shards(self) -> str: ...

    @property
    def segment(self) -> str: ...

    @property
    def num_frames(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def seed(self) -> int: ...


def open_latents(
    make: Callable[..., Latents], settings: LatentSettings, *, split: str, world: World, batch: int | None = None
) -> Latents:
    """This rank's part of the segments of latents of a split.

    Args:
        make: `LatentLoader`, or a kind of it with what is its own.
        batch: samples at once; this rank's share of the settings' when left out.

    Raises:
        UserError: there are none, they lie elsewhere, or clips cannot be made of them.
    """
    if is_remote(settings.shards) or names_tars(settings.shards):
        raise UserError(
            f"--input latents cannot be read from {settings.shards}: latents are mapped into memory",
            hint="copy the data folder to this machine",
        )
    latents = make(
        Path(settings.shards),
        split=split,
        segment=settings.segment,
        batch=batch or world.share(settings.batch),
        seed=settings.seed,
        rank=world.rank,
        num_ranks=world.size,
    )
    _check(latents, num_frames=settings.num_frames, segment=settings.segment)
    return latents


def _check(latents: LatentLoader, *, num_frames: int, segment: str) -> None:
    shape, length = latents.frame_shape, latents.segment_frames
    if num_frames > length:
        raise UserError(
            f"--num-frames {num_frames}: a segment of {segment} has {length} frames",
            hint=f"use --num-frames {length} or fewer, or a longer --segment",
        )
    if shape.height != shape.width or shape.height % LATENT_PATCH:
        raise UserError(
            f"latents of {shape.height} x {shape.width} cannot be cut into squares of {LATENT_PATCH}",
            hint=f"make them with a --size that gives an even side: {latents.variant_name}",
        )


def size_on_latents(size: VideoViTSize, shape: FrameShape) -> VideoViTSize:
    """The tower for latents of a shape."""
    return replace(size, patch_px=LATENT_PATCH, num_channels=shape.channels)


def window(latents_BFCHW: torch.Tensor, *, num_frames: int, within_B: NDArray[np.float64] | None) -> torch.Tensor:
    """`num_frames` frames in a row of each segment: where `within_B` says (from 0 to below 1), else in the middle."""
    room = latents_BFCHW.shape[1] - num_frames
    if within_B is None:
        return latents_BFCHW[:, room // 2 : room // 2 + num_frames]
    begin_B = sent((within_B * (room + 1)).astype(np.int64), latents_BFCHW.device)
    frames_BT = begin_B[:, None] + torch.arange(num_frames, device=latents_BFCHW.device)
    return latents_BFCHW[torch.arange(len(frames_BT), device=latents_BFCHW.device)[:, None], frames_BT]


def spread(latents_BFCHW: torch.Tensor, *, num_frames: int, within_BK: NDArray[np.float64] | None) -> torch.Tensor:
    """One frame from each of `num_frames` equal parts of a segment: where `within_BK` says, else the middle one.

    Args:
        within_BK: for each segment and part, how far into the part, from 0 to 1.
    """
    size, length = latents_BFCHW.shape[:2]
    if within_BK is None:
        within_BK = np.full((size, num_frames), 0.5)
    chosen_BK = ((np.arange(num_frames) + within_BK) * length / num_frames).astype(np.int64).clip(max=length - 1)
    segments_B1 = torch.arange(size, device=latents_BFCHW.device)[:, None]
    return latents_BFCHW[segments_B1, sent(chosen_BK, latents_BFCHW.device)]


# Where the clips of a task are, how they look and how they are loaded, by its settings.


def open_folder(settings: ClipSettings, *, reason: str) -> DataFolder:
    """The data folder of a task that tars will not do for, by `reason`.

    Raises:
        UserError: the settings name tars, or the folder cannot be read.
    """
    if names_tars(settings.shards):
        raise UserError(
            f"{settings.shards} is a stream of tars, and {reason}", hint="name the data folder that prep made"
        )
    return open_data_folder(settings.shards, cache=settings.cache)


def open_labelled_folder(settings: ClipSettings) -> DataFolder:
    """The data folder of a task that is about labels; UserError as `open_folder`."""
    return open_folder(settings, reason="labels are in the manifest of a data folder")


def clip_shape(settings: ClipSettings, *, views: Views) -> ClipShape:
    """What a clip is made of; `views` are those of an evaluation."""
    return ClipShape(
        sampling=Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride),
        size_px=settings.size_px,
        crop=settings.crop,
        min_crop_area=settings.min_crop_area,
        views=views,
    )


def loader_settings(settings: ClipSettings, world: World, *, device: torch.device) -> LoaderSettings:
    """How this rank's part of the batches is loaded."""
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
