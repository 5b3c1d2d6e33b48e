"""Where the clips of a task are, how they look and how they are loaded, by its settings."""

import torch

from manifests.errors import UserError
from train.config.training import ClipSettings
from train.data.decoding.clip import ClipShape, Views
from train.data.frame_sampling import Sampling
from train.data.loader import LoaderSettings
from train.data.remote.folder import DataFolder, open_data_folder
from train.data.streams.data_streams_tars import names_tars
from train.distributed.world import World


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
