"""Tars mapped into memory back to back, so that every byte of a set of shards has an address, and their verification.

Nothing is read before it is used, and the kernel reclaims pages when memory is short, so that a set may be larger than
memory. The length of every file is compared with its commit before it is mapped. A page that cannot be read, because
the disk fails or another program has truncated the file, ends the process (SIGBUS) where it is accessed; `read_ahead`
requests pages in a way that raises an error instead.

`mmap.mmap` is not used because it keeps a file descriptor for each file, and a large set has more shards than a process
may have open files.

A member is verified against its checksum once per process, when it is first needed. A member that is changed later on
is not noticed, and one that does not match stays bad until the process ends.
"""

import ctypes
import errno
import mmap
import os
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.errors import UserError
from shards.damage import DamagedIndex
from shards.format import BLOCK_BYTES
from shards.index import open_index
from shards.opening import open_regular
from shards.reader import CommittedShard
from train.data.outcomes import Reason
from train.data.workers import Stuck

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_POPULATE_READ = 22  # Linux 5.14
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_UNKNOWN, _GOOD, _BAD = 0, 1, 2


class MappedTars:
    """The tars of `shards`, mapped read-only for the lifetime of this object.

    Attributes:
        begin: address of the first byte.
        size_bytes: length of the whole area; bytes between two tars read as zeros.
        starts: int64, address of each tar, in the order of `shards`.

    Raises:
        UserError: a tar is missing, cannot be opened (in time), or differs in length from its commit.
    """

    def __init__(self, shards: Sequence[CommittedShard]) -> None:
        sizes = [_committed_size(shard) for shard in shards]
        offsets = np.cumsum([0, *(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)])
        self.size_bytes = max(int(offsets[-1]), mmap.PAGESIZE)
        self.begin = self._reserve()
        weakref.finalize(self, _libc.munmap, self.begin, self.size_bytes)
        self._paths = [shard.tar_path for shard in shards]
        self.starts: NDArray[np.int64] = self.begin + offsets[:-1].astype(np.int64)
        for shard, start, size in zip(shards, self.starts.tolist(), sizes, strict=True):
            self._map_tar(shard, start, size)

    def _reserve(self) -> int:
        """A single reservation: it takes no memory, and no other mapping can end up between two tars."""
        return map_memory(self.size_bytes)

    def _map_tar(self, shard: CommittedShard, start: int, size: int) -> None:
        try:
            descriptor = open_regular(shard.tar_path)
        except OSError as error:
            raise _unusable(shard.tar_path, shard, error.strerror or str(error)) from error
        try:
            # The size of the open file: its name may refer to another one by now.
            if (found := os.fstat(descriptor).st_size) != size:
                raise _unusable(shard.tar_path, shard, f"it has {found:,} bytes, its commit says {size:,}")
            map_file(start, size, descriptor)
        finally:
            os.close(descriptor)

    num_readers = 4  # threads that read ahead: enough to keep a disk busy

    @property
    def is_whole(self) -> bool:
        """Whether all bytes can be read at any time; others have to be held."""
        return True

    def hold(self, address: int, size: int) -> bool:
        """Make sure that `size` bytes from `address`, which are a record, can be read until `release`.

        Returns False if they can be read at any time.

        Raises:
            OSError: they cannot be read; `release` is due nevertheless.
        """
        return False

    def release(self, address: int, size: int) -> None:
        """Give back what `hold` held."""

    def want(self, addresses: NDArray[np.int64]) -> None:
        """Name the addresses of all records of a set: tars of other records are not needed."""

    def begin_fetching(self) -> None:
        """Fetch tars that are not on this machine in the background."""

    def describe(self) -> str:
        """Where the tars are, for the log; empty if they are simply on this machine."""
        return ""

    def repair(self, address: int, size: int) -> bool:
        """Replace damaged bytes, where they are a copy's; False if they are not."""
        return False

    def read_ahead(self, address: int, size: int) -> None:
        """Read `size` bytes from `address` into memory, without the interpreter lock.

        Raises:
            OSError: the disk fails, or the file ends earlier. Kernels before Linux 5.14 do not report it.
        """
        begin = address - address % mmap.PAGESIZE
        code = self._advise(begin, address + size - begin, _MADV_POPULATE_READ)
        if code not in (0, errno.EINVAL):
            raise OSError(code, "the disk fails, or the file was truncated after it was opened")

    @staticmethod
    def _advise(address: int, size: int, advice: int) -> int:
        """Call madvise; its error, 0 for none."""
        return ctypes.get_errno() if _libc.madvise(address, size, advice) else 0

    def path_at(self, address: int) -> Path:
        """The tar that contains an address."""
        return self._paths[int(np.searchsorted(self.starts, address, side="right")) - 1]

    def bytes_at(self, address: int, size: int) -> memoryview:
        """A view of `size` bytes from `address`; it must not outlive this object."""
        if not self.begin <= address <= address + size <= self.begin + self.size_bytes:
            raise ValueError(f"{size} bytes at {address} are not within the mapped tars")
        return memoryview((ctypes.c_ubyte * size).from_address(address))


