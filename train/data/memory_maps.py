"""The calls of the C library that map files and memory at chosen addresses, which Python's `mmap` does not offer."""

import ctypes
import mmap
import os

from clipmill.manifests.mapped_files import report_lost_pages

MADV_DONTNEED, MADV_NOHUGEPAGE = 4, 15
MADV_POPULATE_READ = 22  # Linux 5.14
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_memory(size: int, *, at: int | None = None, is_writable: bool = False) -> int:
    """Map addresses that read as zeros and take no memory until they are written; raises OSError.

    Args:
        at: address of what they replace; None for new ones.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_writable else 0)
    return _map(at, size, protection=protection, flags=flags | (0 if at is None else _MAP_FIXED), descriptor=-1)


def map_file(address: int, size: int, descriptor: int) -> None:
    """Map a file over addresses that are mapped, read-only; raises OSError."""
    report_lost_pages()
    _map(address, size, protection=mmap.PROT_READ, flags=mmap.MAP_SHARED | _MAP_FIXED, descriptor=descriptor)


def move_pages(source: int, target: int, size: int) -> None:
    """Move mapped pages over others, in one step for whoever reads them; raises OSError."""
    moved = _libc.mremap(source, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)
    if moved in (None, _FAILED):
        raise OSError(ctypes.get_errno(), f"{size:,} bytes cannot be moved")


def unmap(address: int, size: int) -> None:
    """Unmap addresses."""
    _libc.munmap(address, size)


def advise(address: int, size: int, advice: int) -> int:
    """Call madvise; return its error, 0 for none."""
    return ctypes.get_errno() if _libc.madvise(address, size, advice) else 0


def _map(address: int | None, size: int, *, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if mapped in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, f"{size:,} bytes cannot be mapped: {os.strerror(error)}")
    return int(mapped)
