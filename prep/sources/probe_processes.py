"""Probe many sources in separate processes, so that a problem with one source does not affect the others.

A hostile or damaged file can make its reader crash or use all memory, and a dead mount can block it forever. A reader
without a heartbeat for `SILENCE_LIMIT_S` is killed, and its current source fails with a timeout. If a reader ends
without being killed by this module, its source may not be the cause, because memory may have been short. This source is
read again after all others, when no other reader runs. It fails only if its reader ends twice more. A new reader
continues with the next sources. A process that even SIGKILL cannot end (blocked inside the kernel) is abandoned.

`serve` runs in the reader. It reads paths as lines of JSON strings, and writes lines of JSON objects: heartbeats (the
first one when it has started) and, as the last line for each path, an object with `facts` or `failure`. It imports only
libav, which takes 0.1 s.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import Any

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.engines import CRASH_SIGNALS, die_with_parent, exit_reason
from clipmill.prep.sources.access import SourceFacts

SILENCE_LIMIT_S = 60.0  # longer than the kernel lets a lease block an `open` (45 s)
MEMORY_LIMIT_BYTES = 4 << 30  # address space: enough for a 16k frame and its reference frames
_HEARTBEAT, _HEARTBEAT_S = b"{}\n", 1.0
_QUEUE_LENGTH = 4  # number of sources queued at a reader, so that it never waits for its next source
_SPAWN_DELAY_S = 0.1  # delay before a further reader is started while all readers are busy
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from clipmill.prep.sources.probe_processes import serve; serve()"


def probe_each(
    paths: Sequence[str], *, max_processes: int, kept: "list[Reader] | None" = None
) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probe every path; yield (index in `paths`, result) in order of completion.

    Args:
        max_processes: Maximum number of readers. Fewer are started if results arrive quickly.
        kept: Idle readers from earlier calls, which are used first. At the end, the list contains the idle readers.
            None to end all readers.
    """
    suspects = []
    for number, outcome in _probe_side_by_side(paths, max_processes=max_processes, kept=kept):
        if isinstance(outcome, _ReaderEnded):
            suspects.append(number)
        else:
            yield number, outcome
    for number in suspects:
        for _ in range(2):
            ((_, outcome),) = _probe_side_by_side([paths[number]], max_processes=1)
            if not isinstance(outcome, _ReaderEnded):
                break
        yield number, outcome


