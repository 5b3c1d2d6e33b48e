"""From requests to batches, past samples that fail verification.

While some members are unverified, threads verify those of the next requests ahead of the loader; once all are known to
match, nothing is left to be done (clipmill.train.data.mapped_tars).
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch
from clipmill.train.data.latents.gather import Gather, RequestBlock
from clipmill.train.data.latents.requests import SegmentRequests, join
from clipmill.train.data.latents.segment_set import SegmentSet
from clipmill.train.data.mapped_tars import Payload, Problem, VerifiedMembers
from clipmill.train.data.outcomes import FailedSample, FailureBudget, SampleFailed
from clipmill.train.data.remote_maps import remote_parts
from clipmill.train.data.workers import Stuck, in_order

# Enough to keep a disk busy; one thread verifies several gigabytes per second.
_NUM_THREADS = 4
_NUM_AHEAD = 64  # members
_HELD_BYTES = 1 << 28  # of records that are fetched ahead
_STUCK_AFTER_S = 120.0

_Members = list[tuple[VerifiedMembers, NDArray[np.int64]]]  # of each column those that requests need


class FilledBatch(NamedTuple):
    """A batch, the samples that failed on the way to it, and the number of requests taken so far."""

    batch: Batch
    failed: tuple[FailedSample, ...]
    num_taken: int


def fill(
    blocks: Iterable[RequestBlock],
    gather: Gather,
    checksums: "Checksums | None",
    *,
    batch: int,
    max_failures: int | None,
) -> Iterator[FilledBatch]:
    """Batches of `batch` requests that match their checksums; the next good request takes the place of a failed one.

    The rest at the end of the blocks is a smaller batch, or an empty one if only failures are left.

    Args:
        checksums: None to verify nothing.

    Raises:
        TooManyFailures: more than `max_failures` requests failed.
    """
    waiting: list[SegmentRequests] = []
    failures = FailureBudget(max_failures)
    release = _nothing if checksums is None else checksums.release
    num_waiting = num_taken = 0

    def joined() -> FilledBatch:
        requests = join(waiting)
        filled = gather.fill(gather.block(requests), 0, len(requests)) if len(requests) else Batch()
        release()
        return FilledBatch(filled, failures.take(), num_taken)

    try:
        for block in blocks:
            with nullcontext() if checksums is None else checksums.verified(block.requests) as failed_of:
                begin = 0
                if failed_of is None and not waiting and not failures:
                    # Every epoch but the first takes this path; in batches of one, each further call is noticeable.
                    for begin in range(0, len(block) - batch + 1, batch):
                        num_taken += batch
                        yield FilledBatch(gather.fill(block, begin, begin + batch), (), num_taken)
                    begin = len(block) // batch * batch
                while begin < len(block):
                    end = min(begin + batch - num_waiting, len(block))
                    bad = failed_of(begin, end) if failed_of is not None else {}
                    for failure in bad.values():
                        failures.add(failure)
                    num_taken += end - begin
                    if not bad and end - begin == batch:
                        filled = FilledBatch(gather.fill(block, begin, end), failures.take(), num_taken)
                        release()
                        yield filled
                    else:
                        waiting.append(block.requests.take([row for row in range(begin, end) if row not in bad]))
                        num_waiting += len(waiting[-1])
                    if num_waiting == batch:
                        yield joined()
                        waiting, num_waiting = [], 0
                    begin = end
        if num_waiting or failures:
            yield joined()
    finally:
        release()


class Checksums:
    """Verification of the latents and the embeddings of a set."""

    def __init__(self, samples: SegmentSet) -> None:
        records = samples.records
        self._samples, self._remote = samples, remote_parts(samples.tars)
        self._handed_out: list[Payload] = []  # records that are held for a batch
        self._latents = VerifiedMembers(samples.tars, len(records), records.payload, column="latents", noun="bytes")
        self._text = None if samples.text is None else samples.text.verified(samples.tars)

    @contextmanager
    def held(self, chunk: int) -> Iterator[None]:
        """Hold the latents of a chunk; raises SampleFailed if they do not match their checksum."""
        payload = self._samples.records.payload(chunk)
        try:
            if problem := self._hold(self._latents, chunk, payload):
                raise SampleFailed(self._samples.key(chunk), reason=problem.reason, detail=problem.detail)
            yield
        finally:
            self._release(payload)

    def release(self) -> None:
        """Give back what is held for batches that were filled."""
        for payload in self._handed_out:
            self._release(payload)
        self._handed_out.clear()

    @contextmanager
    def verified(self, requests: SegmentRequests) -> "Iterator[Callable[[int, int], dict[int, FailedSample]] | None]":
        """Verify what `requests` need and nobody has verified yet, in their order and ahead of the caller.

        Yields a function of (begin, end) that returns the failures among requests[begin:end], by their index in
        `requests`; `end` must rise from call to call. Yields None if everything is known to match.
        """
        members: _Members = [(self._latents, requests.chunk)]
        if self._text is not None and self._samples.text is not None and requests.text_address is not None:
            members.append((self._text, self._samples.text.member_at(requests.text_address)))
        if not all(part.is_local for part in self._remote):
            with self._holding(requests, members) as failed_of:
                yield failed_of
            return
        if all(column.are_good(numbers) for column, numbers in members):
            yield None
            return
        verifying = _verify(members)
        next_index = next(verifying, None)

        def failed(begin: int, end: int) -> dict[int, FailedSample]:
            nonlocal next_index
            while next_index is not None and next_index < end:
                next_index = next(verifying, None)
            found: dict[int, FailedSample] = {}
            for column, numbers in members:
                for index in (begin + np.flatnonzero(column.bad(numbers[begin:end]))).tolist():
                    problem = column.problem(int(numbers[index]))
                    assert problem is not None
                    key = self._samples.key(int(requests.chunk[index]))
                    found.setdefault(index, FailedSample(int(requests.position[index]), key, *problem))
            return dict(sorted(found.items()))

        try:
            yield failed
        finally:
            verifying.close()

    @contextmanager
    def _holding(
        self, requests: SegmentRequests, members: _Members
    ) -> "Iterator[Callable[[int, int], dict[int, FailedSample]]]":
        """As `verified`, of tars that are not all mapped: records are held until `release`, and verified each time."""
        payloads = [self._samples.records.payload(chunk) for chunk in requests.chunk.tolist()]
        num_readers = max(part.num_readers for part in self._remote)
        ahead: dict[int, Payload] = {}  # that were asked for, and not handed out yet

        def hold(index: int) -> Problem | None:
            ahead[index] = payloads[index]
            problem = self._hold(self._latents, int(requests.chunk[index]), payloads[index])
            for column, numbers in members[1:]:  # always in the cache as a whole
                problem = problem or column.problem(int(numbers[index]))
            return problem

        holding = in_order(
            hold,
            range(len(requests)),
            num_threads=num_readers,
            num_ahead=2 * num_readers,
            stuck_after_s=_STUCK_AFTER_S,
            size_of=lambda index: payloads[index].size_bytes,
            max_bytes=_HELD_BYTES,
        )

        def failed(begin: int, end: int) -> dict[int, FailedSample]:
            found: dict[int, FailedSample] = {}
            for index in range(begin, end):
                _, problem = next(holding)
                self._handed_out.append(ahead.pop(index, payloads[index]))
                if isinstance(problem, Stuck):
                    problem = Problem("stuck", str(problem))
                if problem is not None:
                    key = self._samples.key(int(requests.chunk[index]))
                    found[index] = FailedSample(int(requests.position[index]), key, *problem)
            return found

        try:
            yield failed
        finally:
            holding.close()
            for payload in ahead.values():
                self._release(payload)

    def _hold(self, column: VerifiedMembers, number: int, payload: Payload) -> Problem | None:
        try:
            is_fetched = any(part.hold_record(payload.address, payload.size_bytes) for part in self._remote)
        except OSError as error:
            return column.unreadable(number, error)
        return column.verify(number) if is_fetched else column.problem(number)

    def _release(self, payload: Payload) -> None:
        for part in self._remote:
            part.release_record(payload.address, payload.size_bytes)


def _nothing() -> None:
    """What is there to release if nothing is held."""


def _verify(members: _Members) -> Generator[int, None, None]:
    """Verify the unknown ones of all `members` in the order of the requests.

    Yields the index of each request before its member is waited for: everything before that index is verified.
    """
    todo = sorted(
        (index, number) for number, (column, numbers) in enumerate(members) for index in column.unknown(numbers)
    )

    def verify(one: tuple[int, int]) -> Problem | None:
        index, number = one
        column, numbers = members[number]
        return column.verify(int(numbers[index]))

    verified = in_order(verify, todo, num_threads=_NUM_THREADS, num_ahead=_NUM_AHEAD, stuck_after_s=_STUCK_AFTER_S)
    try:
        for index, _ in todo:
            yield index
            (index, number), found = next(verified)
            column, numbers = members[number]
            column.record(int(numbers[index]), found)
    finally:
        verified.close()
