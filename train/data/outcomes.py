"""Outcomes of loading a sample (the sample, or a failure with a key and a reason), and batches of samples.

The life cycle of a failed sample answers the question "Why was this sample skipped?":

1. Reading, verifying or decoding raises `SampleFailed` with the chunk's key, a reason and a detail.
2. The reader returns a `FailedSample`. A sample that is not ready in time also becomes a `FailedSample` ("stuck").
3. The next sample in order replaces the failed sample in the batch, and `LoadedBatch.failed` contains the failure. If
   there are more than `max_failures` failures, `TooManyFailures` is raised instead. The failures in this error are
   counted like all others.
4. Before each step, `clipmill.train.engine.failures.FailureLog` gathers the failures of all ranks. The first rank
   appends a line for each failure to failures.jsonl in the run folder: position in the order of samples, chunk, reason,
   detail. Once more than --max-failures samples have failed, all ranks raise `FailedWork`, which ends the run.
5. A resumed run removes the lines of samples after its checkpoint, and loads these samples again. The results page
   lists the remaining failures.

Evaluations during training report the number of failures as `num_failed`, and result files list them as `failed`.

Reasons:

    shard_unreadable  a tar, an index or a remote file cannot be read
    checksum          the bytes do not match the checksum in the index
    undecodable       the decoder reports an error, or the file is truncated
    frame_missing     the decoder does not output a requested frame
    chunks_differ     the chunks of a clip differ in resolution or colour space
    chunk_missing     a requested moment lies outside its video or span, or in a missing chunk (clips at given times)
    empty_span        no frame of the file lies in the span of the caption (streams only)
    stuck             reading or decoding took longer than the time limit

Captions that can never be shown, because their span is empty or their chunk is missing, are not failures. They are
omitted when the data are opened (clipmill.train.data.caption_rows), and the first line of the log states their number
by reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import NoneType
from typing import Any, Literal, NamedTuple

from clipmill.manifests.errors import ClipmillError, FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.train.data.batch import Batch
from clipmill.train.data.order import Cursor

Reason = Literal[
    "shard_unreadable",
    "checksum",
    "undecodable",
    "frame_missing",
    "chunks_differ",
    "chunk_missing",
    "empty_span",
    "stuck",
]

Unusable = Literal[
    "empty_span",
    "other_split",
    "video_without_chunks",
    "begins_after_the_last_chunk",
    "chunk_missing",
    "not_selected",
]
_MAX_NAMED = 3  # maximum number of keys in a message

# Descriptions that follow the count in remarks: for 1 caption, and for any other number of captions.
_DESCRIPTIONS: dict[Unusable, tuple[str, str]] = {
    "empty_span": ("with an empty span", "with an empty span"),
    "other_split": ("shows seconds of another split", "show seconds of other splits"),
    "video_without_chunks": ("of a video without chunks", "of videos without chunks"),
    "begins_after_the_last_chunk": ("begins after the last chunk", "begin after the last chunk"),
    "chunk_missing": ("with a missing chunk", "with missing chunks"),
    "not_selected": ("not selected", "not selected"),
}


def remarks_of(num_unusable: Mapping[Unusable, int], num_shortened: int) -> list[str]:
    """Return remarks on omitted captions, by reason, and on shortened captions."""
    parts = [f"{count:,} {_DESCRIPTIONS[reason][count != 1]}" for reason, count in num_unusable.items()]
    return [*parts, f"{num_shortened:,} shortened to the end of the video"] if num_shortened else parts


class OmittedItems:
    """Counter of omitted items, by reason, with the key of the first item for each reason."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, key: str, *, count: int = 1) -> None:
        """Count items. `reason` follows the count in messages, as in "3 without an image"."""
        previous, first = self._counts.get(reason, (0, key))
        self._counts[reason] = previous + count, first

    def as_list(self) -> list[tuple[str, int, str]]:
        """Return each reason with its number of items and the key of the first item."""
        return [(reason, *count) for reason, count in self._counts.items()]

    def describe(self) -> list[str]:
        """Return a remark for the log for each reason."""
        return [f"{count:,} {reason} (the first: {first})" for reason, (count, first) in self._counts.items()]


@dataclass(frozen=True)
class FailedSample:
    """Failed sample, as recorded in a line of failures.jsonl.

    Attributes:
        position: Position in the order of samples.
        key: Key of the chunk that failed, or of the sample in its tar.
        reason: Reason for the failure.
        detail: Description of the failure.
    """

    position: int
    key: str
    reason: Reason
    detail: str


