"""How the clips of a task look and how they are loaded, by its settings."""

import torch

from train.data.clips import Sampling
from train.data.decoding.clip import ClipShape, Views
from train.data.loader import LoaderSettings
from train.distributed.world import World
from train.settings import ClipSettings


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
