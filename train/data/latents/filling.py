"""From requests to batches, past samples that fail verification.

While some members are unverified, threads verify those of the next requests ahead of the loader; once all are known to
match, nothing is left to be done (train.data.mapped_tars).
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.batch import Batch
from train.data.latents.gather import Gather, RequestBlock
from train.data.latents.requests import SegmentRequests, join
from train.data.latents.segment_set import SegmentSet
from train.data.mapped_tars import Problem, VerifiedMembers
from train.data.outcomes import FailedSample, FailureBudget, SampleFailed
from train.data.workers import in_order

# Enough to keep a disk busy; one thread verifies several gigabytes per second.
_NUM_THREADS = 4
_NUM_AHEAD = 64  # members
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
    num_waiting = num_taken = 0

    def joined() -> FilledBatch:
        requests = join(waiting)
        filled = gather.fill(gather.block(requests), 0, len(requests)) if len(requests) else Batch()
        return FilledBatch(filled, failures.take(), num_taken)

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
                    yield FilledBatch(gather.fill(block, begin, end), failures.take(), num_taken)
                else:
                    waiting.append(block.requests.take([row for row in range(begin, end) if row not in bad]))
                    num_waiting += len(waiting[-1])
                if num_waiting == batch:
                    yield joined()
                    waiting, num_waiting = [], 0
                begin = end
    if num_waiting or failures:
        yield joined()


class Checksums:
    """Verification of the latents and the embeddings of a set."""

    def __init__(self, samples: SegmentSet) -> None:
        records = samples.records
        self._samples = samples
        self._latents = VerifiedMembers(samples.tars, len(records), records.payload, column="latents", noun="bytes")
        self._text = None if samples.text is None else samples.text.verified(samples.tars)

    def require_good(self, chunk: int) -> None:
        """Raise SampleFailed if the latents of a chunk do not match their checksum."""
        if problem := self._latents.problem(chunk):
            raise SampleFailed(self._samples.key(chunk), reason=problem.reason, detail=problem.detail)

    @contextmanager
    def verified(self, requests: SegmentRequests) -> "Iterator[Callable[[int, int], dict[int, FailedSample]] | None]":
        """Verify what `requests` need and nobody has verified yet, in their order and ahead of the caller.

        Yields a function of (begin, end) that returns the failures among requests[begin:end], by their index in
        `requests`; `end` must rise from call to call. Yields None if everything is known to match.
        """
        members: _Members = [(self._latents, requests.chunk)]
        if self._text is not None and self._samples.text is not None and requests.text_address is not None:
            members.append((self._text, self._samples.text.member_at(requests.text_address)))
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
