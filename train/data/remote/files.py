"""Remote files through fsspec: addresses, whole files copied into a cache, ranges of tars, and retries."""

import hashlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manifests.errors import DISK_ERRORS, UserError
from manifests.publish import published
from shards.damage import DamagedTar

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Seconds before the second, third and fourth attempt.
_WAITS_S = (0.2, 1.0, 5.0)
# Properties by which file systems identify the content of a file.
_MARKS = ("size", "ETag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "generation")
_Result = TypeVar("_Result")


def is_remote(address: str) -> bool:
    """Return True for an address such as `s3://bucket/data`; anything without `://` is a local path."""
    return "://" in address


def open_file_system(address: str) -> "tuple[AbstractFileSystem, str]":
    """The file system of an address, and the path in it.

    Raises:
        UserError: there is no such file system, or a package it needs is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise UserError(f"{address} needs a package that is not here: {error}", hint="install it, with pip") from error
    except (ValueError, OSError) as error:
        known = "s3://bucket/data, gs://bucket/data, https://host/data"
        raise UserError(f"{address} cannot be opened: {error}", hint=f"addresses look like {known}") from error


def with_retries(read: Callable[[], _Result], *, what: str) -> _Result:
    """Return the result of `read`, with up to four attempts.

    Raises:
        OSError: all attempts failed, or one in a way that retrying cannot help.
    """
    for wait_s in (*_WAITS_S, None):
        try:
            return read()
        except (FileNotFoundError, PermissionError, io.UnsupportedOperation):
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            if wait_s is None:
                attempts = len(_WAITS_S) + 1
                raise OSError(f"{what} cannot be read, {attempts} attempts failed; the last: {error}") from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")


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


def local_copy(address: str, *, cache: Path | None) -> Path:
    """The path of a local file, or of the copy of a remote one in the cache, fetched if it is missing or outdated.

    Raises:
        OSError: it cannot be fetched, or is shorter than announced.
        UserError: there is no such file system, or the cache cannot be written.
    """
    if not is_remote(address):
        return Path(address)
    files, remote = open_file_system(address)
    info = with_retries(lambda: files.info(remote), what=address)
    folder, of_address = cache_folder(cache) / "tars", _digest(address)
    state = _digest(repr([info.get(mark) for mark in _MARKS]))
    path = folder / f"{of_address}-{state}-{address.rsplit('/', 1)[-1]}"
    if not path.is_file():
        try:
            folder.mkdir(exist_ok=True)
            with_retries(lambda: _fetch_whole(files, remote, path, info=info), what=address)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise cache_unusable(folder, address, error) from error
        for older in folder.glob(f"{of_address}-*"):
            if older != path:
                older.unlink(missing_ok=True)
    return path


def cache_unusable(folder: Path, address: str, error: OSError) -> UserError:
    """The error for a cache that cannot take a copy of `address`."""
    hint = "make room, or choose another folder with --cache DIR"
    return UserError(f"{folder} cannot take a copy of {address}: {error.strerror}", hint=hint)


def _fetch_whole(files: "AbstractFileSystem", remote: str, path: Path, *, info: dict[str, Any]) -> None:
    size = info.get("size")
    with published(path) as temporary:
        files.get_file(remote, str(temporary))
        fetched = temporary.stat().st_size
        # A connection that is closed early may look like the end of the file.
        if size is not None and fetched != size:
            raise OSError(f"received {fetched} of {size} bytes")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RemoteTars:
    """Tars of a remote data folder, of which only the requested bytes are fetched (`shards.tars.TarBytes`).

    Args:
        root: the data folder in the file system.
        copy: the local folder that stands for it; paths below it are paths below `root`.

    Attributes:
        num_bytes: bytes fetched so far.
    """

    gap_bytes = 1 << 18  # a request takes at least as long as transferring this many bytes

    def __init__(self, files: "AbstractFileSystem", root: str, *, copy: Path) -> None:
        self._files, self._root, self._copy = files, root.rstrip("/"), copy
        self.num_bytes = 0

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """See `shards.tars.TarBytes`."""
        remote = f"{self._root}/{path.relative_to(self._copy).as_posix()}"
        content = with_retries(lambda: self._fetch(remote, offset, size, path), what=remote)
        self.num_bytes += len(content)
        return content

    def _fetch(self, remote: str, offset: int, size: int, path: Path) -> bytes:
        content = bytes(self._files.cat_file(remote, start=offset, end=offset + size))
        if len(content) > size:
            raise io.UnsupportedOperation(
                f"{remote}: received {len(content)} bytes for {size}: the server does not support ranges"
            )
        if len(content) < size:
            raise DamagedTar(path, f"received only {len(content)} of {size} bytes from {offset}")
        return content
