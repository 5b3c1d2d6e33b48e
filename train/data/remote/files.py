"""Whole remote files in the cache: fetched once, and only ever whole."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.errors import DISK_ERRORS, UserError
from manifests.publish import published
from train.data.remote.address import cache_folder, is_remote, open_file_system
from train.data.remote.patience import patiently

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# What file systems say of a file that changes with its content.
_MARKS = ("size", "ETag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "generation")


def local_copy(address: str, *, cache: Path | None) -> Path:
    """The file at `address` on this machine: itself, or its copy in the cache.

    It is fetched where there is no copy yet, or where it has changed since.

    Raises:
        OSError: it cannot be fetched, or comes shorter than it is.
        UserError: there is no such file system, or the cache cannot be written.
    """
    if not is_remote(address):
        return Path(address)
    files, remote = open_file_system(address)
    info = patiently(lambda: files.info(remote), what=address)
    folder, of_address = cache_folder(cache) / "tars", _digest(address)
    state = _digest(repr([info.get(mark) for mark in _MARKS]))
    path = folder / f"{of_address}-{state}-{address.rsplit('/', 1)[-1]}"
    if not path.is_file():
        try:
            folder.mkdir(exist_ok=True)
            patiently(lambda: _fetch(files, remote, path, info=info), what=address)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            hint = "make room, or choose another folder with --cache DIR"
            raise UserError(f"{folder} cannot take {address}: {error.strerror}", hint=hint) from error
        for older in folder.glob(f"{of_address}-*"):
            if older != path:
                older.unlink(missing_ok=True)
    return path


def _fetch(files: "AbstractFileSystem", remote: str, path: Path, *, info: dict[str, Any]) -> None:
    size = info.get("size")
    with published(path) as temporary:
        files.get_file(remote, str(temporary))
        fetched = temporary.stat().st_size
        # A connection that is closed early may look like the end of the file.
        if size is not None and fetched != size:
            raise OSError(f"{fetched} of {size} bytes came")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
