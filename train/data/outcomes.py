"""From outcomes to batches: good samples fill them, failed ones are handed over beside them and budgeted."""

from dataclasses import dataclass
from typing import Any, Literal

from manifests.errors import ClipmillError
from train.data.batch import Batch, BatchRing, Sample
from train.data.cursor import Cursor

# A sample that cannot be had: named, counted and never replaced by another one in its place.


Reason = Literal["shard_unreadable", "checksum", "undecodable", "frame_missing", "chunks_differ", "empty_span", "stuck"]


class SampleFailed(ClipmillError):
    """One sample could not be read or decoded.

    Args:
        key: the chunk at fault.
        reason: a code.
        detail: what happened, in words.
    """

    def __init__(self, key: str, *, reason: Reason, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class FailedSample:
    """A line of failures.jsonl."""

    position: int  # in the order of samples
    key: str
    reason: Reason
    detail: str

    def as_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return {"position": self.position, "key": self.key, "reason": self.reason, "detail": self.detail}


class TooManyFailures(ClipmillError):
    """The failure budget is spent.

    Args:
        failed: the failures since the last batch, the one too many included.
    """

    def __init__(self, failed: tuple[FailedSample, ...]) -> None:
        super().__init__(f"{failed[-1].key}: {failed[-1].detail}")
        self.failed = failed


@dataclass(frozen=True)
class LoadedBatch:
    """A batch, the samples that failed on the way to it, and the place from which this rank's next one goes on."""

    batch: Batch
    failed: tuple[FailedSample, ...]
    place: Cursor

    @property
    def next_position(self) -> int:
        """Position of `place`."""
        return self.place.position


class BatchFilling:
    """The batch that is being put together."""

    def __init__(self, batch: int, *, pin: bool, max_failures: int | None) -> None:
        self._batch, self._max_failures = batch, max_failures
        self._ring = BatchRing(batch, pin=pin)
        self._good: list[Sample] = []
        self._failed: list[FailedSample] = []
        self._num_failures = 0
        self.num_batches = 1  # this one included

    def add(self, outcome: Sample | FailedSample | None) -> bool:
        """Whether the batch is full now."""
        if isinstance(outcome, FailedSample):
            self._failed.append(outcome)
            self._num_failures += 1
            if self._max_failures is not None and self._num_failures > self._max_failures:
                raise TooManyFailures(tuple(self._failed))
            return False
        if outcome is not None:
            self._good.append(outcome)
        return len(self._good) == self._batch and outcome is not None

    @property
    def has_any(self) -> bool:
        """Whether there is anything to hand over yet."""
        return bool(self._good or self._failed)

    def take(self, place: Cursor) -> LoadedBatch:
        """The batch as it is now; the next one begins."""
        batch = self._ring.collate(self._good) if self._good else Batch()
        loaded = LoadedBatch(batch, tuple(self._failed), place)
        self._good, self._failed = [], []
        self.num_batches += 1
        return loaded
