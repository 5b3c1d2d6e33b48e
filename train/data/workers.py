"""Worker threads that return results in the order of the work items, and `ThreadedReader`, which uses these threads.

Threads are used instead of processes, because decoding, checksums and resizing release the interpreter lock, and
nothing has to be copied between processes. All threads are daemon threads, so that a thread that is blocked in a
decoder or by a file system does not prevent the program from exiting.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.train.data.batch import Batch, BatchRing, Sample
from clipmill.train.data.clip_frames import rgb_frames
from clipmill.train.data.loader import Block, LoaderSettings, SampleRequest
from clipmill.train.data.outcomes import FailedSample

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_POLL_S = 1.0
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class StuckResult:
    """Placeholder for a result that was not ready in time. Its string form is the detail of the failure."""

    after_s: float

    def __str__(self) -> str:
        return f"it was not ready after {self.after_s:g} s"


@dataclass
class _Task(Generic[_Item, _Result]):
    item: _Item
    done: threading.Event = field(default_factory=threading.Event)
    start_s: float | None = None
    results: list[_Result] = field(default_factory=list)  # empty until the work is done
    error: BaseException | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)

    def is_late(self, after_s: float) -> bool:
        is_running = self.start_s is not None and not self.done.is_set() and not self.abandoned.is_set()
        return is_running and time.monotonic() - (self.start_s or 0.0) > after_s

    def outcome(self) -> _Result:
        if self.error is not None:
            raise self.error
        return self.results[0]


class _Pool(Generic[_Item, _Result]):
    def __init__(self, work: Callable[[_Item], _Result], *, num_threads: int) -> None:
        self._work = work
        self._queue: SimpleQueue[_Task[_Item, _Result] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self.add_thread()

    def add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, item: _Item) -> "_Task[_Item, _Result]":
        task: _Task[_Item, _Result] = _Task(item)
        self._queue.put(task)
        return task

    def abandon(self, tasks: "Iterable[_Task[_Item, _Result]]") -> None:
        """Give up tasks, and replace the thread of each task with a new thread."""
        for task in tasks:
            task.abandoned.set()
            self.add_thread()

    def close(self, waiting: "Iterable[_Task[_Item, _Result]]") -> None:
        """Stop the threads, and wait for them up to a time limit, because a thread may be blocked."""
        for task in waiting:
            task.abandoned.set()
        for _ in self._threads:
            self._queue.put(None)
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            # The garbage collector may close a generator in one of these threads.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if task.abandoned.is_set():
                continue
            task.start_s = time.monotonic()
            try:
                task.results.append(self._work(task.item))
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                task.error = error
            task.done.set()
            if task.abandoned.is_set():
                return  # another thread has replaced this thread


def map_in_order(
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    num_threads: int,
    num_ahead: int,
    stuck_after_s: float,
    size_of: Callable[[_Item], int] = lambda item: 0,
    max_bytes: int = 0,
    num_together: int = 1,
) -> Generator[tuple[_Item, _Result | StuckResult], None, None]:
    """Yield (item, work(item)) in the order of `items`. Threads work at most `num_ahead` items ahead of the caller.

    Args:
        work: Function that threads call with an item.
        items: Work items. The iterable is advanced in the caller's thread.
        stuck_after_s: Time limit for an item, in seconds. If the limit is exceeded, `StuckResult` is yielded instead of
            the result. The thread cannot be stopped, so a new thread replaces it.
        size_of: Function that returns the size of an item in bytes.
        max_bytes: Maximum total size of the items ahead of the caller; 0 for no limit. A single item may be larger.
        num_together: Number of results that the caller uses together. A waiting caller is woken when the last of them
            is ready, not for each result, because every wake-up takes the interpreter lock from the threads.

    Raises:
        Exception: `work` raised this error for an item. All results of earlier items have been yielded.
    """
    pool = _Pool(work, num_threads=num_threads)
    waiting: deque[_Task[_Item, _Result]] = deque()
    pending_bytes = 0

    def wait_for(task: _Task[_Item, _Result]) -> None:
        while not (task.done.wait(min(_POLL_S, stuck_after_s)) or task.abandoned.is_set()):
            # Check all running tasks, because this task may be queued while other tasks block all threads.
            pool.abandon([other for other in waiting if other.is_late(stuck_after_s)])

    def first_result() -> tuple[_Item, _Result | StuckResult]:
        task = waiting[0]
        if not task.done.is_set():
            # Wait for the first task too, because it may take longer than the last one.
            wait_for(waiting[min(num_together, len(waiting)) - 1])
            wait_for(task)
        nonlocal pending_bytes
        waiting.popleft()
        pending_bytes -= size_of(task.item)
        return task.item, StuckResult(stuck_after_s) if task.abandoned.is_set() else task.outcome()

    try:
        for item in items:
            while waiting and pending_bytes + size_of(item) > max_bytes > 0:
                yield first_result()
            waiting.append(pool.submit(item))
            pending_bytes += size_of(item)
            if len(waiting) >= num_ahead:
                yield first_result()
        while waiting:
            yield first_result()
    finally:
        pool.close(waiting)


Outcome = Sample | FailedSample
_Group = list[SampleRequest | None]  # requests that are loaded together; None for an empty position


@dataclass(frozen=True)
class ReadAhead:
    """Functions that load samples in two steps: reading bytes, and turning the bytes into samples.

    Attributes:
        read: Function that reads the bytes for a group of requests. It does not raise if a sample cannot be read.
        load: Function that takes the result of `read`, and returns what `ThreadedReader.load` returns.
        num_threads: Number of threads that read.
    """

    read: Callable[[Sequence[SampleRequest]], Any]
    load: Callable[[Any], list[Outcome]]
    num_threads: int


class ThreadedReader(ABC):
    """Base class of readers that load samples with threads (clipmill.train.data.loader.Reader).

    Consecutive requests are loaded in groups, so that a chunk is decoded once for several samples. Samples of remote
    data are loaded in two steps by separate threads, because a reading thread mostly waits for the network.

    Attributes:
        mixture: Import path of the reader for a mixture of such samples from several data folders.
        decoder: Decoder of chunks, shared by all readers of a mixture; None for samples that are not in chunks.
    """

    mixture: ClassVar[str] = "clipmill.train.data.mixed_samples:MixedReader"
    decoder: Any = None

    @property
    def read_ahead(self) -> ReadAhead | None:
        """Functions that load samples in two steps; None if `load` does both steps."""
        return None

    @abstractmethod
    def load(self, requests: Sequence[SampleRequest]) -> list[Outcome]:
        """Load the samples of a group of requests, in order. Requests of a group can share work."""

    @abstractmethod
    def key(self, sample: int) -> str:
        """Return the name that identifies a sample in failures."""

    def span_us(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end of rows in their videos, in microseconds; 0 for samples without times."""
        return np.zeros_like(rows), np.zeros_like(rows)

    def video_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each row's video; by default the row itself, as if each row were a separate video."""
        return rows

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Return the span of the video that an evaluation shows for a sample: start and end, in seconds."""
        return 0.0, 0.0

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return the frames that a model sees in an evaluation, RGB [H, W, 3]; [] if the sample cannot be read."""
        [outcome] = self.load([SampleRequest(sample, sample, None)])
        if isinstance(outcome, FailedSample):
            return []
        video = outcome["video"]
        if video.ndim == 2:  # YUV planes
            size_px = math.isqrt(video.shape[1] * 2 // 3)
            video = rgb_frames(video, outcome["colour"], size_px=size_px)
        return list(video[:num_frames])

    def deviations(self) -> list[str]:
        """Return remarks on the number of samples that deviate from the settings; by default no remarks."""
        return []

    def folder_suffix(self, sample: int) -> str:
        """Return a suffix for a failure's detail that names the sample's data folder; empty outside mixtures."""
        return ""

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[Sample]], Batch]:
        """Return a function that collates samples into batches. Each iteration uses a new function."""
        return BatchRing(loading.batch, pin=loading.pin, can_keep=loading.can_keep).collate

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[Outcome | None]:
        """Yield the samples or failures of the blocks, in order; None for an empty position."""
        read_ahead = self.read_ahead
        num_ahead = max(1, loading.num_ahead // loading.group)

        def load(item: tuple[_Group, Any]) -> list[Outcome] | StuckResult:
            group, contents = item
            if isinstance(contents, StuckResult):
                return contents
            return self.load(_requests_in(group)) if read_ahead is None else read_ahead.load(contents)

        with closing(_read(_groups(blocks, loading.group), read_ahead, loading)) as items:
            results = map_in_order(
                load,
                items,
                num_threads=loading.num_threads,
                num_ahead=num_ahead,
                stuck_after_s=loading.stuck_after_s,
                # No items are submitted while the caller sleeps, so leave at least two queued items for each thread.
                num_together=max(1, min(loading.batch // loading.group, num_ahead - 2 * loading.num_threads)),
            )
            for (group, _), outcomes in results:
                if isinstance(outcomes, StuckResult):
                    outcomes = [
                        FailedSample(request.position, self.key(request.sample), "stuck", str(outcomes))
                        for request in _requests_in(group)
                    ]
                outcome_iterator = iter(outcomes)
                for request in group:
                    outcome = None if request is None else next(outcome_iterator)
                    if isinstance(outcome, FailedSample) and request is not None:
                        outcome = replace(outcome, detail=f"{outcome.detail}{self.folder_suffix(request.sample)}")
                    yield outcome


def _groups(blocks: Iterator[Block], group: int) -> Iterator[_Group]:
    """Yield the requests of the blocks in groups: the order's groups in training, single requests in an evaluation."""
    requests = (
        (position, None if sample < 0 else SampleRequest(sample, position, block.seed))
        for block in blocks
        for sample, position in zip(block.samples.tolist(), block.positions.tolist(), strict=True)
    )
    # A run that is resumed in the middle of a group first loads the rest of the group.
    for _, members in groupby(
        requests, lambda pair: -1 - pair[0] if pair[1] is not None and pair[1].seed is None else pair[0] // group
    ):
        yield [request for _, request in members]


def _read(
    groups: Iterator[_Group], read_ahead: ReadAhead | None, loading: LoaderSettings
) -> Generator[tuple[_Group, Any], None, None]:
    """Yield each group with its bytes, or with `StuckResult` after a timeout; with None if `load` reads the bytes."""
    if read_ahead is None:
        yield from ((group, None) for group in groups)
        return
    read, num_threads = read_ahead.read, read_ahead.num_threads
    yield from map_in_order(
        lambda group: read(_requests_in(group)),
        groups,
        num_threads=num_threads,
        num_ahead=2 * num_threads,
        stuck_after_s=loading.stuck_after_s,
    )


def _requests_in(group: _Group) -> list[SampleRequest]:
    return [request for request in group if request is not None]
