"""Data of a task: `DataQuery` describes the samples that the task needs, and `open_samples` opens them.

All kinds of data are opened here: data folders, latents, tars, and mixtures of the data at several addresses.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from clipmill.manifests.divided_videos import read_divided_videos, split_names
from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import import_object
from clipmill.manifests.store import read_videos
from clipmill.shards.columns import VIDEO
from clipmill.train.config.clips import CaptionSettings, ClipSettings
from clipmill.train.config.shards import KINDS, Content, DataSettings, data_folder_error, kind_of, parse_mix
from clipmill.train.data.clip_frames import SIMPLE_FRACTION, ClipShape, Views
from clipmill.train.data.data_folder import DataFolder, open_data_folder
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.distributed.world import World
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.video_vit import VideoViTSize

if TYPE_CHECKING:
    import pyarrow as pa

    from clipmill.train.data.classes import ClassList
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.models.text import Tokenize

# A VAE reduces height and width by a factor of 8, so a patch of 2 x 2 latents covers as much of the frame as a patch of
# 16 x 16 pixels.
LATENT_PATCH = 2

TARS_SPLIT = "all"  # split name for tars, which have no splits

Opened = TypeVar("Opened")


@dataclass(frozen=True, kw_only=True)
class DataQuery:
    """Samples that a task needs from one data folder, or from tars.

    Attributes:
        settings: Settings of the task, with the address of this folder or these tars as --shards.
        content: Content of the samples: "captions" or "labels" in addition to frames, or only "frames".
        split: Split of the videos; ignored for tars, which have no splits.
        loading: Settings of the loader: batches, threads and this rank's share.
        views: Temporal and spatial views of each clip in an evaluation.
        is_rgb: True for RGB frames; False for YUV 4:2:0 frames.
        tokenize: Function that tokenizes captions; None to keep captions as text.
        has_stored_text: True to replace captions with the embeddings that `prep text` stored.
        captions: Weights of caption sources, and the minimum relevancy.
        each_caption: True to make a clip for each caption, even if several captions have the same span.
        table: Captions of an evaluation protocol; None for the captions of the manifest.
        classes: Class lists of the labels. Each sample has a class from at least one list.
        repeats: Number of samples per clip in an epoch.
        same_frames: True to show the same moments in all repeated samples of a clip.
        has_all_segments: True to use all segments of long videos, regardless of --max-segments.
    """

    settings: ClipSettings
    content: Content
    split: str
    loading: LoaderSettings
    views: Views = field(default_factory=Views)
    is_rgb: bool = False
    tokenize: "Tokenize | None" = None
    has_stored_text: bool = False
    captions: CaptionSettings = field(default_factory=CaptionSettings)
    each_caption: bool = False
    table: "pa.Table | None" = None
    classes: "Sequence[ClassList]" = ()
    repeats: int = 1
    same_frames: bool = False
    has_all_segments: bool = False

    @property
    def shape(self) -> ClipShape:
        """Rules for sampling, cropping and resizing the frames of clips."""
        return replace(clip_shape(self.settings, views=self.views), rgb=self.is_rgb)

    def open_folder(self, *, column: str) -> DataFolder:
        """Open the data folder in order to read a column; raise UserError if the folder cannot be read."""
        settings = self.settings
        return open_data_folder(settings.folder, cache=settings.cache, cache_size=settings.cache_size, column=column)


def open_samples(query: DataQuery) -> Any:
    """Open this rank's share of the samples that a task needs.

    Raises:
        UserError: There are no samples; the samples contradict the settings; this kind of data lacks the requested
            content; or the settings need a manifest, and this kind of data has none.
    """
    folder = query.settings.folder
    kind = kind_of(folder, query.settings)
    if query.content in kind.missing_reasons:
        raise data_folder_error(folder, f"but {kind.missing_reasons[query.content]}", kind=kind)
    if not kind.has_manifest and query.settings.selection is not None:
        raise UserError(
            f"{folder} names {kind.noun}, which have no manifest and no scores to select samples by",
            hint="omit --where and --share, or use a data folder that prep made",
        )
    if not kind.has_manifest and (query.has_stored_text or query.captions != CaptionSettings()):
        raise UserError(
            f"{folder} names {kind.noun}, whose samples have only one caption each",
            hint="omit --text-tower and --captions, or use a data folder that prep made",
        )
    if query.settings.views is not None and not kind.has_manifest:
        raise UserError(
            f"--views is {query.settings.views}, but {folder} names tars, whose samples do not belong to groups",
            hint="omit --views, or use a data folder that prep made",
            flags=("--views",),
        )
    return import_object(kind.openers[query.content])(query)


def clip_shape(settings: ClipSettings, *, views: Views) -> ClipShape:
    """Return the rules for sampling, cropping and resizing the frames of clips.

    Args:
        views: Temporal and spatial views of each clip in an evaluation.
    """
    return ClipShape(
        sampling=Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride),
        size_px=settings.size_px,
        crop=settings.crop,
        min_crop_area=settings.min_crop_area,
        simple_fraction=settings.size_px / settings.short_side_px if settings.short_side_px else SIMPLE_FRACTION,
        views=views,
    )


def loader_settings(settings: ClipSettings, world: World, *, device: torch.device) -> LoaderSettings:
    """Return the loader settings of this rank. `settings.batch` is the number of samples over all ranks."""
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


def open_folder(settings: ClipSettings, *, reason: str, column: str | None = VIDEO) -> DataFolder:
    """Open the data folder of a task that needs a manifest.

    Args:
        reason: Clause that explains why the task needs a manifest, for the error message.
        column: See `open_data_folder`.

    Raises:
        UserError: This kind of data has no manifest, or the folder cannot be read.
    """
    if not kind_of(settings.folder).has_manifest:
        raise data_folder_error(settings.folder, f"but {reason}")
    return open_data_folder(settings.folder, cache=settings.cache, cache_size=settings.cache_size, column=column)


def open_labelled_folder(settings: ClipSettings, *, column: str | None = VIDEO) -> DataFolder:
    """Open the data folder of a task that needs labels; raise UserError as `open_folder` does."""
    return open_folder(settings, reason="labels are in the manifest of a data folder", column=column)


def open_mixed(open_source: Callable[[str], Opened], settings: DataSettings) -> "Opened | MixedSamples":
    """Open the data at all addresses in the settings, as the samples of a single address or as a mixture.

    Args:
        open_source: Function that opens the samples at one address.

    Raises:
        UserError: `open_source` failed (with several addresses, the hint names the address); or the samples cannot be
            mixed.
    """
    if len(settings.folders) == 1:
        return open_source(settings.folder)
    require_no_streams(settings)
    parts: list[Any] = []
    for folder in settings.folders:
        try:
            parts.append(open_source(folder))
        except UserError as error:
            error.add_hint(f"the error concerns {folder}")
            raise
    from clipmill.train.data.mixed_samples import MixedSamples

    return MixedSamples(parts, settings.folders, weights=None if settings.mix is None else parse_mix(settings.mix))


def require_no_streams(settings: DataSettings) -> None:
    """Raise a UserError if a mixture contains a stream, whose samples cannot be accessed by index."""
    for folder in settings.folders if len(settings.folders) > 1 else ():
        if not (kind := kind_of(folder, settings)).can_be_mixed:
            raise UserError(
                f"--shards names {folder}, but {kind.noun} cannot be mixed with other data",
                hint=f"use {' or '.join(other.noun for other in KINDS if other.can_be_mixed)}, or train only on the "
                f"{kind.noun}",
                flags=("--shards",),
            )


def read_classes_of(settings: DataSettings, *, label: str, splits: Collection[str] | None = None) -> "ClassList":
    """Return the classes of a label, collected from the data at all addresses in the settings.

    Args:
        splits: Splits whose captions are searched in data folders; None for all splits.

    Raises:
        UserError: The data at an address lack the label, or there are fewer than two classes.
    """
    from clipmill.train.data.classes import read_classes

    names: set[str] = set()
    folders: list[Path] = []
    for address in settings.folders:
        kind = kind_of(address, settings)
        if kind.has_manifest:
            folder = open_data_folder(address, cache=settings.cache, cache_size=settings.cache_size, column=None)
            folders.append(folder.path)
        elif kind.class_names:
            read_names = import_object(kind.class_names)
            names |= read_names(address, label=label, cache=settings.cache, cache_size=settings.cache_size)
        else:
            raise data_folder_error(
                address, f"but {kind.missing_reasons.get('labels', 'they have no labels')}", kind=kind
            )
    if splits is None:
        folder_splits = (split_names(read_videos(folder), read_divided_videos(folder)) for folder in folders)
        splits = set[str]().union(*folder_splits) or {TARS_SPLIT}
    return read_classes(*folders, label=label, splits=splits, more_names=names)


def picture_size(samples: Any, settings: ClipSettings) -> tuple[VideoViTSize, int]:
    """Return the size of a task's video tower, and the side length of its input in pixels or latents."""
    size = size_of(settings.model, settings.towers, num_views=settings.num_views).video
    shape = samples.frame_shape
    if shape is None:
        return size, settings.size_px
    return replace(size, patch_px=LATENT_PATCH, num_channels=shape.channels), shape.height
