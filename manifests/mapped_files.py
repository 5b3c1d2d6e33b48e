"""Map files into memory, report mapped files that become unreadable, and limit the number of maps.

If another program truncates a mapped file, or the disk fails, some pages of the map cannot be read. The kernel then
sends SIGBUS to the thread that accesses such a page, which would end the process without a message. A handler for this
signal looks up the file that is mapped at the address, reports its path, and exits. Without a signal, the handler costs
nothing. Reading with `preadv` would return an error instead, but takes up to 3.9 times as long for latents
(benchmarks/README.md). `read_ahead` loads pages into memory in advance, and raises an exception if the disk fails.

The handler runs Python code in the thread that accesses the page, in the middle of the access. This is safe: only an
access to mapped data causes the signal, and no lock of the interpreter is held during such an access.

The kernel allows 65,530 maps per process (`vm.max_map_count`), but a dataset may have more shards. When there are too
many maps, `OPEN_MAPS` closes the least recently used maps. Their owners map the files again when needed.
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
    """C structure `sigaction` of 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.PyDLL(None, use_errno=True)
_unlocked_libc = ctypes.CDLL(None, use_errno=True)  # the same library; its calls release the interpreter lock
_unlocked_libc.mmap.restype = ctypes.c_void_p
_unlocked_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_unlocked_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_unlocked_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_lock = threading.Lock()
_previous_action: _Action | None = None


def map_arrow_file(path: Path) -> Any:
    """Map an Arrow file for reading. Access to an unreadable page ends the process with a message about the file.

    Raises:
        OSError: The file cannot be mapped.
    """
    report_lost_pages()
    return pa.memory_map(str(path))


def map_descriptor(descriptor: int, size: int) -> memoryview:
    """Map the first `size` bytes of an open file for reading, for as long as any part of the returned view is in use.

    The descriptor may be closed afterwards. (Before Python 3.13, `mmap.mmap` keeps a descriptor for each file, but a
    dataset may have more files than a process may open.) If the open file is locked, the map keeps the lock.

    Raises:
        OSError: The file cannot be mapped.
    """
    report_lost_pages()
    address = _unlocked_libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"{size:,} bytes cannot be mapped: {os.strerror(code)}")
    content = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(content, _unlocked_libc.munmap, address, size).atexit = False
    return memoryview(content).cast("B").toreadonly()


def read_ahead(content: memoryview) -> None:
    """Load a part of a map into memory without holding the interpreter lock. Before Linux 5.14, do nothing.

    Raises:
        OSError: The disk failed, or the file is too short.
    """
    address = int(np.frombuffer(content, np.uint8).ctypes.data)
    page_start = address - address % mmap.PAGESIZE
    if _unlocked_libc.madvise(page_start, address + len(content) - page_start, _POPULATE_READ):
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, "the disk failed, or the file was truncated after it was opened")


def report_lost_pages() -> None:
    """Install the handler that reports the path of a mapped file if one of its pages cannot be read."""
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
            # The signal has a different cause, such as another process, so the previous handler is called.
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
    """Return the path of the file that is mapped at a memory address, or None if no file is mapped there."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            start, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
            if start <= address < end:
                fields = line.rstrip("\n").split(maxsplit=5)
                return fields[5] if len(fields) > 5 and fields[5].startswith("/") else None
    return None


# Maximum number of open maps in a process. The rest of the kernel's limit is left for maps that cannot be closed
# because they are in use (a few thousand per loader of latents), for copies of remote tars
# (clipmill.train.data.mapped_tars), and for libraries.
MAX_OPEN_MAPS = 24_576


class MapOwner(Protocol):
    """Object that owns a map and can close it."""

    def close(self) -> bool:
        """Close the map, or return False if it is in use. An implementation must not wait for a lock."""
        ...


class OpenMaps:
    """Weak references to the owners of the open maps of a process, ordered by last use. Thread-safe."""

    def __init__(self, limit: int = MAX_OPEN_MAPS) -> None:
        self.limit = limit
        self._owners: OrderedDict[int, weakref.ref[MapOwner]] = OrderedDict()
        # The lock is reentrant, because an owner may be garbage-collected while this thread holds the lock.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._owners)

    def note_use(self, owner: MapOwner) -> None:
        """Record that `owner` is using its map now, and close other maps if there are too many."""
        key = id(owner)
        with self._lock:
            if key in self._owners:
                self._owners.move_to_end(key)
            else:
                self._owners[key] = weakref.ref(owner, lambda _: self._forget(key))
            num_tried = 0
            while len(self._owners) > self.limit and num_tried < len(self._owners):
                oldest_key, reference = self._owners.popitem(last=False)
                candidate = reference()
                if candidate is not None and (candidate is owner or not candidate.close()):
                    self._owners[oldest_key] = reference
                    num_tried += 1

    def note_close(self, owner: MapOwner) -> None:
        """Record that `owner` has closed its map."""
        self._forget(id(owner))

    def _forget(self, key: int) -> None:
        with self._lock:
            self._owners.pop(key, None)


OPEN_MAPS = OpenMaps()
