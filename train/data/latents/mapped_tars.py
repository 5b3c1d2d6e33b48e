"""Tars mapped into memory back to back, so that any byte of a shard set has an address.

Nothing is read before it is used, and the kernel takes the pages back when memory is short: a set may be larger than
memory. The length of every file is compared with what its commit says before it is mapped. A page that cannot be read,
because the disk fails or another program has cut the file short, ends the process (SIGBUS) where it is touched:
`read_ahead` asks for pages in a way that raises an error instead.

`mmap.mmap` is not used because it keeps a descriptor for each file, and a large set has more shards than a process may
have open files.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from shards.opening import open_regular
from shards.reader import CommittedShard

_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22  # Linux 5.14
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedTars:
    """The tars of `shards`, read only, for as long as this object lives.

    Attributes:
        begin: address of the first byte of all.
        size_bytes: length of the whole area; what lies between two tars reads as zeros.
        starts: int64, address of each tar, in the order of `shards`.

    Raises:
        UserError: a tar is missing, cannot be opened (in time), or has another length than its commit says.
    """

    def __init__(self, shards: Sequence[CommittedShard]) -> None:
        sizes = [_committed_size(shard) for shard in shards]
        places = np.cumsum([0, *(_whole_pages(size) for size in sizes)])
        self.size_bytes = max(int(places[-1]), mmap.PAGESIZE)
        # One reservation for all: it costs no memory, and no other mapping can come to lie between two tars.
        self.begin = _map(None, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, descriptor=-1)
        weakref.finalize(self, _libc.munmap, self.begin, self.size_bytes)
        self._paths = [shard.tar_path for shard in shards]
        self.starts: NDArray[np.int64] = self.begin + places[:-1].astype(np.int64)
        for shard, start, size in zip(shards, self.starts.tolist(), sizes, strict=True):
            self._map_tar(shard, start, size)

    def _map_tar(self, shard: CommittedShard, start: int, size: int) -> None:
        try:
            descriptor = open_regular(shard.tar_path)
        except OSError as error:
            raise _unusable(shard, error.strerror or str(error)) from error
        try:
            # Asked of the descriptor: the name may stand for another file by now.
            if (found := os.fstat(descriptor).st_size) != size:
                raise _unusable(shard, f"it has {found:,} bytes, its commit says {size:,}")
            _map(start, size, flags=mmap.MAP_SHARED | _MAP_FIXED, descriptor=descriptor)
        finally:
            os.close(descriptor)

    def read_ahead(self, address: int, size: int) -> None:
        """Reads `size` bytes from `address` into memory, without the interpreter's lock.

        Raises:
            OSError: the disk fails, or the file ends before. Kernels before Linux 5.14 do not tell.
        """
        begin = address - address % mmap.PAGESIZE
        if _libc.madvise(begin, address + size - begin, _MADV_POPULATE_READ):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, "the disk fails, or the file was cut short after it was opened")

    def path_at(self, address: int) -> Path:
        """The tar that an address lies in."""
        return self._paths[int(np.searchsorted(self.starts, address, side="right")) - 1]

    def bytes_at(self, address: int, size: int) -> memoryview:
        """A view of `size` bytes from `address`; it must not outlive this object."""
        if not self.begin <= address <= address + size <= self.begin + self.size_bytes:
            raise ValueError(f"{size} bytes at {address} are not within the mapped tars")
        return memoryview((ctypes.c_ubyte * size).from_address(address))


def _committed_size(shard: CommittedShard) -> int:
    assert shard.commit.files is not None  # a CommittedShard has files
    return shard.commit.files.tar_bytes


def _unusable(shard: CommittedShard, why: str) -> UserError:
    column = shard.commit.column
    return UserError(
        f"{shard.tar_path} cannot be used: {why}",
        hint=f"prep verify names everything that is damaged, and prep {column} makes it again",
    )


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(address: int | None, size: int, *, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size, mmap.PROT_READ, flags, descriptor, 0)
    if mapped in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, f"{size:,} bytes cannot be mapped: {os.strerror(error)}")
    return int(mapped)
