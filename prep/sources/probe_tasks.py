"""Probe sources in the workers of an engine, so that all nodes of a cluster share the work of reading.

A result from a worker is used only if it describes a file of the expected size. A failure may be caused by the worker's
machine, which may lack a mount, credentials or memory, or have a different file at the path. Therefore this process
probes the sources without a usable result again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePath

from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.progress import warn_refused
from clipmill.prep.engines import MachineFault, Outcome, RefusedNode
from clipmill.prep.sources.access import SourceFacts
from clipmill.prep.sources.probe_processes import Reader, probe_each

MAX_SOURCES = 64  # maximum number of sources per task; each task costs the driver a few milliseconds
MAX_BYTES = 1 << 30  # maximum size of a task with several sources; reading this many bytes takes seconds
# Readers wait for disks and buckets most of the time. Four readers fit in the memory that a worker of `video` reserves.
_READERS_PER_WORKER = 4
_readers: list[Reader] = []  # readers that a worker keeps between tasks; they end when the worker ends


@dataclass(frozen=True)
class ProbeTask:
    """Sources to probe: their numbers in the list of all sources, and their paths or URLs."""

    numbers: range
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the task in the engine's list of tasks."""
        return f"probe {PurePath(self.paths[0]).name}"


@dataclass(frozen=True)
class Probed:
    """Results of a task, in the order of its paths."""

    results: tuple[SourceFacts | SourceFailure, ...]

    @property
    def machine_fault(self) -> MachineFault | None:
        """Failure that the worker's machine may have caused, if every source failed."""
        failures = [result for result in self.results if isinstance(result, SourceFailure)]
        passing = (MachineFault(f"{failure.code}: {failure.message}") for failure in failures if not failure.is_lasting)
        return next(passing, None) if len(failures) == len(self.results) else None


Run = Callable[[Sequence[ProbeTask]], Iterator[Outcome[ProbeTask, Probed] | RefusedNode | None]]


def probe_on_workers(
    paths: Sequence[str], sizes: Sequence[int], *, run: Run, max_processes: int
) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probe every path; yield (index in `paths`, result) in order of completion.

    Args:
        sizes: Size of each source in bytes, as this process sees it.
        run: Function that applies `probe_group` to tasks in the workers of an engine, and yields its outcomes.
        max_processes: Maximum number of readers in this process, which probes the sources itself if they fit in one
            task.
    """
    tasks, left = divide(paths, sizes), list[int]()
    if len(tasks) == 1:
        yield from probe_each(paths, max_processes=max_processes)
        return
    for outcome in run(tasks):
        if isinstance(outcome, RefusedNode):
            warn_refused(outcome)
        elif outcome is not None:
            results = () if outcome.result is None else outcome.result.results  # None if the workers were lost
            for number, result in zip_longest(outcome.task.numbers, results):
                if isinstance(result, SourceFacts) and result.size_bytes == sizes[number]:
                    yield number, result
                else:
                    left.append(number)
    again = probe_each([paths[number] for number in left], max_processes=max_processes)
    yield from ((left[index], result) for index, result in again)


def divide(paths: Sequence[str], sizes: Sequence[int]) -> list[ProbeTask]:
    """Divide sources into tasks of at most MAX_SOURCES and MAX_BYTES. A larger source gets its own task."""
    tasks, begin, num_bytes = list[ProbeTask](), 0, 0
    for number, size_bytes in enumerate(sizes):
        if number > begin and (number - begin == MAX_SOURCES or num_bytes + size_bytes > MAX_BYTES):
            tasks.append(ProbeTask(range(begin, number), tuple(paths[begin:number])))
            begin, num_bytes = number, 0
        num_bytes += size_bytes
    return [*tasks, ProbeTask(range(begin, len(paths)), tuple(paths[begin:]))]


def probe_group(task: ProbeTask) -> Probed:
    """Probe the sources of a task, in a worker."""
    results = dict(probe_each(task.paths, max_processes=_READERS_PER_WORKER, kept=_readers))
    return Probed(tuple(results[index] for index in range(len(task.paths))))
