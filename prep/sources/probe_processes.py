"""Probe many sources in separate processes, so that a problem with one source does not affect the others.

A hostile or damaged file can make its reader process crash or use all memory. A dead mount can block a reader forever.
A reader without a heartbeat for `SILENCE_LIMIT_S` is killed, and its current source fails with a timeout. If a reader
ends for any other reason, its source may not be the cause, because memory may have been short. The source is probed
again after all other sources, when no other reader runs. The source fails only if its reader ends two more times. A new
reader continues with the next sources. A process that is blocked inside the kernel is abandoned, because even SIGKILL
cannot end it.

`serve` runs in the reader. It reads paths as lines of JSON strings, and writes lines of JSON objects. An empty object
is a heartbeat; the first one is sent when the reader has started. The last object for each path contains `facts` or
`failure`. A reader imports little besides libav, so it starts within 0.1 s.

On a cluster, `probe_on_workers` divides the sources into tasks, and each worker starts a few readers. A result
from a worker is used only if it describes a file of the expected size. A failure may be caused by the worker's machine,
which may lack a mount, credentials or memory, or have a different file at the path. Therefore this process probes the
sources without a usable result again.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from multiprocessing.connection import wait
from pathlib import PurePath
from typing import Any

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.engines import CRASH_SIGNALS, MachineFault, Outcome, RefusedNode, die_with_parent, exit_reason
from clipmill.prep.sources.access import SourceFacts

SILENCE_LIMIT_S = 60.0  # longer than a file lease (`fcntl(2)`) may block an `open` (45 s by default)
MEMORY_LIMIT_BYTES = 4 << 30  # limit of a reader's address space: enough for a 16k frame and its reference frames
_HEARTBEAT, _HEARTBEAT_S = b"{}\n", 1.0
_QUEUE_LENGTH = 4  # maximum number of sources queued at a reader, so that it never waits for its next source
_SPAWN_DELAY_S = 0.1  # delay before another reader is started while all readers are busy
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from clipmill.prep.sources.probe_processes import serve; serve()"


def probe_each(
    paths: Sequence[str], *, max_processes: int, pool: "list[Reader] | None" = None
) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probe every path; yield (index in `paths`, result) in order of completion.

    Args:
        max_processes: Maximum number of readers. Fewer are started if results arrive quickly.
        pool: Idle readers from earlier calls, which are used first. Readers that are idle at the end stay in this list.
            If it is None, all readers end with the call.
    """
    suspects = []
    for index, result in _probe_once(paths, max_processes=max_processes, pool=pool):
        if isinstance(result, _ReaderExit):
            suspects.append(index)
        else:
            yield index, result
    for index in suspects:
        for _ in range(2):
            ((_, result),) = _probe_once([paths[index]], max_processes=1)
            if not isinstance(result, _ReaderExit):
                break
        yield index, result


