"""Compares members of mapped tars with the checksums of their indexes, each once in a process: at its first visit.

What is known of a member is one byte. While members are unknown, threads compare those of the next visits ahead of the
loader; once all are known to be good, nothing is left to be done.

A member that differs stays as it is until the process ends, and so does one that is changed after its first visit.
"""

import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.latents.mapped_tars import MappedTars
from train.data.latents.segment_set import SegmentRequests, SegmentSet
from train.data.latents.text_rows import TextMembers
from train.data.outcomes import FailedSample, Reason, SampleFailed
from train.data.workers import Stuck, in_order

_UNKNOWN, _GOOD, _BAD = 0, 1, 2
# Enough to keep a disk busy; one thread compares several gigabytes a second.
_NUM_THREADS = 4
_NUM_AHEAD = 64  # members
_STUCK_AFTER_S = 120.0


class Payload(NamedTuple):
    """Where a member lies in the mapped tars, header and array, and its checksum."""

    address: int
    size_bytes: int
    crc32: int


class Problem(NamedTuple):
    """Why a member must not be shown."""

    reason: Reason
    detail: str


class CheckedMembers:
    """Members of one column, by their numbers; safe to use from many threads.

    Args:
        payload: of a member.
        noun: what a sample has in a member, for messages: "bytes".
    """

    def __init__(
        self, tars: MappedTars, num_members: int, payload: Callable[[int], Payload], *, column: str, noun: str
    ) -> None:
        self._tars, self._payload, self._what = tars, payload, f"its {noun} in the {column} column"
        self._state = np.zeros(num_members, np.uint8)
        self._problems: dict[int, Problem] = {}

    def are_good(self, members: NDArray[np.int64]) -> bool:
        """Whether all of `members` were compared and are what was written."""
        return bool((self._state[members] == _GOOD).all())

    def unknown(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in `members` where one stands for the first time that has not been compared yet, ascending."""
        places = np.flatnonzero(self._state[members] == _UNKNOWN)
        return np.sort(places[np.unique(members[places], return_index=True)[1]])

    def bad(self, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `members` must not be shown, of those that were compared."""
        return self._state[members] == _BAD

    def problem(self, member: int) -> Problem | None:
        """Why a member must not be shown, None where it is what was written; compares it now if need be."""
        if self._state[member] == _UNKNOWN:
            self.note(member, self.compare(member))
        return self._problems.get(member)

    def compare(self, member: int) -> Problem | None:
        """Reads a member and compares it."""
        address, size_bytes, crc32 = self._payload(member)
        where = f"{self._what} ({self._tars.path_at(address)})"
        try:
            self._tars.read_ahead(address, size_bytes)
        except OSError as error:
            return Problem("shard_unreadable", f"{where} cannot be read: {error.strerror or error}")
        if zlib.crc32(self._tars.bytes_at(address, size_bytes)) != crc32:
            return Problem("checksum", f"{where} are not those written")
        return None

    def note(self, member: int, found: Problem | Stuck | None) -> None:
        """Keeps what comparing a member gave."""
        if isinstance(found, Stuck):
            found = Problem("stuck", f"{self._what} were not there after {found.after_s:g} s")
        if found is not None:
            self._problems[member] = found
        self._state[member] = _GOOD if found is None else _BAD


def text_members(tars: MappedTars, text: TextMembers) -> CheckedMembers:
    """The members that hold embeddings, by their places in `text`."""

    def payload(member: int) -> Payload:
        return Payload(int(text.address[member]), int(text.size_bytes[member]), int(text.crc32[member]))

    return CheckedMembers(tars, len(text.address), payload, column="text", noun="embeddings")


class Checksums:
    """What is known of the latents and the embeddings of a set."""

    def __init__(self, samples: SegmentSet) -> None:
        records = samples.records

        def payload(chunk: int) -> Payload:
            return Payload(*records.payload(chunk), int(records.crc32[chunk]))

        self._samples = samples
        self._latents = CheckedMembers(samples.tars, len(records), payload, column="latents", noun="bytes")
        self._text = None if samples.text is None else text_members(samples.tars, samples.text)

    def require_good(self, chunk: int) -> None:
        """Raises SampleFailed where the latents of a chunk are not those written."""
        if problem := self._latents.problem(chunk):
            raise SampleFailed(self._samples.key(chunk), reason=problem.reason, detail=problem.detail)

    @contextmanager
    def compared(self, requests: SegmentRequests) -> "Iterator[Callable[[int, int], dict[int, FailedSample]] | None]":
        """Compares what `visits` need and nobody has compared, in their order and ahead of the caller.

        Gives a function of (begin, end): those of visits[begin:end] that must not be shown, by their place in `visits`;
        the ends rise from call to call. None where all are known to be good.
        """
        members = [(self._latents, requests.chunk)]
        if self._text is not None and (of_text := self._text_members_of(requests)) is not None:
            members.append((self._text, of_text))
        if all(checked.are_good(numbers) for checked, numbers in members):
            yield None
            return
        comparing = _compare(members)
        next_place = next(comparing, None)

        def failed(begin: int, end: int) -> dict[int, FailedSample]:
            nonlocal next_place
            while next_place is not None and next_place < end:
                next_place = next(comparing, None)
            found: dict[int, FailedSample] = {}
            for checked, numbers in members:
                for place in (begin + np.flatnonzero(checked.bad(numbers[begin:end]))).tolist():
                    problem = checked.problem(int(numbers[place]))
                    assert problem is not None
                    key = self._samples.key(int(requests.chunk[place]))
                    found.setdefault(place, FailedSample(int(requests.position[place]), key, *problem))
            return dict(sorted(found.items()))

        try:
            yield failed
        finally:
            comparing.close()

    def _text_members_of(self, requests: SegmentRequests) -> NDArray[np.int64] | None:
        text = self._samples.text
        if text is None or requests.text_address is None:
            return None
        return np.searchsorted(text.address, requests.text_address, side="right") - 1


def _compare(members: list[tuple[CheckedMembers, NDArray[np.int64]]]) -> Generator[int, None, None]:
    """Compares the unknown ones of all `members` in the order of their places.

    Gives the place of each before it is waited for: everything before that place is known.
    """
    todo = sorted(
        (place, number)
        for number, (checked, of_requests) in enumerate(members)
        for place in checked.unknown(of_requests)
    )

    def compare(one: tuple[int, int]) -> Problem | None:
        place, number = one
        checked, of_requests = members[number]
        return checked.compare(int(of_requests[place]))

    compared = in_order(compare, todo, num_threads=_NUM_THREADS, num_ahead=_NUM_AHEAD, stuck_after_s=_STUCK_AFTER_S)
    try:
        for place, _ in todo:
            yield place
            (place, number), found = next(compared)
            checked, of_requests = members[number]
            checked.note(int(of_requests[place]), found)
    finally:
        compared.close()
