"""Whole remote files in the cache: fetched once, and only ever whole."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.publish import published
from train.data.remote.address import cache_folder, is_remote, open_file_system
from train.data.remote.patience import patiently

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def local_copy(address: str, *, cache: Path | None) -> Path:
    """The file at `address` on this machine: itself, or its copy in the cache, fetched where it is not there yet.

    Raises:
        OSError: it cannot be fetched, or comes shorter than it is.
        UserError: there is no such file system, or the cache cannot be made.
    """
    if not is_remote(address):
        return Path(address)
    name = address.rsplit("/", 1)[-1]
    path = cache_folder(cache) / "tars" / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}-{name}"
    if not path.is_file():
        files, remote = open_file_system(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        patiently(lambda: _fetch(files, remote, path), what=address)
    return path


def _fetch(files: "AbstractFileSystem", remote: str, path: Path) -> None:
    size = files.info(remote).get("size")
    with published(path) as temporary:
        files.get_file(remote, str(temporary))
        fetched = temporary.stat().st_size
        # A connection that is closed early may look like the end of the file.
        if size is not None and fetched != size:
            raise OSError(f"{fetched} of {size} bytes came")
