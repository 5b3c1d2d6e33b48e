"""Opening of the data in a task's settings: data folders, mixtures, classes, and the resolution of frames."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clipmill.manifests.divided_videos import names_of_splits, read_divided_videos
from clipmill.manifests.errors import UserError
from clipmill.manifests.plugins import import_object
from clipmill.manifests.store import read_videos
from clipmill.shards.columns import VIDEO
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.shards import KINDS, DataSettings, data_folder_error, kind_of, parse_mix
from clipmill.train.data.data_folder import DataFolder, open_data_folder
from clipmill.train.data.query import LATENT_PATCH, TARS_SPLIT
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.video_vit import VideoViTSize

if TYPE_CHECKING:
    from clipmill.train.data.classes import ClassList
    from clipmill.train.data.mixed_samples import MixedSamples

Opened = TypeVar("Opened")


def open_folder(settings: ClipSettings, *, reason: str, column: str | None = VIDEO) -> DataFolder:
    """Open the data folder of a task that needs a manifest.

    Args:
        reason: Reason why the task needs a manifest, for the error message.
        column: See `open_data_folder`.

    Raises:
        UserError: The data in the settings have no manifest, or the folder cannot be read.
    """
    if not kind_of(settings.folder).has_manifest:
        raise data_folder_error(settings.folder, f"but {reason}")
    return open_data_folder(settings.folder, cache=settings.cache, cache_size=settings.cache_size, column=column)


def open_labelled_folder(settings: ClipSettings, *, column: str | None = VIDEO) -> DataFolder:
    """Open the data folder of a task that needs labels; raise UserError as `open_folder` does."""
    return open_folder(settings, reason="labels are in the manifest of a data folder", column=column)


def open_mixed(open_one: Callable[[str], Opened], settings: DataSettings) -> "Opened | MixedSamples":
    """Open the data folders in the settings; return the samples of a single folder, or a mixture.

    Args:
        open_one: Function that opens the samples of one folder.

    Raises:
        UserError: `open_one` raised an error, whose hint then mentions the folder; or the samples cannot be mixed.
    """
    if len(settings.folders) == 1:
        return open_one(settings.folder)
    require_no_streams(settings)
    parts: list[Any] = []
    for folder in settings.folders:
        with tag_errors(folder):
            parts.append(open_one(folder))
    from clipmill.train.data.mixed_samples import MixedSamples

    return MixedSamples(parts, settings.folders, weights=None if settings.mix is None else parse_mix(settings.mix))


def require_no_streams(settings: DataSettings) -> None:
    """Raise a UserError if one of several sources is a stream, whose samples cannot be accessed by index."""
    for folder in settings.folders if len(settings.folders) > 1 else ():
        if not (kind := kind_of(folder, settings)).can_be_mixed:
            raise UserError(
                f"--shards names {folder}, and {kind.noun} cannot be mixed with other data",
                hint=f"name {' or '.join(other.noun for other in KINDS if other.can_be_mixed)}, or train only on the "
                f"{kind.noun}",
                flags=("--shards",),
            )


def read_classes_of(settings: DataSettings, *, label: str, splits: Collection[str] | None = None) -> "ClassList":
    """Return the classes of a label in all data of the settings.

    Args:
        splits: Splits of data folders; None for all.

    Raises:
        UserError: Some of the data lack the label, or there are fewer than two classes.
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
        folder_splits = (names_of_splits(read_videos(folder), read_divided_videos(folder)) for folder in folders)
        splits = set[str]().union(*folder_splits) or {TARS_SPLIT}
    return read_classes(*folders, label=label, splits=splits, also=names)


@contextmanager
def tag_errors(folder: str) -> Iterator[None]:
    """Add a data folder to the hint of a UserError that is raised in this context."""
    try:
        yield
    except UserError as error:
        error.add_hint(f"this is about {folder}")
        raise


def picture_size(samples: Any, settings: ClipSettings) -> tuple[VideoViTSize, int]:
    """Return the size of a task's video tower, and the side length of its input frames or latents."""
    size = size_of(settings.model, settings.towers, num_views=settings.num_views).video
    shape = samples.frame_shape
    if shape is None:
        return size, settings.size_px
    return replace(size, patch_px=LATENT_PATCH, num_channels=shape.channels), shape.height
