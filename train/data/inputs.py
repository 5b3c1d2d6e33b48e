"""The data of a task by its settings: data folders, how clips are made and loaded, and segments of latents."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_videos
from clipmill.shards.columns import LATENTS, VIDEO
from clipmill.train.config.clips import ClipSettings, LatentSettings
from clipmill.train.config.shards import DataSettings, names_tars, parse_mix
from clipmill.train.data.classes import ClassList, read_classes
from clipmill.train.data.clip_query import ClipQuery
from clipmill.train.data.decoding.clip import ClipShape, Views
from clipmill.train.data.decoding.pictures import SIMPLE_SHARE
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.images.query import ImageQuery, class_names_of_images, names_images
from clipmill.train.data.images.samples import TarImages
from clipmill.train.data.latents.loader import LatentLoader
from clipmill.train.data.latents.mixed import MixedLatents
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.latents.segments import FrameShape
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mixed_clips import MixedClips, MixedSets
from clipmill.train.data.remote import DataFolder, open_data_folder
from clipmill.train.distributed.world import World
from clipmill.train.models.video_vit import VideoViTSize

# A VAE scales a side down by 8, so that a patch of 2 covers as much of the frame as one of 16 pixels.
LATENT_PATCH = 2

Latents = TypeVar("Latents", bound=LatentLoader)
Samples = TypeVar("Samples")


def open_folder(settings: ClipSettings, *, reason: str, column: str | None = VIDEO) -> DataFolder:
    """Open the data folder of a task that cannot read tars, for `reason`.

    Args:
        column: see `open_data_folder`.

    Raises:
        UserError: the settings name tars, or the folder cannot be read.
    """
    if names_tars(settings.folder):
        raise UserError(f"{settings.folder} names tars, and {reason}", hint="name the data folder that prep made")
    return open_data_folder(settings.folder, cache=settings.cache, cache_size=settings.cache_size, column=column)


def open_labelled_folder(settings: ClipSettings, *, column: str | None = VIDEO) -> DataFolder:
    """Open the data folder of a task that needs labels; raises UserError like `open_folder`."""
    return open_folder(settings, reason="labels are in the manifest of a data folder", column=column)


Mixture = MixedClips | MixedLatents


def open_mixed(open_one: Callable[[str], Samples], settings: DataSettings) -> Samples | Mixture:
    """Open the data folders of the settings: the set of a single one, or the mixture of their sets.

    Args:
        open_one: opens the set of a folder.

    Raises:
        UserError: as of `open_one`, with the folder that it is about; or the sets cannot be mixed.
    """
    if len(settings.folders) == 1:
        return open_one(settings.folder)
    require_no_streams(settings)
    sets: list[Any] = []
    for folder in settings.folders:
        with naming(folder):
            sets.append(open_one(folder))
    weights = None if settings.mix is None else parse_mix(settings.mix)
    mixture = MixedLatents if isinstance(sets[0], LatentLoader) else MixedClips
    return mixture(sets, settings.folders, weights=weights)


def require_no_streams(settings: DataSettings) -> None:
    """Raise a UserError if one of several data folders is a stream of tars."""
    for folder in settings.folders if len(settings.folders) > 1 else ():
        if names_tars(folder) and not reads_images(settings, folder):
            raise UserError(
                f"--shards names {folder}, a stream of tars, which cannot be mixed with other data",
                hint="name data folders that prep made or tars of images, or train on the tars alone",
            )


def reads_images(settings: DataSettings, address: str | None = None) -> bool:
    """Whether the data are tars of images: all of it, or that of one address."""
    address = settings.folder if address is None else address
    return names_images(address, cache=settings.cache, cache_size=settings.cache_size)


def read_classes_of(settings: DataSettings, *, label: str, splits: Collection[str] | None = None) -> ClassList:
    """The classes of a label in all data of the settings.

    Args:
        splits: of data folders; None for all.

    Raises:
        UserError: some of the data have no such label, or there are fewer than two classes.
    """
    images = [one for one in settings.folders if reads_images(settings, one)]
    found: set[str] = set()
    for one in images:
        found |= class_names_of_images(one, label=label, cache=settings.cache, cache_size=settings.cache_size)
    folders = [
        open_data_folder(one, cache=settings.cache, cache_size=settings.cache_size, column=None).path
        for one in settings.folders
        if one not in images
    ]
    if splits is None:
        splits = {split for one in folders for split in read_videos(one)["split"].to_pylist()} or {TarImages.split}
    return read_classes(*folders, label=label, splits=splits, also=found)


def image_query(settings: ClipSettings, *, loading: LoaderSettings, views: Views | None = None) -> ImageQuery:
    """What the settings ask tars of images for; `views` are those of an evaluation.

    Raises:
        UserError: they select samples by what tars do not have.
    """
    if settings.selection is not None:
        raise UserError(
            f"{settings.folder} names tars, which have no manifest and no scores to select by",
            hint="leave out --where and --share, or name a data folder that prep made",
        )
    shape = clip_shape(settings, views=views or Views())
    return ImageQuery(settings.folder, shape, loading, cache=settings.cache, cache_size=settings.cache_size)


def first_of(samples: Any) -> Any:
    """A set of a single folder, which has the shape of these samples."""
    return samples.first if isinstance(samples, MixedSets) else samples


@contextmanager
def naming(folder: str) -> Iterator[None]:
    """Name one of several data folders in errors that do not."""
    try:
        yield
    except UserError as error:
        if folder in str(error):
            raise
        raise UserError(f"{folder}: {error}", hint=error.hint) from error


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


def clip_query(
    settings: ClipSettings, folder: DataFolder, *, split: str, loading: LoaderSettings, views: Views | None = None
) -> ClipQuery:
    """What the settings ask a data folder for; `views` are those of an evaluation."""
    return ClipQuery(
        folder.path,
        split=split,
        shape=clip_shape(settings, views=views or Views()),
        loading=loading,
        decode=settings.decode,
        tars=folder.tars,
        where=settings.selection,
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
    make: Callable[[SegmentQuery], Latents],
    settings: LatentSettings,
    *,
    split: str,
    world: World,
) -> Latents:
    """Open this rank's share of the segments of latents of a split.

    Args:
        make: makes a loader of the query, to which it may add.

    Raises:
        UserError: there are none, they are not on this machine, or they do not fit the settings.
    """
    if names_tars(settings.folder):
        raise UserError(
            f"--input latents cannot be read from {settings.folder}: latents need the index of their tars",
            hint="name the data folder that prep made",
        )
    folder = open_data_folder(settings.folder, cache=settings.cache, cache_size=settings.cache_size, column=LATENTS)
    loading = LoaderSettings(
        batch=world.share(settings.batch), seed=settings.seed, rank=world.rank, num_ranks=world.size
    )
    latents = make(
        SegmentQuery(
            folder.path,
            split=split,
            segment=settings.segment,
            loading=loading,
            max_segments=settings.max_segments if split == settings.split else None,
            where=settings.selection,
            tars=folder.tars,
        )
    )
    latents.samples.require_embeddings()
    shape, length = latents.frame_shape, latents.samples.segments.num_frames
    if settings.num_frames > length:
        raise UserError(
            f"--num-frames {settings.num_frames}: a segment of {latents.segment_s:g}s has {length} frames",
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
