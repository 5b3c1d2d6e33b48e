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

_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22  # Linux 5.14
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
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
        # A single reservation: it takes no memory, and no other mapping can end up between two tars.
        self.begin = _map(None, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, descriptor=-1)
        weakref.finalize(self, _libc.munmap, self.begin, self.size_bytes)
        self._paths = [shard.tar_path for shard in shards]
        self.starts: NDArray[np.int64] = self.begin + offsets[:-1].astype(np.int64)
        for shard, start, size in zip(shards, self.starts.tolist(), sizes, strict=True):
            self._map_tar(shard, start, size)

    def _map_tar(self, shard: CommittedShard, start: int, size: int) -> None:
        try:
            descriptor = open_regular(shard.tar_path)
        except OSError as error:
            raise _unusable(shard.tar_path, shard, error.strerror or str(error)) from error
        try:
            # The size of the open file: its name may refer to another one by now.
            if (found := os.fstat(descriptor).st_size) != size:
                raise _unusable(shard.tar_path, shard, f"it has {found:,} bytes, its commit says {size:,}")
            _map(start, size, flags=mmap.MAP_SHARED | _MAP_FIXED, descriptor=descriptor)
        finally:
            os.close(descriptor)

    def read_ahead(self, address: int, size: int) -> None:
        """Read `size` bytes from `address` into memory, without the interpreter lock.

        Raises:
            OSError: the disk fails, or the file ends earlier. Kernels before Linux 5.14 do not report it.
        """
        begin = address - address % mmap.PAGESIZE
        if _libc.madvise(begin, address + size - begin, _MADV_POPULATE_READ):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, "the disk fails, or the file was truncated after it was opened")

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

    def _part_at(self, address: int) -> MappedTars:
        return self._parts[max(bisect_right(self._parts, address, key=lambda part: part.begin) - 1, 0)]


def _committed_size(shard: CommittedShard) -> int:
    assert shard.commit.files is not None  # a CommittedShard has files
    return shard.commit.files.tar_bytes


def _map(address: int | None, size: int, *, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size, mmap.PROT_READ, flags, descriptor, 0)
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
        where = f"{self._what} ({self._tars.path_at(address)})"
        try:
            self._tars.read_ahead(address, size_bytes)
        except OSError as error:
            return Problem("shard_unreadable", f"{where} cannot be read: {error.strerror or error}")
        if zlib.crc32(self._tars.bytes_at(address, size_bytes)) != crc32:
            return Problem("checksum", f"{where} do not match their checksum")
        return None

    def record(self, member: int, found: Problem | Stuck | None) -> None:
        """Record the result of verifying a member."""
        if isinstance(found, Stuck):
            where = f"{self._what} ({self._tars.path_at(self._payload(member).address)})"
            found = Problem("stuck", f"{where} were not read within {found.after_s:g} s")
        if found is not None:
            self._problems[member] = found
        self._state[member] = _GOOD if found is None else _BAD
