"""Counting, logging and fault injection in a watched process.

The configuration is passed in environment variables, which nested worker processes inherit:

    CLIPMILL_TORTURE_WATCH   folders, as LABEL=PATH lines; operations elsewhere are not affected
    CLIPMILL_TORTURE_LOG     file to which each operation is appended: role, point, and for a rename the old name
    CLIPMILL_TORTURE_VERSIONS  file to which the SHA-256 of every file that is renamed to a watched name is appended
    CLIPMILL_TORTURE_POINT   point at which the fault is injected, once
    CLIPMILL_TORTURE_FAULT   kind of fault:
                             kill, kill-after  the command is killed (SIGKILL) before or after the operation
                             kill-worker       only the process at the point is killed, before the operation
                             kill-2, kill-3    as kill-worker, for the first 2 or 3 processes that reach the point
                             kill-each         as kill-worker, for every process that reaches the point
                             kill-started      the program that was started at the point is killed
                             eio, enospc       the operation fails with this error
                             full              as enospc, for this and all later operations that need space
                                               outside $TMPDIR
                             cut               half of a write is written, and the command is killed
                             short             half of a write is written, and the call returns that size
    CLIPMILL_TORTURE_TERM    point at which the process sends itself SIGTERM, and continues
    CLIPMILL_TORTURE_FLAGS   folder of marker files for faults that have been injected
    CLIPMILL_TORTURE_DRIVER  process ID of the command, set by its first process

A *point* is `operation:path#n`: the n-th time that a process applies this operation to this path, relative to the
watched folder, with `*` for the parts that differ between runs. For source videos, only opening for reading is an
operation: `read:source/PATH@MODULE#n`, where MODULE reads the video. In `start:PROGRAM@FUNCTION#n`, FUNCTION starts
PROGRAM.
"""

import errno
import hashlib
import os
import re
import secrets
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")
PREFIX = "CLIPMILL_TORTURE_"
WATCH, LOG, VERSIONS, POINT, FAULT, TERM, FLAGS, DRIVER = (
    PREFIX + name for name in ("WATCH", "LOG", "VERSIONS", "POINT", "FAULT", "TERM", "FLAGS", "DRIVER")
)
ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "full": errno.ENOSPC}
SOURCES = "source/"  # label of the folder of source videos
# Temporary names from `clipmill.manifests.publish`, fingerprints at the end of a name, and names drawn by `tempfile`.
_RANDOM = (
    (re.compile(r"(?<=\.tmp-)[0-9a-f]{12}(?=-)"), "*"),
    (re.compile(r"(?<=-)[0-9a-f]{8}([0-9a-f]{8})?(?=[./]|$)"), "*"),
    (re.compile(r"(?<=clipmill-)[a-z0-9_]{8}(?=/|$)"), "*"),
    (re.compile(r"(?<=scratch-clipmill-)\d+(?=/|$)"), "*"),
    (re.compile(r"(?<=/)[0-9a-f]{12}(?=[./]|$)"), "*"),
    (re.compile(r"(?<=/tmp)[a-z0-9_]{8}(?=/|$)"), "*"),
)
_NEEDING_SPACE = ("open", "write", "mkdir", "link")
_NUM_KILLS = {"kill-2": 2, "kill-3": 3}
_MIN_DRAWN = 8  # shorter parts may occur in names by coincidence
# Original functions for the bookkeeping, which must not be intercepted itself.
_open, _write = os.open, os.write


