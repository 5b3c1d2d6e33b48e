"""Mapped files, and what happens when one loses its pages: the process ends with the name of the file.

A mapped file that another program truncates, or whose disk fails, has pages that cannot be read. The kernel then sends
SIGBUS to whoever touches one of them, which would end the process without a word. A handler of this signal finds the
file by the address, reports it, and exits. It costs nothing until then; reading with `pread` instead, which returns an
error, takes 1.7 times as long for latents (benchmarks/README.md).

The handler runs Python code in the middle of the access, in the thread that made it. This is possible because the
signal arises from that access alone, and an access to mapped data holds none of the interpreter's locks.
"""

import ctypes
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from clipmill.manifests.errors import EXIT_FAILED_WORK
from clipmill.manifests.quoting import on_one_line

_SA_SIGINFO = 4
_ADDRESS_AT = 16  # of si_addr in siginfo_t
_MAX_PATH_CHARS = 4096
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
_lock = threading.Lock()
_before: _Action | None = None


def map_arrow_file(path: Path) -> Any:
    """Map an Arrow file read-only; an access to a page that was lost ends the process with its name.

    Raises:
        OSError: it cannot be mapped.
    """
    report_lost_pages()
    return pa.memory_map(str(path))


def report_lost_pages() -> None:
    """Have this process report the file when a page of a mapped one cannot be read."""
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
            # Not of a file, or sent by another process: it does what it did without this handler.
            _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)
            signal.raise_signal(signal.SIGBUS)
    if path is None:
        return
    name = on_one_line(path, max_chars=_MAX_PATH_CHARS)
    text = (
        f"failed: {name} became unreadable while in use: another program truncated it, or its disk failed or is full\n"
        "hint: prep verify lists all damage; replace files of a data folder by new ones, do not change them in place\n"
    )
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(EXIT_FAILED_WORK)


def _file_at(address: int) -> str | None:
    """The file that is mapped at an address."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                words = line.rstrip("\n").split(maxsplit=5)
                return words[5] if len(words) > 5 and words[5].startswith("/") else None
    return None
