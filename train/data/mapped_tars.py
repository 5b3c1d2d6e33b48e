"""Tars mapped into memory back to back, so that every byte of a set of shards has an address, and their verification.

Nothing is read before it is used, and the kernel reclaims pages when memory is short, so that a set may be larger than
memory. The length of every file is compared with its commit before it is mapped. A page that cannot be read, because
the disk fails or another program has truncated the file, ends the process with the file's name where it is accessed
(clipmill.manifests.mapped_files); `read_ahead` requests pages in a way that raises an error instead. `mmap.mmap` is not
used because it keeps a file descriptor for each file, and a large set has more shards than a process may have open
files.

A member is verified against its checksum once per process, when it is first needed. A member that is changed later on
is not noticed, and one that does not match stays bad until the process ends.
"""

import ctypes
import errno
import mmap
import os
import threading
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.shards.open_maps import OPEN_MAPS
from clipmill.shards.opening import open_regular
from clipmill.shards.reader import Variant
from clipmill.train.data.memory_maps import MADV_POPULATE_READ, advise, map_file, map_memory, unmap
from clipmill.train.data.outcomes import Reason
from clipmill.train.data.workers import Stuck

MAX_EAGER = 1024  # shards whose tars are all mapped when a set is opened
_UNKNOWN, _GOOD, _BAD = 0, 1, 2


