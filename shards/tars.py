"""Reading bytes of tars: those on this machine here; readers of other places follow `TarBytes`."""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from shards.damage import DamagedTar
from shards.opening import open_regular, turn_with

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

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class LocalTars:
    """Tars on this machine; the last `_MAX_OPEN_TARS` stay open.

    A tar that is being opened holds up only those who want it, for `shards.opening.OPEN_LIMIT_S` at most.
    """

    gap_bytes = 1 << 14

    def __init__(self) -> None:
        self._tars: OrderedDict[Path, _OpenTar] = OrderedDict()
        self._turns: dict[Path, threading.Lock] = {}
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
            tar = self._opened(path)
            turn = self._turns.setdefault(path, threading.Lock())
        if tar is not None:
            return tar
        with turn_with(turn, path):
            with self._lock:
                tar = self._opened(path)
            if tar is None:
                tar = _OpenTar(open_regular(path))
                with self._lock:
                    self._tars[path] = tar
                    if len(self._tars) > _MAX_OPEN_TARS:
                        self._tars.popitem(last=False)
            return tar

    def _opened(self, path: Path) -> _OpenTar | None:
        tar = self._tars.get(path)
        if tar is not None:
            self._tars.move_to_end(path)
        return tar