def _probe_once(
    paths: Sequence[str], *, max_processes: int, pool: "list[Reader] | None" = None
) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probe every path once; the result is a `_ReaderExit` if the reader of the source ended."""
    sources, retries = iter(enumerate(paths)), deque[tuple[int, str]]()
    readers = [] if pool is None else pool
    num_done = 0
    try:
        while True:
            # Near the end, distribute the sources one at a time, because sources that are queued at a hanging reader
            # must wait until the reader is killed.
            length = min(_QUEUE_LENGTH, 1 + (len(paths) - num_done) // (_QUEUE_LENGTH * max_processes))
            for reader in readers:
                while len(reader.queue) < length and (source := _next_source(retries, sources)) is not None:
                    reader.enqueue(*source)
            busy_readers = [reader for reader in readers if reader.queue]
            if not busy_readers:
                source = _next_source(retries, sources)
                if source is None:
                    return
                readers.append(Reader())
                readers[-1].enqueue(*source)
                continue
            ready_descriptors = wait([reader.descriptor for reader in busy_readers], timeout=_SPAWN_DELAY_S)
            # Starting a reader takes longer than reading most sources.
            is_slow = not ready_descriptors and all(reader.has_started for reader in busy_readers)
            if is_slow and len(busy_readers) < max_processes and (source := _next_source(retries, sources)) is not None:
                readers.append(Reader())
                readers[-1].enqueue(*source)
            for reader in busy_readers:
                for result in reader.results(is_ready=reader.descriptor in ready_descriptors):
                    num_done += 1
                    yield result
                if not reader.is_alive:
                    readers.remove(reader)
                    retries.extend(reader.queue)
    finally:
        for reader in [reader for reader in readers if pool is None or reader.queue]:
            reader.end()
            readers.remove(reader)


def _next_source(retries: deque[tuple[int, str]], sources: Iterator[tuple[int, str]]) -> tuple[int, str] | None:
    return retries.popleft() if retries else next(sources, None)


class _ReaderExit(SourceFailure):
    """Failure of a source whose reader ended without a result."""


class Reader:
    """Process that probes one source after another.

    Attributes:
        descriptor: File descriptor that becomes readable when results arrive.
        queue: Index and path of each source without a result; the first source is being read.
        is_alive: False once the process has ended.
        has_started: True once the process has sent its first heartbeat.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # read after the process has exited, because it writes nothing before that
            process_group=0,  # only the process that starts readers handles Ctrl-C
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.descriptor = self._output.fileno()
        self._unparsed = b""
        self._last_output_s = 0.0
        self.queue: deque[tuple[int, str]] = deque()
        self.is_alive, self.has_started = True, False

    def enqueue(self, index: int, path: str) -> None:
        """Send a source to the process, which probes it after all earlier sources."""
        if not self.queue:
            self._last_output_s = time.monotonic()
        self.queue.append((index, path))
        with suppress(BrokenPipeError):  # the exit of the process is detected when its results are read
            self._input.write(json.dumps(path).encode() + b"\n")
            self._input.flush()

    def results(self, *, is_ready: bool) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
        """Yield the results that arrived since the last call; `is_ready` is True if there is data to read."""
        if not is_ready:
            if time.monotonic() - self._last_output_s > SILENCE_LIMIT_S:
                self.end()
                message = f"opening or reading timed out after {SILENCE_LIMIT_S:.0f} s without data"
                yield self._finish_source(SourceFailure(FailureCode.TIMEOUT, message, is_lasting=False))
            return
        data = os.read(self.descriptor, 1 << 16)
        if not data:
            yield self._finish_source(self._exit_failure())
            return
        self._last_output_s, self.has_started = time.monotonic(), True
        *lines, self._unparsed = (self._unparsed + data).split(b"\n")
        for values in map(json.loads, lines):
            if "facts" in values:
                yield self._finish_source(SourceFacts(**values["facts"]))
            elif values:  # an empty object is a heartbeat
                code, message, is_lasting = values["failure"]
                yield self._finish_source(SourceFailure(FailureCode(code), message, is_lasting=is_lasting))

    def _finish_source(self, result: SourceFacts | SourceFailure) -> tuple[int, SourceFacts | SourceFailure]:
        return self.queue.popleft()[0], result

    def _exit_failure(self) -> _ReaderExit:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status, stderr = self._process.returncode, b""
        if status is not None and self._process.stderr is not None:
            stderr = self._process.stderr.read()
        self.end()
        is_crash = status is None or status >= 0 or -status in CRASH_SIGNALS
        last_line = (stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return _ReaderExit(
            FailureCode.PROBE_FAILED if is_crash else FailureCode.WORKER_LOST,
            f"the process that read the source ended with {exit_reason(status)}, also in two attempts without other "
            f"readers{f': {last_line}' if last_line else ''}",
            is_lasting=False,
        )

    def end(self) -> None:
        """Terminate the process if possible."""
        self.is_alive = False
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        with suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        assert self._process.stderr is not None
        self._process.stderr.close()


def serve() -> None:
    """Probe the paths on standard input until it is closed. This is the main function of a reader."""
    from clipmill.prep.sources.probe import probe  # the process that starts readers does not load libav

    die_with_parent()
    # Limit memory: a file may claim frames of any size, and the reader must fail before the machine does.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MEMORY_LIMIT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep all other output separate from the results
    last_output_s = 0.0

    def send_heartbeat() -> None:
        nonlocal last_output_s
        if time.monotonic() - last_output_s > _HEARTBEAT_S:
            last_output_s = time.monotonic()
            output.write(_HEARTBEAT)

    output.write(_HEARTBEAT)
    for line in sys.stdin.buffer:
        last_output_s = time.monotonic()
        try:
            values: dict[str, Any] = {"facts": asdict(probe(json.loads(line), on_read=send_heartbeat))}
        except SourceFailure as failure:
            values = {"failure": [str(failure.code), failure.message, failure.is_lasting]}
        output.write(json.dumps(values).encode() + b"\n")


MAX_SOURCES = 64  # maximum number of sources per task; starting a task takes a few milliseconds
MAX_BYTES = 1 << 30  # maximum size of a task with several sources; reading this much takes seconds
# Readers wait for disks and buckets most of the time. Four readers fit in the memory that a worker of `video` reserves.
_READERS_PER_WORKER = 4
_readers: list[Reader] = []  # readers that a worker keeps between tasks; they end when the worker ends


@dataclass(frozen=True)
class ProbeTask:
    """Sources that a worker probes: their indices among all sources, and their paths or URLs."""

    indices: range
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the task in the engine's list of tasks."""
        return f"probe {PurePath(self.paths[0]).name}"


@dataclass(frozen=True)
class ProbeResults:
    """Results of a task, in the order of its paths."""

    results: tuple[SourceFacts | SourceFailure, ...]

    @property
    def machine_fault(self) -> MachineFault | None:
        """Failure that the worker's machine may have caused; None unless every source failed."""
        failures = [result for result in self.results if isinstance(result, SourceFailure)]
        faults = (MachineFault(f"{failure.code}: {failure.message}") for failure in failures if not failure.is_lasting)
        return next(faults, None) if len(failures) == len(self.results) else None


Run = Callable[[Sequence[ProbeTask]], Iterator[Outcome[ProbeTask, ProbeResults] | RefusedNode | None]]


def probe_on_workers(
    paths: Sequence[str], sizes: Sequence[int], *, run: Run, max_processes: int
) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probe every path in the workers of an engine; yield (index in `paths`, result) in order of completion.

    Args:
        sizes: Size of each source in bytes, as measured by this process.
        run: Function that applies `probe_group` to tasks in the workers of an engine, and yields the outcomes.
        max_processes: Maximum number of readers in this process. If all sources fit in one task, only this process
            probes them.
    """
    from clipmill.prep.core.progress import warn_refused

    tasks, remaining_indices = divide(paths, sizes), list[int]()
    if len(tasks) == 1:
        yield from probe_each(paths, max_processes=max_processes)
        return
    for outcome in run(tasks):
        if isinstance(outcome, RefusedNode):
            warn_refused(outcome)
        elif outcome is not None:
            results = () if outcome.result is None else outcome.result.results  # None if the workers were lost
            for index, result in zip_longest(outcome.task.indices, results):
                if isinstance(result, SourceFacts) and result.size_bytes == sizes[index]:
                    yield index, result
                else:
                    remaining_indices.append(index)
    outcomes = probe_each([paths[index] for index in remaining_indices], max_processes=max_processes)
    yield from ((remaining_indices[position], result) for position, result in outcomes)


def divide(paths: Sequence[str], sizes: Sequence[int]) -> list[ProbeTask]:
    """Divide sources into tasks of at most MAX_SOURCES and MAX_BYTES. A larger source gets its own task."""
    tasks, begin, num_bytes = list[ProbeTask](), 0, 0
    for index, size_bytes in enumerate(sizes):
        if index > begin and (index - begin == MAX_SOURCES or num_bytes + size_bytes > MAX_BYTES):
            tasks.append(ProbeTask(range(begin, index), tuple(paths[begin:index])))
            begin, num_bytes = index, 0
        num_bytes += size_bytes
    return [*tasks, ProbeTask(range(begin, len(paths)), tuple(paths[begin:]))]


def probe_group(task: ProbeTask) -> ProbeResults:
    """Probe the sources of a task, in a worker."""
    results = dict(probe_each(task.paths, max_processes=_READERS_PER_WORKER, pool=_readers))
    return ProbeResults(tuple(results[index] for index in range(len(task.paths))))
