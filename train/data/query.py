"""`DataQuery`: the samples that a task needs; `open_samples` opens them for any kind of data."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import import_object
from clipmill.train.config.clips import CaptionSettings, ClipSettings
from clipmill.train.config.shards import Content, data_folder_error, kind_of
from clipmill.train.data.clip_frames import SIMPLE_SHARE, ClipShape, Views
from clipmill.train.data.data_folder import DataFolder, open_data_folder
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.distributed.world import World

if TYPE_CHECKING:
    import pyarrow as pa

    from clipmill.train.data.classes import ClassList
    from clipmill.train.models.text import Tokenize

# A VAE reduces each side by a factor of 8, so a patch of 2 latents covers as much of the frame as a patch of 16 pixels.
LATENT_PATCH = 2

TARS_SPLIT = "all"  # tars have no splits


@dataclass(frozen=True, kw_only=True)
class DataQuery:
    """The samples that a task needs from one data folder, or from tars.

    Attributes:
        settings: Settings of the task, in which --shards is this folder.
        content: Content of samples in addition to frames: captions, labels, or nothing.
        split: Split of the videos. Tars have no splits.
        loading: Batches, threads and this rank's share.
        views: Temporal and spatial views of each clip in an evaluation.
        is_rgb: True to return RGB frames instead of YUV 4:2:0.
        tokenize: Tokenizer of captions; None for captions as text.
        has_stored_text: True to use the embeddings that prep text stored, instead of captions.
        captions: Caption sources and relevancy.
        each_caption: True to make a clip for each caption, even if several captions have the same span.
        table: Captions of an evaluation protocol, instead of the manifest's captions.
        classes: Class lists of the labels. Each sample has a class from at least one list.
        repeats: Number of samples per clip in an epoch.
        same_frames: True to let the repeated samples of a clip show the same moments.
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
        """Rules for sampling, cropping and resizing clips of pixels."""
        return replace(clip_shape(self.settings, views=self.views), rgb=self.is_rgb)

    def open_folder(self, *, column: str) -> DataFolder:
        """Open the data folder; raise UserError if it cannot be read."""
        settings = self.settings
        return open_data_folder(settings.folder, cache=settings.cache, cache_size=settings.cache_size, column=column)


def open_samples(query: DataQuery) -> Any:
    """Open this rank's part of the samples that a task needs.

    Raises:
        UserError: There are no samples; the samples contradict the settings; or this kind of data lacks the content, or
            the manifest that the settings need to select samples and captions.
    """
    folder = query.settings.folder
    kind = kind_of(folder, query.settings)
    if query.content in kind.missing_reasons:
        raise data_folder_error(folder, f"but {kind.missing_reasons[query.content]}", kind=kind)
    if not kind.has_manifest and query.settings.selection is not None:
        raise UserError(
            f"{folder} names {kind.noun}, which have no manifest and no scores to select by",
            hint="omit --where and --share, or name a data folder that prep made",
        )
    if not kind.has_manifest and (query.has_stored_text or query.captions != CaptionSettings()):
        raise UserError(
            f"{folder} names {kind.noun}, whose samples have one caption each",
            hint="omit --text-tower and --captions, or name a data folder that prep made",
        )
    if query.settings.views is not None and not kind.has_manifest:
        raise UserError(
            f"{folder} names tars, whose samples belong to no groups, and --views is {query.settings.views}",
            hint="omit it, or name a data folder that prep made",
            flags=("--views",),
        )
    return import_object(kind.openers[query.content])(query)


def clip_shape(settings: ClipSettings, *, views: Views) -> ClipShape:
    """Return the rules for sampling, cropping and resizing clips of pixels.

    Args:
        views: Temporal and spatial views of each clip in an evaluation.
    """
    return ClipShape(
        sampling=Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride),
        size_px=settings.size_px,
        crop=settings.crop,
        min_crop_area=settings.min_crop_area,
        simple_share=settings.size_px / settings.short_side_px if settings.short_side_px else SIMPLE_SHARE,
        views=views,
    )


def loader_settings(settings: ClipSettings, world: World, *, device: torch.device) -> LoaderSettings:
    """Return loader settings for this rank's share of the batches."""
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
