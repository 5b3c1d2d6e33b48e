"""Probing many sources in processes of their own, so that what one source does to its reader befalls that source alone.

A hostile or damaged file can make its reader wait for ever (a dead mount), crash, or take all memory. A reader that
shows no sign of life for `SILENCE_LIMIT_S` is killed, as is one that ends by itself; its source has failed by name and
a new reader takes the others. A process that even SIGKILL does not end (it waits inside the kernel) is left behind.

The reader's side is `serve`: it reads lines of JSON strings (paths) and writes lines of JSON objects, of which the last
for each path has `facts` or `failure`, and the others are signs of life. It imports nothing but libav: 0.1 s.
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
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from prep.core.failures import FailureCode, SourceFailure
from prep.engines import die_with_parent
from prep.sources.probe import SourceFacts, probe

SILENCE_LIMIT_S = 60.0  # longer than the kernel lets a lease hold up an `open` (45 s)
MEMORY_LIMIT_BYTES = 4 << 30  # of address space: enough for a frame of 16k and what it refers to
_SIGN_OF_LIFE_S = 1.0
_GIVEN_AT_ONCE = 4  # so that a reader has the next source when it has read one
_IMPATIENCE_S = 0.1  # until another reader is started beside those that are still busy
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from prep.sources.probe_processes import serve; serve()"


def probe_each(paths: Sequence[str], *, max_processes: int) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
    """Probes every path: its number in `paths` and what came of it, in the order in which they end.

    Args:
        max_processes: readers at a time; there are fewer as long as the answers come quickly.
    """
    waiting, again = iter(enumerate(paths)), deque[tuple[int, str]]()
    readers: list[_Reader] = []
    num_answered = 0
    try:
        while True:
            # Towards the end one at a time: what is given to a reader that hangs waits for its end.
            ahead = min(_GIVEN_AT_ONCE, 1 + (len(paths) - num_answered) // (_GIVEN_AT_ONCE * max_processes))
            for reader in readers:
                while len(reader.given) < ahead and (question := _next(again, waiting)) is not None:
                    reader.give(*question)
            busy = [reader for reader in readers if reader.given]
            if not busy:
                question = _next(again, waiting)
                if question is None:
                    return
                readers.append(_Reader())
                readers[-1].give(*question)
                continue
            ready = wait([reader.descriptor for reader in busy], timeout=_IMPATIENCE_S)
            if not ready and len(busy) < max_processes and (question := _next(again, waiting)) is not None:
                readers.append(_Reader())
                readers[-1].give(*question)
            for reader in busy:
                for answer in reader.outcomes(is_ready=reader.descriptor in ready):
                    num_answered += 1
                    yield answer
                if not reader.is_alive:
                    readers.remove(reader)
                    again.extend(reader.given)
    finally:
        for reader in readers:
            reader.end()


def _next(again: deque[tuple[int, str]], waiting: Iterator[tuple[int, str]]) -> tuple[int, str] | None:
    return again.popleft() if again else next(waiting, None)


class _Reader:
    """One process that probes the sources that it is given, one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # read when it has ended; it says nothing before
            process_group=0,  # Ctrl-C is for the driver
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self.descriptor = self._answers.fileno()
        self._unread = b""
        self._heard_s = 0.0
        self.given: deque[tuple[int, str]] = deque()  # sources without an answer; it reads the first
        self.is_alive = True

    def give(self, number: int, path: str) -> None:
        """Asks for the source `path`, after those that were asked for before."""
        if not self.given:
            self._heard_s = time.monotonic()
        self.given.append((number, path))
        with suppress(BrokenPipeError):  # its end is seen by the end of its answers
            self._questions.write(json.dumps(path).encode() + b"\n")
            self._questions.flush()

    def outcomes(self, *, is_ready: bool) -> Iterator[tuple[int, SourceFacts | SourceFailure]]:
        """What came of sources since the last call; `is_ready`: there is something to read."""
        if not is_ready:
            if time.monotonic() - self._heard_s > SILENCE_LIMIT_S:
                self.end()
                message = f"the file could not be opened, or gave nothing to read, for {SILENCE_LIMIT_S:.0f} s"
                yield self._answered(SourceFailure(FailureCode.TIMEOUT, message, is_lasting=False))
            return
        piece = os.read(self.descriptor, 1 << 16)
        if not piece:
            yield self._answered(self._ended())
            return
        self._heard_s = time.monotonic()
        *lines, self._unread = (self._unread + piece).split(b"\n")
        yield from (self._answered(_from_json(answer)) for answer in map(json.loads, lines) if answer)

    def _answered(self, outcome: SourceFacts | SourceFailure) -> tuple[int, SourceFacts | SourceFailure]:
        return self.given.popleft()[0], outcome

    def _ended(self) -> SourceFailure:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        status, said = self._process.returncode, b""
        if status is not None and self._process.stderr is not None:
            said = self._process.stderr.read()
        self.end()
        last_line = (said.decode("utf-8", "replace").strip().splitlines() or ["without a word"])[-1]
        how = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        message = f"the process that read it ended with {how}: {last_line}"
        return SourceFailure(FailureCode.PROBE_FAILED, message, is_lasting=False)

    def end(self) -> None:
        """Ends the process, if it can be ended."""
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
    """The reader: answers the paths of standard input until it ends."""
    die_with_parent()
    _limit_memory()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what else is printed must not look like an answer
    for line in sys.stdin.buffer:
        answer = _answer(json.loads(line), on_sign=lambda: answers.write(b"{}\n"))
        answers.write(json.dumps(answer).encode() + b"\n")


def _answer(path: str, *, on_sign: Callable[[], object]) -> dict[str, Any]:
    shown_s = time.monotonic()

    def on_read() -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > _SIGN_OF_LIFE_S:
            shown_s = time.monotonic()
            on_sign()

    try:
        return {"facts": asdict(probe(Path(path), on_read=on_read))}
    except SourceFailure as failure:
        return {"failure": [str(failure.code), failure.message, failure.is_lasting]}


def _from_json(answer: dict[str, Any]) -> SourceFacts | SourceFailure:
    if "facts" in answer:
        return SourceFacts(**answer["facts"])
    code, message, is_lasting = answer["failure"]
    return SourceFailure(FailureCode(code), message, is_lasting=is_lasting)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
