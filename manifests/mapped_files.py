"""Memory-mapped files: a report of pages that can no longer be read, and a limit for the number of maps.

If another program truncates a mapped file, or its disk fails, some of its pages cannot be read. The kernel then sends
SIGBUS to the thread that accesses such a page, which would end the process without a message. A handler of this signal
finds the file by the address, reports its name, and exits. The handler costs nothing until then. Reading with `preadv`
instead would return an error, but takes up to 3.9 times as long for latents (benchmarks/README.md). `read_ahead` reads
bytes for the first time, and reports an error of the disk as an exception.

The handler runs Python code in the middle of the access, in the thread that made the access. This is possible because
only that access causes the signal, and an access to mapped data holds none of the interpreter's locks.

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
_ADDRESS_AT = 16  # offset of si_addr in siginfo_t
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
_unlocked = ctypes.CDLL(None, use_errno=True)  # releases the interpreter lock
_unlocked.mmap.restype = ctypes.c_void_p
_unlocked.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_unlocked.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_unlocked.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_lock = threading.Lock()
_before: _Action | None = None


def map_arrow_file(path: Path) -> Any:
    """Map an Arrow file read-only. An access to a lost page ends the process with the name of the file.

    Raises:
        OSError: The file cannot be mapped.
    """
    report_lost_pages()
    return pa.memory_map(str(path))


def map_descriptor(descriptor: int, size: int) -> memoryview:
    """Map `size` bytes of an open file read-only, for as long as the view or a part of the view is in use.

    The descriptor may be closed: `mmap.mmap` would keep one descriptor per file (until Python 3.13), and a dataset may
    have more files than a process may open. If the open file has a lock, the map keeps it.

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
    """Read a part of a map into memory, without the interpreter lock.

    Raises:
        OSError: The disk fails, or the file is too short. Kernels before Linux 5.14 do not report this.
    """
    address = int(np.frombuffer(content, np.uint8).ctypes.data)
    begin = address - address % mmap.PAGESIZE
    if _unlocked.madvise(begin, address + len(content) - begin, _POPULATE_READ):
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, "the disk fails, or the file was truncated after it was opened")


def report_lost_pages() -> None:
    """Install the handler that reports the name of a mapped file if one of its pages cannot be read."""
    global _before
    with _lock:
        if _before is None:
            action, before = _Action(ctypes.cast(_on_bus_error, ctypes.c_void_p), flags=_SA_SIGINFO), _Action()
            if _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before)):
                raise OSError(ctypes.get_errno(), "no handler of SIGBUS can be set")
            _before = before


@_Handler
def _on_bus_error(_number: int, info: int, _context: int) -> None:
    path = None
    try:
        path = _file_at(ctypes.c_uint64.from_address(info + _ADDRESS_AT).value)
    finally:
        if path is None and _before is not None:
            # The signal is not about a file, or was sent by another process: call the previous handler.
            _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)
            signal.raise_signal(signal.SIGBUS)
    if path is None:
        return
    name = on_one_line(path, max_chars=_MAX_PATH_CHARS)
    text = (
        f"failed: {name} became unreadable while in use: another program truncated it, or its disk failed or is full\n"
        "hint: prep verify lists all damage; replace a data folder's files with new ones, do not change them in place\n"
    )
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(EXIT_FAILED_WORK)


def _file_at(address: int) -> str | None:
    """Return the path of the file that is mapped at an address; None if there is none."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                words = line.rstrip("\n").split(maxsplit=5)
                return words[5] if len(words) > 5 and words[5].startswith("/") else None
    return None


# Limit of the process for all variants together. The rest of the kernel's limit is for maps in use (a few thousand per
# loader of latents), copies of remote tars (clipmill.train.data.mapped_tars) and libraries.
MAX_OPEN_MAPS = 24_576


class MapOwner(Protocol):
    """Owner of a map, which it can close."""

    def close(self) -> bool:
        """Close the map; return False if it is in use. Must not wait for a lock."""
        ...


class OpenMaps:
    """The open maps of a process, ordered by their last use. Thread-safe. Owners are referenced weakly."""

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
