"""Loading samples in threads, in order: what readers of clips and of images have in common.

Requests that follow one another are loaded in groups, so that samples of one chunk may share its decoding. Samples of
remote data are loaded in two steps, each by threads of its own: most of those that read wait for a network.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from clipmill.train.data.batch import Batch, BatchRing, Sample
from clipmill.train.data.loader import Block, LoaderSettings, SampleRequest
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.workers import Stuck, in_order

Outcome = Sample | FailedSample
_Group = list[SampleRequest | None]  # requests that are loaded together; None for an empty position of the order


@dataclass(frozen=True)
class ReadAhead:
    """Loading in two steps.

    Attributes:
        read: Function of a group of requests; it does not raise for samples that cannot be read.
        load: Function of what was read; gives what `ThreadedReader.load` does.
        num_threads: Number of threads that read.
    """

    read: Callable[[Sequence[SampleRequest]], Any]
    load: Callable[[Any], list[Outcome]]
    num_threads: int


class ThreadedReader:
    """Base of the readers whose samples threads load (clipmill.train.data.loader.Reader).

    Attributes:
        mixture: Import path of the reader of such samples of several data folders.
        decoder: Decoder of chunks, which the readers of a mixture share; None where there are no chunks.
    """

    mixture: ClassVar[str] = "clipmill.train.data.mixed_samples:MixedReader"
    decoder: Any = None

    @property
    def ahead(self) -> ReadAhead | None:
        """How samples are read ahead of loading; None if loading them reads them."""
        return None

    def load(self, requests: Sequence[SampleRequest]) -> list[Outcome]:
        """Load the samples of a group of requests, in their order; requests of a group may share work."""
        raise NotImplementedError

    def key(self, sample: int) -> str:
        """Name of a sample in failures."""
        raise NotImplementedError

    def place(self, sample: int) -> str:
        """Where the data of a sample are, as the end of a failure's detail; empty if there is one place only."""
        return ""

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[Sample]], Batch]:
        """The function that makes batches of samples, for one iteration."""
        return BatchRing(loading.batch, pin=loading.pin, can_keep=loading.can_keep).collate

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[Outcome | None]:
        """The samples or failures of some blocks, in order; None for an empty position."""
        ahead = self.ahead
        num_ahead = max(1, loading.num_ahead // loading.group)

        def load(item: tuple[_Group, Any]) -> list[Outcome] | Stuck:
            group, read = item
            if isinstance(read, Stuck):
                return read
            return self.load(_requests_in(group)) if ahead is None else ahead.load(read)

        with closing(_read(_groups(blocks, loading.group), ahead, loading)) as items:
            loaded = in_order(
                load,
                items,
                num_threads=loading.num_threads,
                num_ahead=num_ahead,
                stuck_after_s=loading.stuck_after_s,
                # Nothing new is begun while the caller sleeps, so two items for each thread are queued meanwhile.
                num_together=max(1, min(loading.batch // loading.group, num_ahead - 2 * loading.num_threads)),
            )
            for (group, _), outcomes in loaded:
                if isinstance(outcomes, Stuck):
                    outcomes = [
                        FailedSample(request.position, self.key(request.sample), "stuck", str(outcomes))
                        for request in _requests_in(group)
                    ]
                remaining = iter(outcomes)
                for request in group:
                    outcome = None if request is None else next(remaining)
                    if isinstance(outcome, FailedSample) and request is not None:
                        outcome = replace(outcome, detail=f"{outcome.detail}{self.place(request.sample)}")
                    yield outcome


def _groups(blocks: Iterator[Block], group: int) -> Iterator[_Group]:
    """The requests of some blocks: groups of the order in training, single ones in an evaluation."""
    requests = (
        (position, None if sample < 0 else SampleRequest(sample, position, block.seed))
        for block in blocks
        for sample, position in zip(block.samples.tolist(), block.positions.tolist(), strict=True)
    )
    # A run that is resumed inside a group loads the rest of it first.
    for _, members in groupby(
        requests, lambda pair: -1 - pair[0] if pair[1] is not None and pair[1].seed is None else pair[0] // group
    ):
        yield [request for _, request in members]


def _read(
    groups: Iterator[_Group], ahead: ReadAhead | None, loading: LoaderSettings
) -> Generator[tuple[_Group, Any], None, None]:
    """The groups, each with what was read of it, or Stuck."""
    if ahead is None:
        yield from ((group, None) for group in groups)
        return
    read, num_threads = ahead.read, ahead.num_threads
    yield from in_order(
        lambda group: read(_requests_in(group)),
        groups,
        num_threads=num_threads,
        num_ahead=2 * num_threads,
        stuck_after_s=loading.stuck_after_s,
    )


def _requests_in(group: _Group) -> list[SampleRequest]:
    return [request for request in group if request is not None]
