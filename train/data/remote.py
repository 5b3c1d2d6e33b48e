"""Data folders and tars at addresses: small files are copied to this machine, and tars are read by range or cached.

The cache folder (`--cache`) has `folders/`, the small files of each data folder, and `objects/`, whole tars under a
limit (`--cache-size`, clipmill.manifests.storage.cache).
"""

import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import parse_size
from clipmill.manifests.storage.cache import CachedFile, ObjectCache
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.stores import AccessRefused, Unanswered, no_damage
from clipmill.shards.format import DATASET_FILE
from clipmill.shards.reader import CommittedShard
from clipmill.train.data.remote_files import RemoteFiles, cache_unusable, is_local

_BLOCK_BYTES = 1 << 24  # of a tar at a time
_caches: dict[tuple[Path, int | None], ObjectCache] = {}
_caches_lock = threading.Lock()


def cache_folder(chosen: Path | None) -> Path:
    """The folder for copies of remote files: the chosen one, or clipmill's in the user's cache.

    Raises:
        UserError: it cannot be created.
    """
    folder = chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipmill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}", hint="choose another with --cache DIR") from error
    return folder


def open_cache(chosen: Path | None, *, size: str | None = None) -> ObjectCache:
    """The cache of whole tars in a folder: one for all of this process.

    Args:
        chosen: see `cache_folder`.
        size: the limit, such as 100GB; None for one by the free disk.

    Raises:
        UserError: the folder cannot be created or written, or `size` is not valid.
    """
    folder = cache_folder(chosen)
    limit_bytes = None if size is None else parse_size(size, flag="--cache-size")
    with _caches_lock:
        if (folder, limit_bytes) not in _caches:
            try:
                _caches[folder, limit_bytes] = ObjectCache(folder, limit_bytes=limit_bytes)
            except OSError as error:
                reason = f"the cache folder {folder} cannot be written: {error.strerror}"
                raise UserError(reason, hint="choose another with --cache DIR") from error
        return _caches[folder, limit_bytes]


def local_copy(address: str, *, cache: Path | None, size: str | None = None) -> Path:
    """The path of a local file, or of the copy of a remote one in the cache, fetched if it is missing or outdated.

    Raises:
        OSError: it cannot be fetched, or is shorter than announced.
        UserError: there is no such storage, or the cache cannot be written or is too small.
    """
    if not is_remote(address):
        return Path(address)
    with held_copy(address, open_cache(cache, size=size)) as copy:
        return copy.path


def held_copy(address: str, cache: ObjectCache) -> CachedFile:
    """The copy of a remote file, which stays in the cache while it is held; raises as `local_copy` does."""
    folder, _, key = address.rpartition("/")
    name, size_bytes = copy_name(address)
    try:
        copy = cache.get(name, size_bytes=size_bytes, fetch=lambda path: open_objects(folder).fetch(key, path))
    except OSError as error:
        if not is_local(error):
            raise
        raise cache_unusable(cache.folder, address, error) from error
    assert copy is not None  # it waits
    for older in cache.names(f"{_digest(address)}-"):
        if older != name:
            cache.drop(older)
    return copy


