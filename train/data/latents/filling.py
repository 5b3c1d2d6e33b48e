"""From visits to batches: plainly, or past samples that have failed."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from train.data.batch import Batch
from train.data.latents.checksums import Checksums
from train.data.latents.gather import Gather, RequestBlock
from train.data.latents.segment_set import SegmentRequests, join
from train.data.outcomes import FailedSample, TooManyFailures


class Filled(NamedTuple):
    """A batch, the samples that failed on the way to it, and the visits taken so far."""

    batch: Batch
    failed: tuple[FailedSample, ...]
    num_taken: int


def fill(blocks: Iterable[RequestBlock], gather: Gather, *, batch: int) -> Iterator[Filled]:
    """Batches of `batch` visits; each block ends one, however many it then has."""
    num_taken = 0
    for block in blocks:
        for begin in range(0, len(block), batch):
            end = min(begin + batch, len(block))
            num_taken += end - begin
            yield Filled(gather.fill(block, begin, end), (), num_taken)


def fill_checked(
    blocks: Iterable[RequestBlock], gather: Gather, checksums: Checksums, *, batch: int, max_failures: int | None
) -> Iterator[Filled]:
    """Batches of `batch` visits whose bytes are those written; the next good visit takes the place of a failed one.

    What is left at the end of the blocks is a smaller batch, an empty one where only failures are left.

    Raises:
        TooManyFailures: more than `max_failures` visits failed.
    """
    waiting: list[SegmentRequests] = []
    failed: list[FailedSample] = []
    num_waiting = num_taken = num_failures = 0
    for block in blocks:
        with checksums.compared(block.requests) as failed_of:
            begin = 0
            if failed_of is None and not waiting and not failed:
                # As `fill` goes: this is every epoch but the first, where a batch of one shows each call.
                for begin in range(0, len(block) - batch + 1, batch):
                    num_taken += batch
                    yield Filled(gather.fill(block, begin, begin + batch), (), num_taken)
                begin = len(block) // batch * batch
            while begin < len(block):
                end = min(begin + batch - num_waiting, len(block))
                bad = failed_of(begin, end) if failed_of is not None else {}
                for failure in bad.values():
                    failed.append(failure)
                    num_failures += 1
                    if max_failures is not None and num_failures > max_failures:
                        raise TooManyFailures(tuple(failed))
                num_taken += end - begin
                if not bad and end - begin == batch:
                    yield Filled(gather.fill(block, begin, end), tuple(failed), num_taken)
                    failed = []
                else:
                    waiting.append(block.requests.take([row for row in range(begin, end) if row not in bad]))
                    num_waiting += len(waiting[-1])
                if num_waiting == batch:
                    yield _filled(waiting, failed, gather, num_taken=num_taken)
                    waiting, failed, num_waiting = [], [], 0
                begin = end
    if num_waiting or failed:
        yield _filled(waiting, failed, gather, num_taken=num_taken)


def _filled(waiting: list[SegmentRequests], failed: list[FailedSample], gather: Gather, *, num_taken: int) -> Filled:
    requests = join(waiting)
    batch = gather.fill(gather.block(requests), 0, len(requests)) if len(requests) else Batch()
    return Filled(batch, tuple(failed), num_taken)