class MappedTars:
    """The tars of `variants`, one after another, mapped read-only for the lifetime of this object.

    Attributes:
        begin: address of the first byte.
        size_bytes: length of the whole area; bytes between two tars read as zeros.
        starts: int64, address of each tar.

    Raises:
        UserError: a tar is missing, cannot be opened (in time), or differs in length from its commit.
    """

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._files = [variant.tar_files for variant in variants]
        self._first = np.cumsum([0, *map(len, self._files)])
        sizes = np.concatenate([files.sizes for files in self._files])
        offsets = np.concatenate([[0], np.cumsum(-(-sizes // mmap.PAGESIZE) * mmap.PAGESIZE)])
        self.size_bytes = max(int(offsets[-1]), mmap.PAGESIZE)
        self.begin = self._reserve()
        weakref.finalize(self, unmap, self.begin, self.size_bytes)
        self.starts: NDArray[np.int64] = self.begin + offsets[:-1].astype(np.int64)
        self._sizes = sizes
        self._map_all()

    def _reserve(self) -> int:
        """A single reservation: it takes no memory, and no other mapping can end up between two tars."""
        return map_memory(self.size_bytes)

    def _map_all(self) -> None:
        for number in range(len(self.starts)):
            self._map_tar(number)

    def _map_tar(self, number: int) -> None:
        path, size = self._path(number), int(self._sizes[number])
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise unusable(path, self._column(number), error.strerror or str(error)) from error
        try:
            # The size of the open file: its name may refer to another one by now.
            self._require_size(number, os.fstat(descriptor).st_size)
            map_file(int(self.starts[number]), size, descriptor)
        finally:
            os.close(descriptor)

    def _require_size(self, number: int, found: int) -> None:
        path, size = self._path(number), int(self._sizes[number])
        if found != size:
            raise unusable(path, self._column(number), f"it has {found:,} bytes, its commit says {size:,}")

    def require_files(self) -> None:
        """Raise a UserError if a tar is missing or differs in length; those that are mapped were looked at."""

    @property
    def is_whole(self) -> bool:
        """Whether all bytes can be read at any time; others have to be held."""
        return True

    def hold(self, address: int, size: int) -> None:
        """Make sure that `size` bytes from `address`, in one tar, can be read until `release`.

        Raises:
            OSError: their tar cannot be mapped; `release` is due nevertheless.
        """

    def release(self, address: int, size: int) -> None:
        """Give back what `hold` held."""

    def repair(self, address: int, size: int) -> bool:
        """Replace damaged bytes if they are those of a copy; False if they are not."""
        return False

    @contextmanager
    def held(self, address: int, size: int) -> Iterator[None]:
        """Hold some bytes."""
        try:
            self.hold(address, size)
            yield
        finally:
            self.release(address, size)

    def _path(self, number: int) -> Path:
        part = bisect_right(self._first, number) - 1
        return self._files[part].path(number - int(self._first[part]))

    def _column(self, number: int) -> str:
        return self._files[bisect_right(self._first, number) - 1].directory.parent.name

    def _number_at(self, address: int) -> int:
        return int(np.searchsorted(self.starts, address, side="right")) - 1

    def read_ahead(self, address: int, size: int) -> None:
        """Read `size` bytes from `address` into memory, without the interpreter lock.

        Raises:
            OSError: the disk fails, or the file ends earlier. Kernels before Linux 5.14 do not report it.
        """
        begin = address - address % mmap.PAGESIZE
        code = advise(begin, address + size - begin, MADV_POPULATE_READ)
        if code not in (0, errno.EINVAL):
            raise OSError(code, "the disk fails, or the file was truncated after it was opened")

    def name_at(self, address: int) -> str:
        """The tar that contains an address, in messages."""
        return self._name_of(self._number_at(address))

    def _name_of(self, number: int) -> str:
        return str(self._path(number))

    def bytes_at(self, address: int, size: int) -> memoryview:
        """A view of `size` bytes from `address`; it must not outlive this object."""
        if not self.begin <= address <= address + size <= self.begin + self.size_bytes:
            raise ValueError(f"{size} bytes at {address} are not within the mapped tars")
        return memoryview((ctypes.c_ubyte * size).from_address(address))


class _MappedTar:
    """A tar that is mapped now, and how many users hold it."""

    def __init__(self, tars: "LazyTars", number: int) -> None:
        self._tars, self.number, self.num_users = weakref.ref(tars), number, 0

    def close(self) -> bool:
        """Unmap the tar; False if it is in use. See `clipmill.shards.open_maps`."""
        tars = self._tars()
        return tars is None or tars.unmap(self)


class LazyTars(MappedTars):
    """The tars of many shards, mapped when they are needed. The least recently used ones are unmapped if the process
    has too many maps (`clipmill.shards.open_maps`), so that bytes have to be held while they are read. Thread-safe.

    Opening maps nothing, and looks at no tar: `require_files` does, for the first process of a machine. A tar that
    is missing later on fails the samples that are in it.
    """

    def _map_all(self) -> None:
        self._mapped: dict[int, _MappedTar] = {}
        self._lock = threading.RLock()

    def require_files(self) -> None:
        for number in range(len(self.starts)):
            try:
                self._require_size(number, self._path(number).stat().st_size)
            except OSError as error:
                path, why = self._path(number), error.strerror or str(error)
                raise unusable(path, self._column(number), why) from error

    @property
    def is_whole(self) -> bool:
        return False

    def hold(self, address: int, size: int) -> None:
        number = self._number_at(address)
        with self._lock:
            mapped = self._mapped.get(number)
            if mapped is None:
                mapped = self._mapped[number] = _MappedTar(self, number)
                mapped.num_users += 1
                try:
                    self._map_tar(number)
                except UserError as error:
                    del self._mapped[number]
                    raise OSError(errno.EIO, str(error)) from error
            else:
                mapped.num_users += 1
            OPEN_MAPS.used(mapped)

    def release(self, address: int, size: int) -> None:
        with self._lock:
            mapped = self._mapped.get(self._number_at(address))
            if mapped is not None and mapped.num_users:
                mapped.num_users -= 1

    def unmap(self, mapped: _MappedTar) -> bool:
        """Unmap a tar that nobody holds; False if somebody does, or may just now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if mapped.num_users:
                return False
            number = mapped.number
            map_memory(int(self._sizes[number]), at=int(self.starts[number]))
            del self._mapped[number]
            return True
        finally:
            self._lock.release()


def mapped_tars(variants: Sequence[Variant]) -> MappedTars:
    """The tars of some variants: mapped now, or when they are needed if there are more than `MAX_EAGER`."""
    return (LazyTars if sum(variant.num_shards for variant in variants) > MAX_EAGER else MappedTars)(variants)


class JoinedTars(MappedTars):
    """The areas of several `MappedTars`, which stay mapped as long as this object."""

    def __init__(self, parts: Sequence[MappedTars]) -> None:
        self.parts = self._parts = sorted(parts, key=lambda part: part.begin)

    def name_at(self, address: int) -> str:
        """See `MappedTars`."""
        return self._part_at(address).name_at(address)

    def bytes_at(self, address: int, size: int) -> memoryview:
        """A view of `size` bytes from `address`; it must not outlive this object."""
        return self._part_at(address).bytes_at(address, size)

    @property
    def is_whole(self) -> bool:
        return all(part.is_whole for part in self._parts)

    def hold(self, address: int, size: int) -> None:
        self._part_at(address).hold(address, size)

    def release(self, address: int, size: int) -> None:
        self._part_at(address).release(address, size)

    def repair(self, address: int, size: int) -> bool:
        return self._part_at(address).repair(address, size)

    def _part_at(self, address: int) -> MappedTars:
        return self._parts[max(bisect_right(self._parts, address, key=lambda part: part.begin) - 1, 0)]


def unusable(path: Path, column: str, why: str) -> UserError:
    """The error for a file of a column that cannot be used."""
    return UserError(
        f"{path} cannot be used: {why}",
        hint=f"prep verify lists all damage, and prep {column} makes damaged shards again",
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
            with self._tars.held(address, size_bytes):
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
        return f"{self._what} ({self._tars.name_at(self._payload(member).address)})"

    def record(self, member: int, found: Problem | Stuck | None) -> None:
        """Record the result of verifying a member."""
        if isinstance(found, Stuck):
            found = Problem("stuck", f"{self._where(member)} were not read within {found.after_s:g} s")
        if found is not None:
            self._problems[member] = found
        self._state[member] = _GOOD if found is None else _BAD
