"""Checking source files, some of which may be on a mount that does not respond.

A thread blocked inside the kernel cannot be terminated. Each check therefore has a timeout, after which its thread is
abandoned and another thread takes over its remaining files. Abandoned threads do not delay the exit of the program.
"""

import os
import time
from array import array
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.access import STAT_LIMIT_S, access_failure

_SHORT_LIMIT_S = 1.0  # timeout for other files in a folder where one timed out: a dead mount may hold thousands
_SLICE = 4096
_TICK_S = 0.5
NO_FILE = -1


@dataclass(frozen=True)
class FileStates:
    """Size and modification time of files.

    Attributes:
        size_bytes: int64 [files]; NO_FILE if the file could not be checked.
        mtime_ns: modification time, int64 [files]; 0 if the file could not be checked. That of an object also depends
            on its etag (`clipmill.prep.sources.remote.object_state`).
        failures: row -> why the file could not be checked.
    """

    size_bytes: np.ndarray
    mtime_ns: np.ndarray
    failures: dict[int, SourceFailure]


def stat_files(paths: pa.ChunkedArray, *, num_threads: int) -> FileStates:
    """Return the size and modification time of each of `paths`, which may be URLs.

    Raises:
        UserError: a bucket does not exist, or it refuses the credentials.
    """
    is_url = np.asarray(pc.match_substring(paths, "://"))
    if not is_url.any():
        return _stat_local(paths, num_threads=num_threads)
    from clipmill.prep.sources.remote import remote_states

    rows = np.flatnonzero(is_url)
    states = FileStates(np.full(len(paths), NO_FILE, np.int64), np.zeros(len(paths), np.int64), {})
    for number, found in remote_states(paths.take(pa.array(rows)).to_pylist()):
        _record(states, int(rows[number]), found)
    here = np.flatnonzero(~is_url)
    local = _stat_local(paths.take(pa.array(here)), num_threads=num_threads)
    states.size_bytes[here], states.mtime_ns[here] = local.size_bytes, local.mtime_ns
    states.failures.update({int(here[row]): failure for row, failure in local.failures.items()})
    return states


def _stat_local(paths: pa.ChunkedArray, *, num_threads: int) -> FileStates:
    states = FileStates(np.full(len(paths), NO_FILE, np.int64), np.zeros(len(paths), np.int64), {})
    waiting: SimpleQueue[_Slice] = SimpleQueue()
    ended: SimpleQueue[_Slice] = SimpleQueue()
    begins = range(0, len(paths), _SLICE)
    for begin in begins:
        waiting.put(_Slice(begin, paths.slice(begin, _SLICE)))
    working: set[_Slice] = set()
    slow_folders: set[str] = set()
    for _ in range(min(num_threads, len(begins))):
        _start(waiting, working, ended)
    num_left = len(begins)
    while num_left:
        try:
            done = ended.get(timeout=_TICK_S)
            if done.is_abandoned:
                continue
        except Empty:
            stuck = next((one for one in list(working) if one.is_overdue(slow_folders)), None)
            if stuck is None:
                continue
            done = stuck
            rest = done.abandon()
            slow_folders.add(os.path.dirname(rest.given[0].as_py()))  # noqa: PTH120 - as in `is_overdue`
            states.failures[rest.begin] = SourceFailure(
                FailureCode.TIMEOUT, "the file system does not respond", is_lasting=False
            )
            waiting.put(_Slice(rest.begin + 1, rest.given.slice(1)))
            num_left += 1
            _start(waiting, working, ended)
        num_left -= 1
        working.discard(done)
        part = slice(done.begin, done.begin + done.num_done)
        states.size_bytes[part], states.mtime_ns[part] = np.array(done.found).reshape(-1, 2).T
        states.failures.update({done.begin + row: failure for row, failure in done.failures.items()})
    return states


def _record(states: FileStates, row: int, found: tuple[int, int] | SourceFailure) -> None:
    if isinstance(found, SourceFailure):
        states.failures[row] = found
    else:
        states.size_bytes[row], states.mtime_ns[row] = found


@dataclass(eq=False)
class _Slice:
    """A slice of the paths, beginning at row `begin`, with the results so far.

    Attributes:
        found: size and modification time of one file after another; as numbers, which cost less than pairs.
        failures: number of a file in the slice -> why it could not be checked.
    """

    begin: int
    given: pa.ChunkedArray
    paths: list[str] = field(default_factory=list)  # as long as they are being checked: those of all slices are large
    found: "array[int]" = field(default_factory=lambda: array("q"))
    failures: dict[int, SourceFailure] = field(default_factory=dict)
    since_s: float = 0.0
    is_abandoned: bool = False

    def stat_all(self) -> None:
        add = self.found.append  # `abandon` assigns a new array
        self.paths = self.given.to_pylist()
        for path in self.paths:
            self.since_s = time.monotonic()
            try:
                state = os.stat(path)  # noqa: PTH116 - a Path for each of a million files takes its time
                size_bytes, mtime_ns = state.st_size, state.st_mtime_ns
            except (OSError, ValueError) as error:
                if not self.is_abandoned:
                    self.failures[self.num_done] = access_failure(error)
                size_bytes, mtime_ns = NO_FILE, 0
            if self.is_abandoned:
                return
            add(size_bytes)
            add(mtime_ns)

    @property
    def num_done(self) -> int:
        return len(self.found) // 2

    def is_overdue(self, slow_folders: set[str]) -> bool:
        done = self.num_done
        if done == len(self.paths):
            return False
        is_slow = os.path.dirname(self.paths[done]) in slow_folders  # noqa: PTH120 - a path as it is written
        return time.monotonic() - self.since_s > min(STAT_LIMIT_S, _SHORT_LIMIT_S if is_slow else STAT_LIMIT_S)

    def abandon(self) -> "_Slice":
        """Abandon the thread blocked on a path; return that path and those after it as a new slice."""
        self.is_abandoned = True
        self.found = self.found[: 2 * self.num_done]
        return _Slice(self.begin + self.num_done, self.given.slice(self.num_done))


def _start(waiting: "SimpleQueue[_Slice]", working: set[_Slice], ended: "SimpleQueue[_Slice]") -> None:
    def work() -> None:
        while True:
            try:
                mine = waiting.get_nowait()
            except Empty:
                return
            mine.since_s = time.monotonic()
            working.add(mine)
            mine.stat_all()
            ended.put(mine)
            if mine.is_abandoned:
                return

    Thread(target=work, daemon=True).start()
