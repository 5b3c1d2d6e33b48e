"""Reading bytes of tars: those on this machine here; readers of other places follow `TarBytes`."""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from shards.damage import DamagedTar

_MAX_OPEN_TARS = 128


class TarBytes(Protocol):
    """Any part of any tar; safe to use from many threads.

    Attributes:
        gap_bytes: what lies between two parts is better read along when it is shorter than this.
    """

    gap_bytes: int

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """`size` bytes of the tar at `path`, from `offset`.

        Raises:
            DamagedTar: the tar ends before.
            OSError: it cannot be read.
        """
        ...


class _OpenTar:
    """A descriptor that closes with its last user, so that a file can be dropped while another thread reads it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        # Missing when os.open failed.
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class LocalTars:
    """Tars on this machine; the last `_MAX_OPEN_TARS` stay open."""

    gap_bytes = 1 << 14

    def __init__(self) -> None:
        self._tars: OrderedDict[Path, _OpenTar] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """See `TarBytes`."""
        tar = self._open(path)
        pieces = []
        while size > 0:
            piece = os.pread(tar.descriptor, size, offset)
            if not piece:
                raise DamagedTar(path, f"it ends at or before byte {offset}, its index says otherwise")
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _open(self, path: Path) -> _OpenTar:
        with self._lock:
            tar = self._tars.get(path)
            if tar is None:
                tar = self._tars[path] = _OpenTar(path)
                if len(self._tars) > _MAX_OPEN_TARS:
                    self._tars.popitem(last=False)
            else:
                self._tars.move_to_end(path)
            return tar
