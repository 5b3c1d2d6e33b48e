"""Byte ranges of the tars of a data folder in a bucket, for commands that read a few chunks of many shards."""

from collections.abc import Sequence
from pathlib import Path

from clipmill.manifests.storage.mirrors import Mirror, mirror_of
from clipmill.shards.opening import DamagedTar
from clipmill.shards.tars import TarBytes


def tars_of(data_dir: Path) -> TarBytes | None:
    """Return what reads the tars of a data folder range by range if it is in a bucket, and None if it is local."""
    mirror = mirror_of(data_dir)
    return None if mirror is None else BucketTars(mirror)


class BucketTars:
    """`TarBytes` by ranges: opening such a tar as a file would fetch all of it, half a gigabyte, for a single chunk."""

    gap_bytes = 1 << 18

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def name(self, path: Path) -> str:
        """Return the local path: the commands show addresses in place of the folders that mirror them."""
        return str(path)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        content = self._mirror.read_range(path, offset, size)
        if len(content) != size:
            raise DamagedTar(path, f"truncated: it ends before byte {offset + size}, which the index refers to")
        return content

    def read_ranges(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(path, offset, size) for offset, size in ranges]

    def provide(self, index: Path, *, size_bytes: int, sha256: str | None = None) -> None:
        """Opening the index fetches it."""
