"""Parts of remote tars: only the bytes that are asked for are fetched."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from shards.damage import DamagedTar
from train.data.remote.patience import patiently

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class RemoteTars:
    """Tars of a remote data folder (`shards.tars.TarBytes`).

    Args:
        files: file system.
        root: the data folder in it.
        copy: the local folder that stands for it; paths below it are paths below `root`.

    Attributes:
        num_bytes: fetched so far.
    """

    gap_bytes = 1 << 18  # a request takes as long as this many bytes, at the least

    def __init__(self, files: "AbstractFileSystem", root: str, *, copy: Path) -> None:
        self._files, self._root, self._copy = files, root.rstrip("/"), copy
        self.num_bytes = 0

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """See `shards.tars.TarBytes`."""
        remote = f"{self._root}/{path.relative_to(self._copy).as_posix()}"
        content = patiently(lambda: self._fetch(remote, offset, size, path), what=remote)
        self.num_bytes += len(content)
        return content

    def _fetch(self, remote: str, offset: int, size: int, path: Path) -> bytes:
        content = bytes(self._files.cat_file(remote, start=offset, end=offset + size))
        if len(content) > size:
            raise io.UnsupportedOperation(f"{remote}: {len(content)} bytes came for {size}: ranges are not served")
        if len(content) < size:
            raise DamagedTar(path, f"of {size} bytes from {offset} only {len(content)} came")
        return content