class JoinedTars(MappedTars):
    """The areas of several `MappedTars`, which stay mapped as long as this object."""

    def __init__(self, parts: Sequence[MappedTars]) -> None:
        self._parts = sorted(parts, key=lambda part: part.begin)

    def path_at(self, address: int) -> Path:
        """The tar that contains an address."""
        return self._part_at(address).path_at(address)

    def bytes_at(self, address: int, size: int) -> memoryview:
        """A view of `size` bytes from `address`; it must not outlive this object."""
        return self._part_at(address).bytes_at(address, size)

    @property
    def num_readers(self) -> int:  # type: ignore[override]
        """Threads that read ahead."""
        return max(part.num_readers for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes can be read at any time; others have to be held."""
        return all(part.is_whole for part in self._parts)

    def hold(self, address: int, size: int) -> bool:
        """See `MappedTars`."""
        return self._part_at(address).hold(address, size)

    def release(self, address: int, size: int) -> None:
        """See `MappedTars`."""
        self._part_at(address).release(address, size)

    def begin_fetching(self) -> None:
        """See `MappedTars`."""
        for part in self._parts:
            part.begin_fetching()

    def repair(self, address: int, size: int) -> bool:
        """See `MappedTars`."""
        return self._part_at(address).repair(address, size)

    def read_ahead(self, address: int, size: int) -> None:
        """See `MappedTars`."""
        self._part_at(address).read_ahead(address, size)

    def _part_at(self, address: int) -> MappedTars:
        return self._parts[max(bisect_right(self._parts, address, key=lambda part: part.begin) - 1, 0)]


def _committed_size(shard: CommittedShard) -> int:
    assert shard.commit.files is not None  # a CommittedShard has files
    return shard.commit.files.tar_bytes


def map_memory(size: int, *, is_writable: bool = False) -> int:
    """Reserve addresses, which read as zeros and take no memory until they are written."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_writable else 0)
    return _map(None, size, protection=protection, flags=flags, descriptor=-1)


def map_file(address: int, size: int, descriptor: int) -> None:
    """Map a file over reserved addresses, read-only."""
    _map(address, size, protection=mmap.PROT_READ, flags=mmap.MAP_SHARED | _MAP_FIXED, descriptor=descriptor)


def move_pages(source: int, target: int, size: int) -> None:
    """Move mapped pages over others, in one step for whoever reads them."""
    moved = _libc.mremap(source, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, target)
    if moved in (None, _FAILED):
        raise OSError(ctypes.get_errno(), f"{size:,} bytes cannot be moved")


def _map(address: int | None, size: int, *, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if mapped in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, f"{size:,} bytes cannot be mapped: {os.strerror(error)}")
    return int(mapped)


def verified_index(shard: CommittedShard, *, members: Sequence[str]) -> tuple[pa.Table, str]:
    """The shard's index, verified against its commit, so that its checksums of the tar can be trusted; and a member.

    It is opened each time, so that the indexes of thousands of shards do not stay mapped.

    Args:
        members: extensions, of which its samples must have one, which is returned too.

    Raises:
        UserError: the index is damaged or not the committed one, or its samples lack the member.
    """
    try:
        shard.require_committed_index()
        index = open_index(shard.index_path)
    except (DamagedIndex, OSError) as error:
        raise _unusable(shard.index_path, shard, str(error)) from error
    for member in members:
        if f"{member}_offset" in index.column_names:
            return index, member
    raise _unusable(shard.index_path, shard, f"its samples have no member {members[0]}")


def array_addresses(
    shard: CommittedShard, index: pa.Table, *, member: str, array_bytes: NDArray[np.int64], start: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Addresses of the npy arrays of `member`, one per row of the index, and the sizes of the headers before them.

    Args:
        array_bytes: size of each array.
        start: address of the shard's tar.

    Raises:
        UserError: an array would reach beyond the tar, or does not begin on a block: the index is not of this tar.
    """
    offset = index[f"{member}_offset"].to_numpy().astype(np.int64)
    size = index[f"{member}_size"].to_numpy().astype(np.int64)
    header = size - array_bytes
    inside = (offset >= 0) & (header > 0) & (header <= size) & (offset + size <= _committed_size(shard))
    _require(inside & ((offset + header) % BLOCK_BYTES == 0), shard, index)
    return start + offset + header, header.astype(np.int32)


def member_addresses(
    shard: CommittedShard, index: pa.Table, *, member: str, start: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Addresses and sizes of `member`, one per row of the index; raises UserError as `array_addresses` does."""
    offset = index[f"{member}_offset"].to_numpy().astype(np.int64)
    size = index[f"{member}_size"].to_numpy().astype(np.int64)
    _require((offset >= 0) & (size > 0) & (offset + size <= _committed_size(shard)), shard, index)
    return start + offset, size


def _require(is_possible: NDArray[np.bool_], shard: CommittedShard, index: pa.Table) -> None:
    bad = np.flatnonzero(~is_possible)
    if len(bad):
        key = index["key"][int(bad[0])].as_py()
        raise _unusable(shard.index_path, shard, f"its position of the array of {key!r} is impossible")


def damaged_index(shard: CommittedShard, why: str) -> UserError:
    """The error for an index that does not match its tar."""
    return _unusable(shard.index_path, shard, why)


def _unusable(path: Path, shard: CommittedShard, why: str) -> UserError:
    return UserError(
        f"{path} cannot be used: {why}",
        hint=f"prep verify lists all damage, and prep {shard.commit.column} makes damaged shards again",
    )


class Payload(NamedTuple):
    """Address and size of a member, header and array, and its checksum."""

    address: int
    size_bytes: int
    crc32: int


class Problem(NamedTuple):
    """Why a member must not be used."""

    reason: Reason
    detail: str


class VerifiedMembers:
    """Verification of the members of a column, by their numbers. Thread-safe.

    Args:
        payload: of a member.
        noun: what a sample takes from a member, for messages.
    """

    def __init__(
        self, tars: MappedTars, num_members: int, payload: Callable[[int], Payload], *, column: str, noun: str
    ) -> None:
        self._tars, self._payload, self._what = tars, payload, f"its {noun} in the {column} column"
        self._state = np.zeros(num_members, np.uint8)
        self._problems: dict[int, Problem] = {}

    def are_good(self, members: NDArray[np.int64]) -> bool:
        """Return True if all of `members` were verified and match."""
        return bool((self._state[members] == _GOOD).all())

    def unknown(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the first occurrences of members that have not been verified yet, ascending."""
        unknown = np.flatnonzero(self._state[members] == _UNKNOWN)
        return np.sort(unknown[np.unique(members[unknown], return_index=True)[1]])

    def bad(self, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `members` were verified and do not match."""
        return self._state[members] == _BAD

    def problem(self, member: int) -> Problem | None:
        """Why a member must not be used, None if it matches; verifies it now if necessary."""
        if self._state[member] == _UNKNOWN:
            self.record(member, self.verify(member))
        return self._problems.get(member)

    def verify(self, member: int) -> Problem | None:
        """Read a member and compare it with its checksum."""
        address, size_bytes, crc32 = self._payload(member)
        try:
            self._tars.read_ahead(address, size_bytes)
            matches = zlib.crc32(self._tars.bytes_at(address, size_bytes)) == crc32
            if not matches and self._tars.repair(address, size_bytes):
                matches = zlib.crc32(self._tars.bytes_at(address, size_bytes)) == crc32
        except OSError as error:
            return self.unreadable(member, error)
        return None if matches else Problem("checksum", f"{self._where(member)} do not match their checksum")

    def unreadable(self, member: int, error: OSError) -> Problem:
        """The problem of a member that cannot be read."""
        return Problem("shard_unreadable", f"{self._where(member)} cannot be read: {error.strerror or error}")

    def _where(self, member: int) -> str:
        return f"{self._what} ({self._tars.path_at(self._payload(member).address)})"

    def record(self, member: int, found: Problem | Stuck | None) -> None:
        """Record the result of verifying a member."""
        if isinstance(found, Stuck):
            found = Problem("stuck", f"{self._where(member)} were not read within {found.after_s:g} s")
        if found is not None:
            self._problems[member] = found
        self._state[member] = _GOOD if found is None else _BAD