class Watch:
    """Watched folders and faults, and the operations of this process so far."""

    def __init__(self) -> None:
        lines = os.environ[WATCH].splitlines()
        self.folders = [(label, folder) for label, _, folder in (line.partition("=") for line in lines)]
        self.log, self.versions = os.environ.get(LOG), os.environ.get(VERSIONS)
        self.flags = Path(os.environ.get(FLAGS, os.devnull))
        self.faulty, self.fault = os.environ.get(POINT), os.environ.get(FAULT, "")
        self.term = os.environ.get(TERM)
        self.driver = int(os.environ.setdefault(DRIVER, str(os.getpid())))
        self.drawn: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Reset the counts in a forked process."""
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def name_of(self, path: str) -> str | None:
        """Return a name for a path that is the same in every run; None if the path is not watched."""
        folder_pair = next(
            (
                folder_pair
                for folder_pair in self.folders
                if path == folder_pair[1] or path.startswith(f"{folder_pair[1]}/")
            ),
            None,
        )
        if folder_pair is None:
            return None
        label, folder = folder_pair
        name = label + (path[len(folder) + 1 :] or ".")
        for drawn in self.drawn:
            name = name.replace(drawn, "*")
        for pattern, star in _RANDOM:
            name = pattern.sub(star, name)
        return name

    def point(self, operation: str, path: str, *, source: str | None = None) -> str | None:
        """Count and return the current point; None if the path is not watched.

        Args:
            source: File that is renamed or linked to `path`.
        """
        name = self.name_of(path)
        return None if name is None else self.count(operation, name, source=source)

    def count(self, operation: str, name: str, *, source: str | None = None) -> str:
        """Count and return the current point for a name; see `point`."""
        with self.lock:
            self.counts[f"{operation}:{name}"] += 1
            point = f"{operation}:{name}#{self.counts[f'{operation}:{name}']}"
        if self.log is not None:
            role = "driver" if os.getpid() == self.driver else "worker"
            self._append(self.log, f"{role} {point}" + (f" < {self.name_of(source)}\n" if source is not None else "\n"))
        return point

    def _append(self, path: str, line: str) -> None:
        log = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _write(log, line.encode())
        os.close(log)

    def append_version(self, path: str) -> None:
        """Append the digest of a file that is about to get its final name."""
        assert self.versions is not None
        descriptor = _open(path, os.O_RDONLY)
        digest = hashlib.sha256(b"".join(iter(lambda: os.read(descriptor, 1 << 20), b""))).hexdigest()
        os.close(descriptor)
        self._append(self.versions, f"{digest}\n")

    def claims(self, name: str) -> bool:
        """Return True if this process is the first one to claim the marker `name`."""
        try:
            os.close(_open(self.flags / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True

    def is_at_fault(self, point: str) -> bool:
        """Return True if the fault is to be injected here."""
        if self.fault == "full" and (self.flags / "fault").exists():
            operation, _, name = point.partition(":")
            return operation in _NEEDING_SPACE and not name.startswith("TMPDIR/")
        if point != self.faulty:
            return False
        if self.claims("fault") or self.fault == "kill-each":
            return True
        return any(self.claims(f"fault-{number}") for number in range(2, 1 + _NUM_KILLS.get(self.fault, 1)))

    def kill(self, *, driver: bool) -> None:
        if driver and os.getpid() != self.driver:
            os.kill(self.driver, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


_watch: Watch | None = None


def visit(
    operation: str,
    path: str | None,
    act: Callable[[], T],
    *,
    names: Sequence[Any] = (),
    act_in_part: Callable[[], T] | None = None,
    source: str | None = None,
) -> T:
    """Perform the operation, or inject the fault if this is its point."""
    watch = _watch
    point = watch.point(operation, path, source=source) if watch is not None and path is not None else None
    if watch is None or point is None:
        return act()
    if watch.versions is not None and source is not None and Path(source).is_file():
        watch.append_version(source)
    if point == watch.term and watch.claims("term"):
        os.kill(os.getpid(), signal.SIGTERM)
    if not watch.is_at_fault(point):
        return act()
    fault = watch.fault
    if fault in ERRORS:
        # Raise the error as the system call would: errors of calls that take a descriptor have no file name.
        told = [name if name is None else os.fspath(name) for name in names]
        raise OSError(ERRORS[fault], os.strerror(ERRORS[fault]), *told)
    if fault == "kill-after":
        with suppress(OSError):
            act()
    elif fault in ("cut", "short"):
        assert act_in_part is not None, point
        done = act_in_part()
        if fault == "short":
            return done
    watch.kill(driver=fault != "kill-worker")
    raise AssertionError("unreachable")


def read(path: str, *, module: str) -> None:
    """Visit the point at which `module` opens a source video for reading."""
    watch = _watch
    name = watch.name_of(path) if watch is not None else None
    if watch is not None and name is not None and watch.is_at_fault(watch.count("read", f"{name}@{module}")):
        watch.kill(driver=watch.fault == "kill")


def started(program: str, pid: int, *, function: str) -> None:
    """Visit the point at which `function` has started `program` as a process."""
    if _watch is not None and _watch.is_at_fault(_watch.count("start", f"{program}@{function}")):
        os.kill(pid, signal.SIGKILL)


def _remember_random_names(watch: Watch) -> None:
    """Record the random parts of names that this process draws, so that they are recognised in every form."""
    real_hex = secrets.token_hex

    def token_hex(nbytes: int | None = None) -> str:
        drawn = real_hex(nbytes)
        if len(drawn) >= _MIN_DRAWN:
            watch.drawn.add(drawn)
        return drawn

    secrets.token_hex = token_hex
    names: Any = tempfile._RandomNameSequence  # type: ignore[attr-defined]
    real_next = names.__next__

    def draw(self: Any) -> str:
        watch.drawn.add(drawn := real_next(self))
        return cast(str, drawn)

    names.__next__ = draw


def begin() -> Watch:
    """Start watching this process."""
    global _watch
    _watch = Watch()
    os.register_at_fork(after_in_child=_watch.forget)
    _remember_random_names(_watch)
    return _watch


def is_watched(path: str | None) -> bool:
    """Return True if operations on `path` are counted."""
    return path is not None and _watch is not None and any(path.startswith(f"{f}/") for _, f in _watch.folders)


def is_source(path: str | None) -> bool:
    """Return True if `path` is below the folder of source videos."""
    folders = dict(_watch.folders) if _watch is not None else {}
    return path is not None and SOURCES in folders and path.startswith(f"{folders[SOURCES]}/")
