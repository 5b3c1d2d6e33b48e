"""Index of image tars: the location, caption and class of each image, from one pass over each tar.

The tars have img2dataset's layout: `jpg`, `png` or `webp`, with `txt` or `json`, and `cls` for classes. The first image
or video in the tars decides how the tars are read (`names_images`): tars with images are indexed here, and tars with
videos are read as a stream.

The pass skips the contents of images. A large index is stored in the cache folder (clipmill.train.data.node_cache)
under a hash of the tar's path, size and modification time, so that each machine makes the index only once. A remote
tar is downloaded into the cache for indexing, within the cache's size limit; if the copy is evicted later, images are
read from the remote tar by byte range. A sample without an image or a caption is omitted, counted and reported. A video
among the images is an error.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.manifests.storage.cache import ObjectCache
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import open_objects
from clipmill.shards.tars import LocalTars
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.node_cache import choose_folder, open_shared
from clipmill.train.data.outcomes import OmittedItems
from clipmill.train.data.remote import copy_name, hold_copy, local_copy, open_cache
from clipmill.train.data.tar_samples import (
    MAX_TEXT_BYTES,
    VIDEO_EXTENSIONS,
    TarSample,
    UnreadableItem,
    caption_of,
    description_of,
    expand,
    samples_of,
)
from clipmill.train.data.workers import StuckResult, map_in_order

# If a sample has several images, the first extension in this order is used, as in open_clip.
EXTENSIONS = ("jpg", "png", "jpeg", "webp")
# Label that is stored in a separate member, and this member's extension. Other labels are keys of the json.
LABEL, _CLASS = "class", "cls"
MAX_IMAGE_BYTES = 1 << 28  # maximum size of an image file
_LIMITS = dict.fromkeys(("txt", "json", _CLASS), MAX_TEXT_BYTES)
_BYTES_PER_ROW = 512  # size of a tar header; every sample has at least one header
_NUM_THREADS = 4  # number of tars that are indexed at the same time
_INDEX_TIMEOUT_S = 86400.0


@dataclass(frozen=True)
class TarIndex:
    """Images of a tar, in the order of the tar. R images.

    Attributes:
        keys: Key of each sample.
        captions, classes: Caption and class of each sample; '' if missing.
        offset, size: Offset and size of each image in the tar, bytes, int64 [R].
        left_out: Omitted samples, by reason (`OmittedItems.as_list`).
        first_video: Key of the first sample that has a video; '' if there is none.
        damage: Reason why the tar cannot be read to its end; '' if it is intact.
        order_sha256: SHA-256 hash of keys and sizes.
        content_sha256: SHA-256 hash of captions and classes.
    """

    keys: pa.StringArray
    captions: pa.StringArray
    classes: pa.StringArray
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    left_out: list[tuple[str, int, str]]
    first_video: str
    damage: str
    order_sha256: str
    content_sha256: str

    def __len__(self) -> int:
        return len(self.offset)


class ImageTars:
    """Local or remote image tars. The constructor indexes the tars. Reading is thread-safe.

    Args:
        tars: Paths or URLs of the tars.
        cache: Cache for copies of remote tars; None if all tars are local.
        label: Label whose classes are indexed.

    Attributes:
        indexes: Index of each tar.
        offset, size: Offset and size of the images of all tars, bytes, int64.

    Raises:
        UserError: A tar cannot be read, or is compressed.
    """

    def __init__(self, tars: Sequence[str], cache: ObjectCache | None, *, label: str = LABEL) -> None:
        self.tars, self._cache, self._label, self._local = tars, cache, label, LocalTars()
        self._copies: dict[str, str] = {}
        self.indexes: list[TarIndex] = []
        with Activity(f"indexing the images in {count_noun(len(tars), 'tar')}") as activity:
            add = activity.adder(len(tars), unit="tar")
            results = map_in_order(
                self._index, tars, num_threads=_NUM_THREADS, num_ahead=2 * _NUM_THREADS, stuck_after_s=_INDEX_TIMEOUT_S
            )
            for tar, index in results:
                if isinstance(index, StuckResult):
                    raise UserError(f"{tar} cannot be indexed: {index}", hint="check that its storage responds")
                self.indexes.append(index)
                add(1)

        # Index of the first image in each tar, followed by the number of images.
        self._first_images: NDArray[np.int64] = np.cumsum([0, *map(len, self.indexes)])
        self.offset: NDArray[np.int64] = np.concatenate([index.offset for index in self.indexes])
        self.size: NDArray[np.int64] = np.concatenate([index.size for index in self.indexes])
        self._keys = pa.chunked_array([index.keys for index in self.indexes])

    @property
    def num_images(self) -> int:
        """Number of images in all tars."""
        return len(self.offset)

    def name(self, tar: int) -> str:
        """Return the file name of a tar."""
        return self.tars[tar].rpartition("/")[2]

    def tar_of(self, image: int) -> int:
        """Return the index of the tar that contains an image."""
        return int(np.searchsorted(self._first_images, image, side="right")) - 1

    def key(self, image: int) -> str:
        """Return the file name of an image's tar, followed by the image's key in the tar."""
        return f"{self.name(self.tar_of(image))}/{self._keys[image].as_py()}"

    def read(self, tar: int, offset: int, size: int) -> bytes:
        """Read `size` bytes of a tar; raise OSError or DamagedTar if they cannot be read."""
        address = self.tars[tar]
        if self._cache is None or not is_remote(address):
            return self._local.read(Path(address), offset, size)
        if (copy := self._cache.find(self._copies[address])) is not None:
            with copy:
                return os.pread(copy.descriptor, size, offset)
        folder, _, key = address.rpartition("/")
        return open_objects(folder).read_range(key, offset, size)

    def _index(self, tar: str) -> TarIndex:
        try:
            if is_remote(tar):
                version, size_bytes = copy_name(tar)
                self._copies[tar] = version
            else:
                state = Path(tar).stat()
                version, size_bytes = f"{Path(tar).resolve()} {state.st_mtime_ns}", state.st_size

            def make() -> TarIndex:
                if self._cache is None or not is_remote(tar):
                    return index_tar(tar, Path(tar), label=self._label)
                with hold_copy(tar, self._cache) as copy:
                    return index_tar(tar, copy.path, label=self._label)

            return open_shared(
                make,
                depends_on=("images", self._label, version, size_bytes),
                num_rows=size_bytes // _BYTES_PER_ROW,
                types=(TarIndex,),
                prefix="images",
            )
        except OSError as error:
            raise UserError(f"{tar} cannot be read: {error}", hint="repair or omit the tar") from error


def starts_with_image(tar: str, path: Path) -> bool | None:
    """Return True if the first image or video in a tar is an image; None if the tar has neither images nor videos."""
    for sample in samples_of(tar, path, limits={}):
        if isinstance(sample, TarSample):
            if not sample.locations.keys().isdisjoint(VIDEO_EXTENSIONS):
                return False
            if not sample.locations.keys().isdisjoint(EXTENSIONS):
                return True
    return None


def index_tar(tar: str, path: Path, *, label: str = LABEL) -> TarIndex:
    """Index the tar at `path`.

    Args:
        tar: Name of the tar for messages.
        label: Label whose classes are indexed.

    Raises:
        UserError: The tar is compressed.
        OSError: The tar cannot be opened or read.
    """
    keys: list[str] = []
    captions: list[str] = []
    classes: list[str] = []
    locations: list[tuple[int, int]] = []
    left_out = OmittedItems()
    first_video, damage = "", ""
    for sample in samples_of(tar, path, limits=_LIMITS):
        if isinstance(sample, UnreadableItem):
            if sample.key == tar:
                damage = sample.detail
            else:
                left_out.add("unreadable", f"{sample.key}, {sample.detail}")
            continue
        extension = next((name for name in EXTENSIONS if name in sample.locations), None)
        if not sample.locations.keys().isdisjoint(VIDEO_EXTENSIONS):
            first_video = first_video or sample.key
        elif extension is None:
            left_out.add("without an image", sample.key)
        elif (location := sample.locations[extension])[0] is None:
            raise UserError(
                f"{tar} is compressed, but images are read in random order", hint="decompress it with gzip -d or xz -d"
            )
        elif location[1] > MAX_IMAGE_BYTES:
            left_out.add(f"with an image of more than {MAX_IMAGE_BYTES >> 20} MiB", sample.key)
        else:
            try:
                caption = (caption_of(sample) or "").encode("utf-8", "replace").decode()
                name = _class_of(sample, label)
            except ValueError:
                left_out.add("with an unreadable txt or json", sample.key)
                continue
            keys.append(sample.key)
            captions.append(caption)
            classes.append(name)
            locations.append((location[0], location[1]))
    offset, size = np.array(locations, np.int64).reshape(-1, 2).T.copy()
    return TarIndex(
        keys=pa.array(keys, pa.string()),
        captions=pa.array(captions, pa.string()),
        classes=pa.array(classes, pa.string()),
        offset=offset,
        size=size,
        left_out=left_out.as_list(),
        first_video=first_video,
        damage=damage,
        order_sha256=_sha256([*keys, str(size.tolist())]),
        content_sha256=_sha256([*captions, *classes]),
    )


def _class_of(sample: TarSample, label: str) -> str:
    """Return the class of an image, or '' if it has no class; raise ValueError if its json cannot be read."""
    if label == LABEL:
        return sample.members.get(_CLASS, b"").decode("utf-8", "replace").strip()
    value = description_of(sample).get(label)
    return str(value).encode("utf-8", "replace").decode().strip() if type(value) in (str, int) else ""


def _sha256(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@dataclass(frozen=True)
class ImageQuery:
    """Description of the images to open from tars.

    Attributes:
        pattern: Pattern of local or remote tars (`clipmill.train.data.tar_samples.expand`).
        shape: Rules for cropping and resizing images. All frames of a clip show the same image.
        loading: Settings of the loader: batches, threads and this rank's share.
        cache, cache_size: Folder for copies of remote tars, and the folder's maximum size
            (`clipmill.train.data.remote.open_cache`).
    """

    pattern: str
    shape: ClipShape
    loading: LoaderSettings
    cache: Path | None = None
    cache_size: str | None = None


def open_tars(pattern: str, *, cache: Path | None, cache_size: str | None, label: str = LABEL) -> ImageTars:
    """Open and index image tars (see `ImageQuery`); raise UserError if a tar cannot be read or is compressed."""
    choose_folder(cache)
    tars = expand(pattern)
    return ImageTars(tars, open_cache(cache, size=cache_size) if any(map(is_remote, tars)) else None, label=label)


def names_images(shards: str, *, cache: Path | None, cache_size: str | None) -> bool:
    """Return True if the first image or video in the tars is an image.

    Raises:
        UserError: A tar is missing or cannot be read.
    """
    for tar in expand(shards):
        try:
            are_images = starts_with_image(tar, local_copy(tar, cache=cache, size=cache_size))
        except OSError as error:
            raise UserError(f"{tar} cannot be read: {error}", hint="repair or omit the tar") from error
        if are_images is not None:
            return are_images
    return False


def class_names_of_images(pattern: str, *, label: str, cache: Path | None, cache_size: str | None) -> set[str]:
    """Return the classes of the images in tars; raise UserError if the tars cannot be read or lack the label."""
    tars = open_tars(pattern, cache=cache, cache_size=cache_size, label=label)
    names = {name for index in tars.indexes for name in index.classes.unique().to_pylist() if name}
    if not names:
        raise UserError(
            f"the images of {pattern} have no label {label!r}",
            hint=f"use the label {LABEL} for the cls members of samples, or a key of their json",
        )
    return names
