"""What is asked of tars of images, and what can be known of them before they are opened as samples."""

from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.data.decoding.clip import ClipShape
from clipmill.train.data.images.index import LABEL, ImageTars, holds_images
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.node_cache import choose_folder
from clipmill.train.data.remote import local_copy, open_cache
from clipmill.train.data.streams.tars import expand


@dataclass(frozen=True)
class ImageQuery:
    """A question to tars of images.

    Attributes:
        pattern: of local or remote tars (`clipmill.train.data.streams.tars.expand`).
        shape: how images are cropped and resized; every image fills all frames of its clip.
        loading: batches, threads and this rank's share.
        cache, cache_size: folder for copies of remote tars, and the limit (`clipmill.train.data.remote.open_cache`).
    """

    pattern: str
    shape: ClipShape
    loading: LoaderSettings
    cache: Path | None = None
    cache_size: str | None = None


def open_tars(pattern: str, *, cache: Path | None, cache_size: str | None, label: str = LABEL) -> ImageTars:
    """Index tars; see `ImageQuery` and `ImageTars`. Raises UserError if one cannot be read or is compressed."""
    choose_folder(cache)
    tars = expand(pattern)
    return ImageTars(tars, open_cache(cache, size=cache_size) if any(map(is_remote, tars)) else None, label=label)


def names_images(shards: str, *, cache: Path | None, cache_size: str | None) -> bool:
    """Return True if tars have images, by the first sample of the first tar that has samples.

    Raises:
        UserError: a tar is missing or cannot be read.
    """
    for tar in expand(shards):
        try:
            are_images = holds_images(tar, local_copy(tar, cache=cache, size=cache_size))
        except OSError as error:
            raise UserError(f"{tar} cannot be read: {error}", hint="repair it, or leave it out") from error
        if are_images is not None:
            return are_images
    return False


def class_names_of_images(pattern: str, *, label: str, cache: Path | None, cache_size: str | None) -> set[str]:
    """The classes of images in tars; raises UserError if these cannot be read, or have no such label."""
    tars = open_tars(pattern, cache=cache, cache_size=cache_size, label=label)
    found = {name for one in tars.indexes for name in one.classes.unique().to_pylist() if name}
    if not found:
        raise UserError(
            f"the images of {pattern} have no label {label!r}",
            hint=f"labels of images in tars: {LABEL} is their cls, others are keys of their json",
        )
    return found
