"""Memory-mapped files: an error message for pages that can no longer be read, and a limit on the number of maps.

If another program truncates a mapped file, or its disk fails, some of its pages cannot be read. The kernel then sends
SIGBUS to the thread that accesses such a page, which would end the process without a message. A handler for this signal
finds the file that is mapped at the address, reports its name, and exits. The handler costs nothing until then. Reading
with `preadv` instead would return an error, but takes up to 3.9 times as long for latents (benchmarks/README.md).
`read_ahead` loads pages into memory in advance, and reports a disk error as an exception.

The handler runs Python code in the middle of the access, in the thread that made the access. This is possible because
only that access causes the signal, and an access to mapped data does not hold any of the interpreter's locks.

The kernel allows a process 65,530 maps (`vm.max_map_count`), and a dataset may have more shards than that. `OPEN_MAPS`
closes the least recently used maps beyond a limit. Their owners map the files again when needed.
"""

import ctypes
import errno
import mmap
import os
import signal
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from clipmill.manifests.errors import EXIT_FAILED_WORK
from clipmill.manifests.formatting import on_one_line

_SA_SIGINFO = 4
_ADDRESS_OFFSET = 16  # offset of si_addr in siginfo_t, in bytes
_MAX_PATH_CHARS = 4096
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None, use_errno=True)
_unlocked = ctypes.CDLL(None, use_errno=True)  # calls release the interpreter lock
_unlocked.mmap.restype = ctypes.c_void_p
_unlocked.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_unlocked.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_unlocked.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_lock = threading.Lock()
_previous_action: _Action | None = None


def map_arrow_file(path: Path) -> Any:
    """Map an Arrow file read-only. An access to a lost page ends the process with a message that names the file.

    Raises:
        OSError: The file cannot be mapped.
    """
    report_lost_pages()
    return pa.memory_map(str(path))


def map_descriptor(descriptor: int, size: int) -> memoryview:
    """Map `size` bytes of an open file read-only, for as long as the view or a part of the view is in use.

    The descriptor may be closed afterwards. (`mmap.mmap` would keep one descriptor per file until Python 3.13, and a
    dataset may have more files than a process may open.) If the open file is locked, the map keeps the lock.

    Raises:
        OSError: The file cannot be mapped.
    """
    report_lost_pages()
    address = _unlocked.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"{size:,} bytes cannot be mapped: {os.strerror(code)}")
    content = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(content, _unlocked.munmap, address, size).atexit = False
    return memoryview(content).cast("B").toreadonly()


def read_ahead(content: memoryview) -> None:
    """Load a part of a map into memory, without holding the interpreter lock.

    Raises:
        OSError: The disk fails, or the file is too short. Kernels before Linux 5.14 do not report this.
    """
    address = int(np.frombuffer(content, np.uint8).ctypes.data)
    begin = address - address % mmap.PAGESIZE
    if _unlocked.madvise(begin, address + len(content) - begin, _POPULATE_READ):
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, "the disk failed, or the file was truncated after it was opened")


def report_lost_pages() -> None:
    """Install the handler that reports the name of a mapped file if one of its pages cannot be read."""
    global _previous_action
    with _lock:
        if _previous_action is None:
            action, previous = _Action(ctypes.cast(_on_bus_error, ctypes.c_void_p), flags=_SA_SIGINFO), _Action()
            if _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(previous)):
                raise OSError(ctypes.get_errno(), "the handler for SIGBUS cannot be installed")
            _previous_action = previous


@_Handler
def _on_bus_error(_number: int, info: int, _context: int) -> None:
    path = None
    try:
        path = _file_at(ctypes.c_uint64.from_address(info + _ADDRESS_OFFSET).value)
    finally:
        if path is None and _previous_action is not None:
            # The signal does not concern a file, or was sent by another process, so call the previous handler.
            _libc.sigaction(signal.SIGBUS, ctypes.byref(_previous_action), None)
            signal.raise_signal(signal.SIGBUS)
    if path is None:
        return
    name = on_one_line(path, max_chars=_MAX_PATH_CHARS)
    text = (
        f"failed: {name} became unreadable while in use: another program truncated it, or its disk failed or is full\n"
        "hint: prep verify lists all damage; replace a data folder's files with new files, never change them in place\n"
    )
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(EXIT_FAILED_WORK)


def _file_at(address: int) -> str | None:
    """Return the path of the file that is mapped at an address; None if no file is mapped there."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                words = line.rstrip("\n").split(maxsplit=5)
                return words[5] if len(words) > 5 and words[5].startswith("/") else None
    return None


# Limit per process, for all variants together. The rest of the kernel's limit is left for maps in use (a few thousand
# per loader of latents), copies of remote tars (clipmill.train.data.mapped_tars) and libraries.
MAX_OPEN_MAPS = 24_576


class MapOwner(Protocol):
    """Owner of a map that can close the map."""

    def close(self) -> bool:
        """Close the map; return False if it is in use. Must not wait for a lock."""
        ...


class OpenMaps:
    """The open maps of a process, ordered by last use. Thread-safe. Owners are referenced weakly."""

    def __init__(self, limit: int = MAX_OPEN_MAPS) -> None:
        self.limit = limit
        self._owners: OrderedDict[int, weakref.ref[MapOwner]] = OrderedDict()
        # Reentrant, because an owner may be garbage-collected while the lock is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._owners)

    def note_use(self, owner: MapOwner) -> None:
        """Note that `owner` uses its map now; close other maps if there are too many."""
        key = id(owner)
        with self._lock:
            if key in self._owners:
                self._owners.move_to_end(key)
            else:
                self._owners[key] = weakref.ref(owner, lambda _: self._forget(key))
            num_tried = 0
            while len(self._owners) > self.limit and num_tried < len(self._owners):
                oldest, reference = self._owners.popitem(last=False)
                candidate = reference()
                if candidate is not None and (candidate is owner or not candidate.close()):
                    self._owners[oldest] = reference
                    num_tried += 1

    def closed(self, owner: MapOwner) -> None:
        """Note that `owner` has closed its map."""
        self._forget(id(owner))

    def _forget(self, key: int) -> None:
        with self._lock:
            self._owners.pop(key, None)


OPEN_MAPS = OpenMaps()