def _probe_side_by_side(
    paths: Sequence[str], *, max_processes: int, kept: "list[Reader] | None" = None
) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probe every path, as `probe_each` does, but read no source twice."""
    waiting, retries = iter(enumerate(paths)), deque[tuple[int, str]]()
    readers = [] if kept is None else kept
    num_answered = 0
    try:
        while True:
            # Near the end, distribute the sources one at a time, because sources that are queued at a hanging reader
            # must wait until the reader is killed.
            ahead = min(_QUEUE_LENGTH, 1 + (len(paths) - num_answered) // (_QUEUE_LENGTH * max_processes))
            for reader in readers:
                while len(reader.given) < ahead and (question := _next(retries, waiting)) is not None:
                    reader.give(*question)
            busy = [reader for reader in readers if reader.given]
            if not busy:
                question = _next(retries, waiting)
                if question is None:
                    return
                readers.append(Reader())
                readers[-1].give(*question)
                continue
            ready = wait([reader.descriptor for reader in busy], timeout=_SPAWN_DELAY_S)
            # Starting a reader takes longer than reading most sources.
            is_slow = not ready and all(reader.has_started for reader in busy)
            if is_slow and len(busy) < max_processes and (question := _next(retries, waiting)) is not None:
                readers.append(Reader())
                readers[-1].give(*question)
            for reader in busy:
                for answer in reader.outcomes(is_ready=reader.descriptor in ready):
                    num_answered += 1
                    yield answer
                if not reader.is_alive:
                    readers.remove(reader)
                    retries.extend(reader.given)
    finally:
        for reader in [reader for reader in readers if kept is None or reader.given]:
            reader.end()
            readers.remove(reader)


def _next(retries: deque[tuple[int, str]], waiting: Iterator[tuple[int, str]]) -> tuple[int, str] | None:
    return retries.popleft() if retries else next(waiting, None)


class _ReaderEnded(SourceFailure):
    """The reader of a source ended without a result."""


class Reader:
    """A process that probes one source after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # read after the process has exited; it writes nothing before
            process_group=0,  # Ctrl-C is handled by the driver
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self.descriptor = self._answers.fileno()
        self._unread = b""
        self._last_answer_s = 0.0
        self.given: deque[tuple[int, str]] = deque()  # sources without a result; the first one is being read
        self.is_alive, self.has_started = True, False

    def give(self, number: int, path: str) -> None:
        """Queue the source `path` after earlier sources."""
        if not self.given:
            self._last_answer_s = time.monotonic()
        self.given.append((number, path))
        with suppress(BrokenPipeError):  # the exit of the process is detected when its results are read
            self._questions.write(json.dumps(path).encode() + b"\n")
            self._questions.flush()

    def outcomes(self, *, is_ready: bool) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
        """Yield the results that arrived since the last call; `is_ready` is True if there is data to read."""
        if not is_ready:
            if time.monotonic() - self._last_answer_s > SILENCE_LIMIT_S:
                self.end()
                message = f"opening or reading timed out after {SILENCE_LIMIT_S:.0f} s without data"
                yield self._settle(SourceFailure(FailureCode.TIMEOUT, message, is_lasting=False))
            return
        piece = os.read(self.descriptor, 1 << 16)
        if not piece:
            yield self._settle(self._end_failure())
            return
        self._last_answer_s, self.has_started = time.monotonic(), True
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for answer in map(json.loads, lines):
            if "facts" in answer:
                yield self._settle(SourceFacts(**answer["facts"]))
            elif answer:  # an empty object is a heartbeat
                code, message, is_lasting = answer["failure"]
                yield self._settle(SourceFailure(FailureCode(code), message, is_lasting=is_lasting))

    def _settle(self, outcome: SourceFacts | SourceFailure) -> tuple[int, SourceFacts | SourceFailure]:
        return self.given.popleft()[0], outcome

    def _end_failure(self) -> _ReaderEnded:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status, stderr = self._process.returncode, b""
        if status is not None and self._process.stderr is not None:
            stderr = self._process.stderr.read()
        self.end()
        is_crash = status is None or status >= 0 or -status in CRASH_SIGNALS
        last_line = (stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return _ReaderEnded(
            FailureCode.PROBE_FAILED if is_crash else FailureCode.WORKER_LOST,
            f"the process that read it ended with {exit_reason(status)}, twice while nothing else ran"
            + (f": {last_line}" if last_line else ""),
            is_lasting=False,
        )

    def end(self) -> None:
        """Terminate the process if possible."""
        self.is_alive = False
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        with suppress(BrokenPipeError):
            self._questions.close()
        self._answers.close()
        assert self._process.stderr is not None
        self._process.stderr.close()


def serve() -> None:
    """Main function of the reader: probe the paths on standard input until it is closed."""
    from clipmill.prep.sources.probe import probe  # not in the process that starts readers

    die_with_parent()
    # Limit memory: a file may claim frames of any size, and then the reader must fail rather than the machine.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep other output separate from the results
    shown_s = 0.0

    def show_life() -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _HEARTBEAT_S:
            shown_s = time.monotonic()
            answers.write(_HEARTBEAT)

    answers.write(_HEARTBEAT)
    for line in sys.stdin.buffer:
        shown_s = time.monotonic()
        try:
            answer: dict[str, Any] = {"facts": asdict(probe(json.loads(line), on_read=show_life))}
        except SourceFailure as failure:
            answer = {"failure": [str(failure.code), failure.message, failure.is_lasting]}
        answers.write(json.dumps(answer).encode() + b"\n")