def copy_name(address: str) -> tuple[str, int]:
    """The name that the copy of a remote file has in the cache, by its version now, and its size in bytes.

    Raises:
        OSError: the storage does not say.
        UserError: there is no such storage.
    """
    folder, _, key = address.rpartition("/")
    info = open_objects(folder).info(key)
    state = _digest(f"{info.size_bytes} {info.etag} {info.modified_s}")
    return f"{_digest(address)}-{state}-{key}", info.size_bytes


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RemoteTars:
    """Tars of a remote data folder, of which only the requested bytes are fetched (`clipmill.shards.tars.TarBytes`).

    Args:
        files: the small files of the folder; paths below their copy are keys of objects.
        cache: for tars that are needed as a whole.

    Attributes:
        num_readers: threads that read clips ahead of those that decode them. A request waits for tens of milliseconds.
    """

    gap_bytes = 1 << 18  # a request takes at least as long as transferring this many bytes
    num_readers = 32

    def __init__(self, files: RemoteFiles, cache: ObjectCache) -> None:
        self.files, self.cache = files, cache

    @property
    def objects(self) -> Objects:
        """The objects of the data folder."""
        return self.files.objects

    @property
    def num_bytes(self) -> int:
        """Bytes fetched so far."""
        return self.objects.num_bytes

    def key(self, path: Path) -> str:
        """The object that a path below the copy stands for."""
        return path.relative_to(self.files.copy).as_posix()

    def name(self, path: Path) -> str:
        return self.objects.address_of(self.key(path))

    def read(self, path: Path, offset: int, size: int) -> bytes:
        return self.read_ranges(path, [(offset, size)])[0]

    def read_ranges(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Request all ranges at once; see `clipmill.shards.tars.TarBytes`."""
        try:
            with self._told_apart():
                return self.objects.read_ranges(self.key(path), ranges)
        except UserError:
            raise
        except OSError as error:
            if "Range request not supported" in str(error):
                raise io.UnsupportedOperation(f"{error.filename}: the server does not support ranges") from error
            raise

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """Context manager around reads: a refused object is unreadable, as others are; refused credentials end the run.

        The records of the folder could be read when it was opened. If they are refused as well, nothing can be read.
        """
        try:
            yield
        except AccessRefused as error:
            try:
                self.objects.read(DATASET_FILE)
            except AccessRefused:
                raise error from None
            raise Unanswered(errno.EIO, str(error)) from error

    def provide(self, index: Path, *, size_bytes: int, sha256: str | None = None) -> None:
        try:
            with no_damage(), self._told_apart():
                self.files.copy_file(self.key(index), size_bytes=size_bytes, sha256=sha256)
        except OSError as error:
            if is_local(error):
                raise cache_unusable(self.files.copy, self.objects.address_of(self.key(index)), error) from error
            raise

    def fetch(
        self, shard: CommittedShard, *, waits: bool = True, is_over: Callable[[], bool] = lambda: False
    ) -> CachedFile | None:
        """The whole tar of a shard in the cache; None if another process is fetching it and `waits` is False.

        Args:
            is_over: ends the fetching within a block of `_BLOCK_BYTES`, with an OSError.

        Raises:
            clipmill.manifests.storage.cache.NoRoom, OSError: see `ObjectCache.get`.
        """
        key, size_bytes = self.key(shard.tar_path), shard.tar_bytes

        def fetch(path: Path) -> None:
            with path.open("wb") as file:
                for offset in range(0, size_bytes, _BLOCK_BYTES):
                    if is_over():
                        raise InterruptedError(f"{key} is no longer needed")
                    file.write(self.objects.read_range(key, offset, min(_BLOCK_BYTES, size_bytes - offset)))

        name = self.cached_name(shard)
        return self.cache.get(name, size_bytes=size_bytes, fetch=fetch, sha256=shard.tar_sha256, waits=waits)

    def cached_name(self, shard: CommittedShard) -> str:
        """Name of a shard's tar in the cache: the same content has the same name in all data folders."""
        return f"{shard.tar_sha256[:32]}-{shard.tar_path.name}"


def copy_of_folder(address: str, *, cache: Path | None) -> Path:
    """Path of the copy of a remote data folder; raises UserError as `clipmill.train.data.folders.folder_path` does."""
    return cache_folder(cache) / "folders" / _digest(open_objects(address).address)


def open_remote_folder(
    address: str, *, cache: Path | None, cache_size: str | None, column: str | None
) -> tuple[Path, RemoteTars]:
    """Copy the small files of a data folder; return the copy, and what reads its tars (`open_data_folder`)."""
    objects = open_objects(address)
    tars_cache = open_cache(cache, size=cache_size)
    copy = copy_of_folder(address, cache=cache)
    files = RemoteFiles(objects, copy)
    files.copy_manifest()
    if column is not None:
        files.copy_column(column)
    if not objects.is_writable:
        _require_ranges(objects)
    return copy, RemoteTars(files, tars_cache)


def _require_ranges(objects: Objects) -> None:
    """Raise a UserError if a web server ignores ranges: each clip would cost its whole shard."""
    try:
        objects.read_range(DATASET_FILE, 0, 1)
    except OSError as error:
        raise UserError(
            f"{objects.address} does not support range requests: {error}",
            hint="use a server that supports them (nginx, caddy, S3), or name tars: {000..999}.tar",
        ) from error
