"""Tars whose members are copied from memory maps (latents, stored embeddings), and the verification of members.

A tar is mapped when it is first needed, after the length of the open file was compared with its commit. Nothing is
read before it is used, and the kernel reclaims pages when memory is short, so that a set may be larger than memory. A
tar that is truncated in place while it is mapped ends the process with its name (clipmill.manifests.mapped_files).

A member is verified against its checksum once per process, when it is first needed. A member that is changed later on
is not noticed, and one that does not match stays bad until the process ends.
"""

import errno
import os
import stat
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import OPEN_MAPS, map_descriptor, read_ahead
from clipmill.shards.opening import open_regular
from clipmill.shards.reader import Variant
from clipmill.shards.tars import TarFiles
from clipmill.train.data.outcomes import Reason
from clipmill.train.data.workers import Stuck

_UNKNOWN, _GOOD = 0, 1

# Bytes with begin and end of a part of them. A batch of parts is copied faster if each is cut out when it is copied.
Part = tuple[memoryview, int, int]


class MappedTars:
    """The tars of `variants`, numbered one variant after another. Thread-safe.

    The place of a byte is its offset if all tars were one file, so that one number says where a member lies. The maps
    that were made first are given up if the process has too many (`manifests/mapped_files.py`); whoever uses a part of
    one keeps it.

    Attributes:
        starts: int64, place of the first byte of each tar.
        has_origin: whether the tars are copies of others, from which `fetched` reads.
        num_readers: threads that fetch members; 0 if none has to be fetched.
    """

    has_origin = False
    num_readers = 0

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._files = [variant.tar_files for variant in variants]
        self._first = np.cumsum([0, *map(len, self._files)])
        self._sizes: NDArray[np.int64] = np.concatenate([files.sizes for files in self._files])
        self.starts: NDArray[np.int64] = np.cumsum(self._sizes) - self._sizes
        self._starts: list[int] = self.starts.tolist()
        self._views: list[memoryview | None] = [None] * len(self._sizes)
        self._maps: dict[int, _Map] = {}

    def require_files(self) -> None:
        """Raise a UserError if a tar is missing or differs in length from its commit."""
        for number in range(len(self._sizes)):
            try:
                self._require(number, self._path(number).stat())
            except OSError as error:
                column = self._files_of(number).directory.parent.name
                raise unusable_error(self._path(number), column, error.strerror or str(error)) from error

    def want(self, places: NDArray[np.int64]) -> None:
        """Name the places of all members that samples are in. Tars on local disks need no preparation."""

    def begin_fetching(self) -> None:
        """Bring tars that are wanted to this machine, in the background."""

    def describe(self) -> str:
        """Where the tars are, for the log; empty for those on local disks."""
        return ""

    def locate(self, place: int) -> tuple[int, int]:
        """The tar of a place, and the offset in it."""
        number = bisect_right(self._starts, place) - 1
        return number, place - self._starts[number]

    def name(self, number: int) -> str:
        """A tar, in messages."""
        return str(self._path(number))

    def are_mapped(self, places: NDArray[np.int64]) -> bool:
        """Whether `parts` can read all of some places."""
        return True

    def parts(self, places: NDArray[np.int64], size_bytes: NDArray[np.int64] | int) -> Iterator[Part]:
        """The bytes at some places, one part after another.

        Raises:
            UserError: a tar cannot be mapped any more.
        """
        numbers = np.searchsorted(self.starts, places, side="right") - 1
        begins = places - self.starts[numbers]
        ends: list[int] = (begins + size_bytes).tolist()
        try:
            views = {number: self._views[number] or self._mapped(number) for number in np.unique(numbers).tolist()}
        except OSError as error:
            raise UserError(f"data has changed during training: {error}", hint="see prep verify") from error
        return zip(map(views.__getitem__, numbers.tolist()), begins.tolist(), ends, strict=True)

    def view(self, number: int) -> memoryview | None:
        """A tar as a whole; None if it is not on this machine.

        Raises:
            OSError: it cannot be opened or mapped, or differs in length from its commit.
        """
        return self._views[number] or self._mapped(number)

    def fetched(self, number: int, offset: int, size: int) -> memoryview | None:
        """Bytes of a tar from its origin; None if it has none.

        Raises:
            OSError: they cannot be fetched.
        """
        return None

    def _mapped(self, number: int) -> memoryview:
        descriptor = open_regular(self._path(number))
        try:
            # The size of the open file: its name may refer to another one by now.
            self._require(number, os.fstat(descriptor))
            view = map_descriptor(descriptor, int(self._sizes[number]))
        finally:
            os.close(descriptor)
        self._views[number], self._maps[number] = view, _Map(self._views, number)
        OPEN_MAPS.note_use(self._maps[number])
        return view

    def _require(self, number: int, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_size != self._sizes[number]:
            raise OSError(errno.EIO, f"it has {found.st_size:,} bytes, its commit says {self._sizes[number]:,}")

    def _files_of(self, number: int) -> TarFiles:
        return self._files[bisect_right(self._first, number) - 1]

    def _path(self, number: int) -> Path:
        part = bisect_right(self._first, number) - 1
        return self._files[part].path(number - int(self._first[part]))


class _Map:
    """A tar that is mapped, among `views` (clipmill.manifests.mapped_files)."""

    def __init__(self, views: list[memoryview | None], number: int) -> None:
        self._views, self._number = views, number

    def close(self) -> bool:
        """Give up the map, as soon as no part of it is in use."""
        self._views[self._number] = None
        return True


def unusable_error(path: Path, column: str, why: str) -> UserError:
    """The error for a file of a column that cannot be used."""
    return UserError(
        f"{path} cannot be used: {why}",
        hint=f"prep verify lists all damage, and prep {column} makes damaged shards again",
    )


class Payload(NamedTuple):
    """Place and size of a member, header and array, and its checksum."""

    place: int
    size_bytes: int
    crc32: int


class Problem(NamedTuple):
    """Why a member must not be used."""

    reason: Reason
    detail: str


class VerifiedMembers:
    """The members of a column, by their numbers, each verified when it is first loaded. Thread-safe.

    Args:
        payload: of a member.
        noun: what a sample takes from a member, for messages.
    """

    def __init__(
        self, tars: MappedTars, num_members: int, payload: Callable[[int], Payload], *, column: str, noun: str
    ) -> None:
        self._tars, self._payload, self._what = tars, payload, f"its {noun} in the {column} column"
        self._state = np.full(num_members, _UNKNOWN, np.uint8)
        self._problems: dict[int, Problem] = {}
        self._turns: dict[int, threading.Lock] = {}

    def are_due(self, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `members` are the first occurrences of some that were not verified yet."""
        due, unknown = np.zeros(len(members), bool), np.flatnonzero(self._state[members] != _GOOD)
        due[unknown[np.unique(members[unknown], return_index=True)[1]]] = True
        return due

    def load(self, member: int) -> memoryview | Problem:
        """The bytes of a member, verified now unless they were before; or why they must not be used."""
        if (known := self._problems.get(member)) is not None:
            return known
        place, size_bytes, crc32 = self._payload(member)
        number, offset = self._tars.locate(place)
        try:
            view = self._tars.view(number)
            content = None if view is None else view[offset : offset + size_bytes]
            if content is None or not self._is_good(member, content, crc32):
                content = self._tars.fetched(number, offset, size_bytes)
                # Verified each time: the next time it is fetched anew.
                content = None if content is None or zlib.crc32(content) != crc32 else content
            if content is not None:
                return content
            problem = Problem("checksum", f"{self._where(number)} do not match their checksum")
        except UserError:  # credentials that are refused, for this tar and for all others
            raise
        except OSError as error:
            problem = Problem("shard_unreadable", f"{self._where(number)} cannot be read: {error.strerror or error}")
        return self._noted(member, problem)

    def give_up(self, member: int, stuck: Stuck) -> Problem:
        """Record that a member was not loaded in time; later requests for it fail at once instead of waiting."""
        number, _ = self._tars.locate(self._payload(member).place)
        return self._noted(member, Problem("stuck", f"{self._where(number)} were not read within {stuck.after_s:g} s"))

    def _noted(self, member: int, problem: Problem) -> Problem:
        # What cannot be fetched now may be there the next time.
        if not self._tars.has_origin:
            self._problems[member] = problem
        return problem

    def _is_good(self, member: int, content: memoryview, crc32: int) -> bool:
        """Whether mapped bytes match their checksum; they are compared once."""
        if self._state[member] == _UNKNOWN:
            with self._turns.setdefault(member, threading.Lock()):
                if self._state[member] == _UNKNOWN:
                    # A copy that cannot be read is fetched again like one that does not match.
                    with suppress(OSError) if self._tars.has_origin else nullcontext():
                        read_ahead(content)
                        if zlib.crc32(content) == crc32:
                            self._state[member] = _GOOD
            self._turns.pop(member, None)
        return bool(self._state[member] == _GOOD)

    def _where(self, number: int) -> str:
        return f"{self._what} ({self._tars.name(number)})"
