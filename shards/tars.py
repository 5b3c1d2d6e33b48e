"""Random access to the bytes of tars: the interface `TarBytes`, and its implementation for local files."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.shards.opening import DamagedTar, open_lock, open_regular

_MAX_OPEN_TARS = 128


class TarBytes(Protocol):
    """Random access to the bytes of tars. Implementations must be thread-safe.

    Attributes:
        gap_bytes: Largest gap between two ranges, in bytes, that is cheaper to read than to skip.
    """

    gap_bytes: int

    def name(self, path: Path) -> str:
        """Return the name of a tar in messages: its path or URL."""
        ...

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """Read `size` bytes of a tar, starting at `offset`.

        Raises:
            DamagedTar: The tar is too short.
            OSError: The tar cannot be read.
        """
        ...

    def read_ranges(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges (offset, size) of a tar; raises the same errors as `read`."""
        ...

    def provide(self, index: Path, *, size_bytes: int, sha256: str | None = None) -> None:
        """Ensure that an index is on the local disk, with the given size and SHA-256.

        Raises:
            Inaccessible: The index cannot be fetched from the bucket.
            OSError: The index cannot be written, or its content differs.
        """
        ...


@dataclass(eq=False)
class _OpenTar:
    """An open tar. Its descriptor is closed with the last reference to this object, so a tar in use may be evicted."""

    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class LocalTars:
    """`TarBytes` for local and mounted file systems. The `_MAX_OPEN_TARS` most recently used tars stay open.

    Opening a tar blocks only threads that read the same tar, for at most `OPEN_LIMIT_S` seconds
    (clipmill.shards.opening).
    """

    gap_bytes = 1 << 14

    def __init__(self) -> None:
        self._tars: OrderedDict[Path, _OpenTar] = OrderedDict()
        self._locks: dict[Path, threading.Lock] = {}
        self._lock = threading.Lock()

    def name(self, path: Path) -> str:
        return str(path)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        tar = self._open(path)
        blocks = []
        while size > 0:
            block = os.pread(tar.descriptor, size, offset)
            if not block:
                raise DamagedTar(path, f"truncated: it ends at or before byte {offset}, which the index refers to")
            blocks.append(block)
            offset += len(block)
            size -= len(block)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def read_ranges(self, path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(path, offset, size) for offset, size in ranges]

    def provide(self, index: Path, *, size_bytes: int, sha256: str | None = None) -> None:
        """Do nothing. A local index needs no preparation, and opening a missing index fails."""

    def _open(self, path: Path) -> _OpenTar:
        with self._lock:
            tar = self._find_open(path)
            lock = self._locks.setdefault(path, threading.Lock())
        if tar is not None:
            return tar
        with open_lock(lock, path):
            with self._lock:
                tar = self._find_open(path)
            if tar is None:
                tar = _OpenTar(open_regular(path))
                with self._lock:
                    self._tars[path] = tar
                    if len(self._tars) > _MAX_OPEN_TARS:
                        self._tars.popitem(last=False)
                    self._locks.pop(path, None)  # threads that wait for this lock will find the open tar
            return tar

    def _find_open(self, path: Path) -> _OpenTar | None:
        tar = self._tars.get(path)
        if tar is not None:
            self._tars.move_to_end(path)
        return tar


@dataclass(frozen=True)
class TarFiles:
    """The tars of a variant. Each array has one entry per tar, in ascending order of shard ID.

    Attributes:
        directory: Folder of the variant.
        shard_ids: IDs of the shards.
        names: Paths relative to the folder of the variant.
        sizes: Sizes in bytes, from the commits.
        num_samples: Number of samples in all tars.
    """

    directory: Path
    shard_ids: NDArray[np.int64]
    names: pa.StringArray
    sizes: NDArray[np.int64]
    num_samples: int

    def __len__(self) -> int:
        return len(self.shard_ids)

    def path(self, position: int) -> Path:
        """Return the path of the tar at `position` in the arrays."""
        return self.directory / str(self.names[position].as_py())