class SampleFailed(ClipmillError):
    """A sample could not be read or decoded. See `FailedSample` for the arguments."""

    def __init__(self, key: str, *, reason: Reason, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key, self.reason, self.detail = key, reason, detail

    def at(self, position: int) -> FailedSample:
        """Return the failure of the sample at `position`."""
        return FailedSample(position, self.key, self.reason, self.detail)


def describe_repeats(keys: Sequence[str]) -> str:
    """Return a suffix for a message that names the chunks that failed repeatedly; '' if all keys are different."""
    if len(distinct_keys := list(dict.fromkeys(keys))) == len(keys):
        return ""
    names = ", ".join([*distinct_keys[:_MAX_NAMED], *(["..."] if len(distinct_keys) > _MAX_NAMED else [])])
    return f": {count_noun(len(distinct_keys), 'file or chunk', 'files or chunks')} failed repeatedly ({names})"


class TooManyFailures(ClipmillError):
    """There are more failures than allowed.

    Args:
        failed: Failures since the last batch, including the failure that exceeds the limit.
    """

    def __init__(self, failed: tuple[FailedSample, ...]) -> None:
        super().__init__(f"{failed[-1].key}: {failed[-1].detail}")
        self.failed = failed


class FailureBudget:
    """Counter of failures, with a limit. The counter also stores the failures since the last batch.

    Args:
        max_failures: Maximum number of failures; None for no limit.
    """

    def __init__(self, max_failures: int | None) -> None:
        self._max_failures, self._num_failures = max_failures, 0
        self._since_batch: list[FailedSample] = []

    def add(self, failure: FailedSample) -> None:
        """Record a failure; raise TooManyFailures if the limit is exceeded."""
        self._since_batch.append(failure)
        self._num_failures += 1
        if self._max_failures is not None and self._num_failures > self._max_failures:
            raise TooManyFailures(tuple(self._since_batch))

    def __len__(self) -> int:
        return len(self._since_batch)

    def take(self) -> tuple[FailedSample, ...]:
        """Return the failures since the last batch, and clear them."""
        if not self._since_batch:
            return ()
        failed, self._since_batch = tuple(self._since_batch), []
        return failed


def list_failures(failures: list[FailedSample], failed: Sequence[FailedSample], *, max_failures: int) -> None:
    """Append failures to a list for the user's program; raise FailedWork if there are more than `max_failures`."""
    failures += failed
    if failed and len(failures) > max_failures:
        raise FailedWork(
            f"{count_noun(len(failures), 'failure')}, more than max_failures={max_failures}"
            f"{describe_repeats([failure.key for failure in failures])}; "
            f"the last one: {failed[-1].key}: {failed[-1].detail}; all are in `failures`"
        )


class LoadedBatch(NamedTuple):  # a dataclass takes twice as long to create, which matters for batches of one sample
    """Batch, samples that failed before the batch was full, and cursor after the batch."""

    batch: Batch
    failed: tuple[FailedSample, ...]
    cursor: Cursor


_NO_SAMPLES = frozenset({FailedSample, NoneType})


class BatchBuilder:
    """Builder of batches from loaded samples.

    Args:
        batch: Number of samples in a batch.
        collate: Function that collates samples into a batch, as `BatchRing.collate` does.
        max_failures: See `FailureBudget`.

    Attributes:
        num_batches: Number of batches so far, including the current batch.
        num_taken: Number of outcomes that `fill` has used so far.
    """

    def __init__(self, batch: int, collate: Callable[[Sequence[Any]], Batch], *, max_failures: int | None) -> None:
        self._batch, self._collate = batch, collate
        self._samples: list[Any] = []
        self._failures = FailureBudget(max_failures)
        self.num_batches, self.num_taken = 1, 0

    def fill(self, outcomes: Iterator[Any]) -> bool:
        """Add outcomes until the batch is full; return False if there are not enough outcomes."""
        while num_missing := self._batch - len(self._samples):
            # Take several outcomes at a time. Latents are only copied, so taking their outcomes one by one would double
            # the time per batch.
            new_outcomes = list(islice(outcomes, num_missing))
            if not new_outcomes:
                return False
            self.num_taken += len(new_outcomes)
            if _NO_SAMPLES.isdisjoint(map(type, new_outcomes)):
                self._samples += new_outcomes
            else:
                for outcome in new_outcomes:
                    self.add(outcome)
        return True

    def add(self, outcome: Any) -> bool:
        """Add a sample or a failure; ignore None (an empty position). Return True if the batch is now full."""
        if isinstance(outcome, FailedSample):
            self._failures.add(outcome)
        elif outcome is not None:
            self._samples.append(outcome)
            return len(self._samples) == self._batch
        return False

    @property
    def is_empty(self) -> bool:
        """True if neither a sample nor a failure has been added since the last batch."""
        return not (self._samples or self._failures)

    def take(self, cursor: Cursor) -> LoadedBatch:
        """Return the current batch, even if it is not full, and start the next one."""
        batch = self._collate(self._samples) if self._samples else Batch()
        self._samples = []
        self.num_batches += 1
        return LoadedBatch(batch, self._failures.take(), cursor)
