"""Probe all sources of a manifest, and store the results in `<data>/probes.parquet`. Unchanged files are probed once.

A file counts as unchanged if its path, size and modification time are the same. Failures are also stored. If the
machine may have caused a failure (permissions, a mount, a timeout), the file is probed again in every run. If a source
becomes unreadable, the properties from its last successful probe are kept beside the failure. Chunks made from the
source are kept too, even if the file no longer exists.

Source files may be on a mount that does not respond. A thread that is blocked inside the kernel cannot be ended.
Therefore each check has a timeout, after which the thread is abandoned and another thread continues with the remaining
files. Abandoned threads do not delay the exit of the program.
"""

import os
import re
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import StorageRefused
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import remove, remove_temporaries, temporaries_in
from clipmill.prep.core.data_folder import PROBES_FILE
from clipmill.prep.core.failures import REFUSALS, FailureCode, SourceFailure
from clipmill.prep.core.tables import read_table_file, write_table_file
from clipmill.prep.sources.access import STAT_LIMIT_S, access_failure

if TYPE_CHECKING:
    from clipmill.prep.sources.access import SourceFacts
    from clipmill.prep.sources.probe_processes import Run

_SHORT_LIMIT_S = 1.0  # timeout in a folder where a file has timed out: a dead mount may contain thousands of files
_SLICE_FILES = 4096
_TICK_S = 0.5  # interval at which threads are checked for timeouts
NO_FILE = -1
_SHARE_FILE = re.compile(r"\d+-of-\d+\.parquet", re.ASCII)
SHARES_FOLDER = ".probes"  # subfolder for the probes from the parts of a run, until `probes.parquet` contains them


@dataclass(frozen=True)
class FileStates:
    """Sizes and modification times of files.

    Attributes:
        size_bytes: Size of each file, int64 [files]; NO_FILE if the file could not be checked.
        mtime_ns: Modification time, int64 [files]; 0 if the file could not be checked. For an object, it also depends
            on the ETag (`clipmill.prep.sources.remote.object_state`).
        failures: Reasons why files could not be checked, keyed by row.
    """

    size_bytes: np.ndarray
    mtime_ns: np.ndarray
    failures: dict[int, SourceFailure]

    def take(self, rows: np.ndarray) -> "FileStates":
        """Return the states of the files in `rows`, int64 [N], in this order."""
        failures = {index: self.failures[row] for index, row in enumerate(rows.tolist()) if row in self.failures}
        return FileStates(self.size_bytes[rows], self.mtime_ns[rows], failures)


def stat_files(paths: pa.ChunkedArray, *, num_threads: int) -> FileStates:
    """Return the size and modification time of each of `paths`, which may be URLs.

    Raises:
        UserError: A bucket does not exist, or refuses the credentials.
    """
    is_url = np.asarray(pc.match_substring(paths, "://"))
    if not is_url.any():
        return _stat_local(paths, num_threads=num_threads)
    from clipmill.prep.sources.remote import remote_states

    rows = np.flatnonzero(is_url)
    states = FileStates(np.full(len(paths), NO_FILE, np.int64), np.zeros(len(paths), np.int64), {})
    for index, state in remote_states(paths.take(pa.array(rows)).to_pylist()):
        row = int(rows[index])
        if isinstance(state, SourceFailure):
            states.failures[row] = state
        else:
            states.size_bytes[row], states.mtime_ns[row] = state
    local_rows = np.flatnonzero(~is_url)
    local_states = _stat_local(paths.take(pa.array(local_rows)), num_threads=num_threads)
    states.size_bytes[local_rows], states.mtime_ns[local_rows] = local_states.size_bytes, local_states.mtime_ns
    states.failures.update({int(local_rows[row]): failure for row, failure in local_states.failures.items()})
    return states


def _stat_local(paths: pa.ChunkedArray, *, num_threads: int) -> FileStates:
    states = FileStates(np.full(len(paths), NO_FILE, np.int64), np.zeros(len(paths), np.int64), {})
    waiting_slices: SimpleQueue[_Slice] = SimpleQueue()
    finished_slices: SimpleQueue[_Slice] = SimpleQueue()
    begins = range(0, len(paths), _SLICE_FILES)
    for begin in begins:
        waiting_slices.put(_Slice(begin, paths.slice(begin, _SLICE_FILES)))
    active_slices: set[_Slice] = set()
    slow_folders: set[str] = set()
    for _ in range(min(num_threads, len(begins))):
        Thread(target=_check_slices, args=(waiting_slices, active_slices, finished_slices), daemon=True).start()
    num_unfinished = len(begins)
    while num_unfinished:
        try:
            current_slice = finished_slices.get(timeout=_TICK_S)
            if current_slice.is_abandoned:
                continue
        except Empty:
            overdue_slice = next((active for active in list(active_slices) if active.is_overdue(slow_folders)), None)
            if overdue_slice is None:
                continue
            current_slice = overdue_slice
            remaining_slice = current_slice.abandon()
            slow_folders.add(os.path.dirname(remaining_slice.column[0].as_py()))  # noqa: PTH120 - as in `is_overdue`
            states.failures[remaining_slice.begin] = SourceFailure(
                FailureCode.TIMEOUT, "the file system does not respond", is_lasting=False
            )
            waiting_slices.put(_Slice(remaining_slice.begin + 1, remaining_slice.column.slice(1)))
            num_unfinished += 1
            Thread(target=_check_slices, args=(waiting_slices, active_slices, finished_slices), daemon=True).start()
        num_unfinished -= 1
        active_slices.discard(current_slice)
        part = slice(current_slice.begin, current_slice.begin + current_slice.num_done)
        states.size_bytes[part], states.mtime_ns[part] = np.array(current_slice.stat_values).reshape(-1, 2).T
        states.failures.update({current_slice.begin + row: failure for row, failure in current_slice.failures.items()})
    return states


@dataclass(eq=False)
class _Slice:
    """A slice of the paths, starting at row `begin`, with the results so far.

    Attributes:
        column: Paths of the slice.
        paths: Paths as strings, set only while they are being checked, to save memory.
        stat_values: Size and modification time of each checked file, in a flat array to save memory.
        failures: Failures of files that could not be checked, keyed by position in the slice.
        since_s: Time at which the check of the current file began.
        is_abandoned: True if the thread that checks the slice is blocked and has been abandoned.
    """

    begin: int
    column: pa.ChunkedArray
    paths: list[str] = field(default_factory=list)
    stat_values: "array[int]" = field(default_factory=lambda: array("q"))
    failures: dict[int, SourceFailure] = field(default_factory=dict)
    since_s: float = 0.0
    is_abandoned: bool = False

    def stat_all(self) -> None:
        add = self.stat_values.append  # `abandon` assigns a new array
        self.paths = self.column.to_pylist()
        for path in self.paths:
            self.since_s = time.monotonic()
            try:
                state = os.stat(path)  # noqa: PTH116 - creating a Path for each of a million files is slow
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
        return len(self.stat_values) // 2

    def is_overdue(self, slow_folders: set[str]) -> bool:
        index = self.num_done
        if index == len(self.paths):
            return False
        is_slow = os.path.dirname(self.paths[index]) in slow_folders  # noqa: PTH120 - a path as it is written
        return time.monotonic() - self.since_s > min(STAT_LIMIT_S, _SHORT_LIMIT_S if is_slow else STAT_LIMIT_S)

    def abandon(self) -> "_Slice":
        """Abandon the thread that is blocked on a path; return this path and all later paths as a new slice."""
        self.is_abandoned = True
        self.stat_values = self.stat_values[: 2 * self.num_done]
        return _Slice(self.begin + self.num_done, self.column.slice(self.num_done))


def _check_slices(
    waiting_slices: "SimpleQueue[_Slice]", active_slices: set[_Slice], finished_slices: "SimpleQueue[_Slice]"
) -> None:
    """Check slices until the queue is empty or the current slice is abandoned. This function runs in a thread."""
    while True:
        try:
            current_slice = waiting_slices.get_nowait()
        except Empty:
            return
        current_slice.since_s = time.monotonic()
        active_slices.add(current_slice)
        current_slice.stat_all()
        finished_slices.put(current_slice)
        if current_slice.is_abandoned:
            return


_SAVE_INTERVAL_S = 30.0
_MAX_SAVE_FRACTION = 0.03  # maximum fraction of the run time to spend on saving; a larger table takes longer to save
_MAX_RECORDS = 4096  # maximum number of probes held as Python objects
_MAX_REFUSED = 100  # the run ends when access to this many consecutive sources has been refused
_NEVER = -1  # impossible modification time, so that the next run does not reuse the row
# Increment this number when probes begin to accept files that they used to reject. Failed files are then probed again.
_RULES = {b"probe_rules": b"4"}

PROBES = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),  # NO_FILE if the file could not be checked
        pa.field("mtime_ns", pa.int64(), nullable=False),
        pa.field("code", pa.string()),  # failure code if the file cannot be read now, otherwise null
        pa.field("message", pa.string()),
        pa.field("fingerprint", pa.string()),
        pa.field("end_s", pa.float64()),
        pa.field("fps", pa.float64()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("codec", pa.string()),
        pa.field("key_gap_s", pa.float64()),
        pa.field("num_audio", pa.int32()),
        pa.field("timeline", pa.string()),  # JSON (clipmill.shards.timeline)
        pa.field("notes", pa.string()),  # unusual properties, one per line
    ],
    metadata=_RULES,
)


def read_probes(
    data_dir: Path, *, paths: pa.ChunkedArray | None = None, columns: Collection[str] | None = None
) -> pa.Table:
    """Return the stored probes (schema PROBES); empty if they are missing or damaged. No source is read.

    Args:
        paths: Paths in the manifest. If the stored paths are the same, the result contains this array, to save memory.
        columns: Names of the columns to return; None for all.

    Raises:
        OSError: The file exists but cannot be read now. The file must not be discarded, because it may contain
            properties of sources that no longer exist.
    """
    try:
        expected = None if paths is None else {"path": paths}
        return read_table_file(data_dir / PROBES_FILE, schema=PROBES, columns=columns, expected=expected)
    except (FileNotFoundError, ValueError):
        return PROBES.empty_table().select(PROBES.names if columns is None else list(columns))


def add_shares(known_probes: pa.Table, files: Iterable[Path]) -> pa.Table:
    """Return the known probes, preceded by the results that parts have stored since (`probe_parts.py`).

    If a path has several rows, the first row counts. A failure from a part does not replace a row, because the row may
    contain the properties of a source that no longer exists.

    Args:
        files: Files with the probes of parts. Missing files are skipped.
    """
    for path in files:
        try:
            share = read_table_file(path, schema=PROBES)
        except (FileNotFoundError, ValueError):
            continue  # the file is missing, damaged or from another version, so its sources are probed again
        if share.schema.metadata == PROBES.metadata:
            # The table of probes may be large, so it is neither copied nor hashed.
            known_paths = known_probes["path"].filter(pc.is_in(known_probes["path"], value_set=share["path"]))
            is_new = pc.invert(pc.is_in(share["path"], value_set=known_paths))
            share = share.filter(pc.or_(is_new, pc.is_null(share["code"])))
            known_probes = pa.concat_tables([share.replace_schema_metadata(known_probes.schema.metadata), known_probes])
    return known_probes


def share_files(data_dir: Path) -> list[Path]:
    """Return the files with the probes of parts, sorted by name."""
    folder = data_dir / SHARES_FOLDER
    return sorted(path for path in folder.iterdir() if _SHARE_FILE.fullmatch(path.name)) if folder.is_dir() else []


def remove_shares(data_dir: Path) -> None:
    """Remove the probes of parts and the temporary files left by killed parts, and then the folder if it is empty."""
    if (folder := data_dir / SHARES_FOLDER).is_dir():
        remove(*share_files(data_dir), *temporaries_in(folder))
        with suppress(OSError):
            folder.rmdir()


def probes_of(paths: pa.ChunkedArray, probes: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Return the probes of the `paths` that have been probed, in this order, and a mask of these paths, bool [N]."""
    if probes["path"].equals(paths):
        return probes, np.ones(len(paths), bool)
    rows = _rows_of(paths, known_paths=probes["path"])
    return probes.take(pa.array(rows[rows >= 0])), rows >= 0


def probe_sources(
    data_dir: Path,
    paths: pa.ChunkedArray,
    *,
    num_workers: int,
    retry_failed: bool = False,
    run: "Run | None" = None,
    divide: Callable[..., bool] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Probe the files that have no reusable probe; return the probes of all paths, in the same order (schema PROBES).

    Args:
        num_workers: Number of threads that check the files, and maximum number of local processes that probe them.
        retry_failed: True to probe failed files again even if they are unchanged.
        run: Function that runs tasks in the workers of a cluster (`probe_on_workers`); None to probe all files on this
            machine.
        divide: Function that probes the files together with other processes (`probe_in_parts`) before this process
            probes the remaining files. It returns True if this process must add the results to the stored probes.
        on_progress: Function to call with (number of files probed, number of files to probe).

    Raises:
        UserError: A bucket does not exist.
        StorageRefused: A bucket refuses the credentials, or a bucket or server refuses many consecutive sources.
    """
    states = stat_files(paths, num_threads=num_workers)
    prober = Prober(num_workers, retry_failed, run, on_progress)
    stored = read_probes(data_dir, paths=paths)
    known_probes = add_shares(stored, share_files(data_dir))
    rows, is_hit = prober.match(paths, states, known_probes)
    adds_shares = True
    if divide is not None:
        if len(todo := np.flatnonzero(~is_hit)):
            # Keep only these probes: all probes are read again below, and must not be in memory twice.
            stored = known_probes = known_probes.take(pa.array(rows[todo][rows[todo] >= 0]))
        adds_shares = divide(data_dir, paths, states, known_probes, todo=todo, prober=prober)
        if len(todo) or not adds_shares:  # another part may have stored the probes in the meantime
            stored = read_probes(data_dir, paths=paths)
            known_probes = add_shares(stored, share_files(data_dir))
            rows, is_hit = prober.match(paths, states, known_probes)
    is_stored = (
        known_probes is stored
        and known_probes["path"].equals(paths)
        and known_probes.schema.metadata == PROBES.metadata
    )
    if is_hit.all() and is_stored:
        return known_probes
    table = prober.probe(paths, states, known_probes, rows, is_hit, save=lambda probes: _write_probes(data_dir, probes))
    if not table.equals(stored, check_metadata=True):
        _write_probes(data_dir, table)
    if adds_shares:
        remove_shares(data_dir)
    return table


@dataclass(frozen=True)
class Prober:
    """Prober of sources without a reusable probe. For the attributes, see the arguments of `probe_sources`."""

    num_workers: int
    retry_failed: bool
    run: "Run | None"
    on_progress: Callable[[int, int], None]

    def match(
        self, paths: pa.ChunkedArray, states: FileStates, known_probes: pa.Table
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the row of each path in `known_probes`, int64 [N], or -1, and a mask of reusable rows, bool [N]."""
        rows = _rows_of(paths, known_paths=known_probes["path"])
        is_hit = rows >= 0
        is_hit[is_hit] &= np.asarray(known_probes["size_bytes"])[rows[is_hit]] == states.size_bytes[is_hit]
        is_hit[is_hit] &= np.asarray(known_probes["mtime_ns"])[rows[is_hit]] == states.mtime_ns[is_hit]
        if self.retry_failed or known_probes.schema.metadata != PROBES.metadata:
            is_hit[is_hit] &= ~np.asarray(pc.is_valid(known_probes["code"]))[rows[is_hit]]
        return rows, is_hit

    def probe(
        self,
        paths: pa.ChunkedArray,
        states: FileStates,
        known_probes: pa.Table,
        rows: np.ndarray,
        is_hit: np.ndarray,
        *,
        save: Callable[[pa.Table], None],
    ) -> pa.Table:
        """Probe the files without a reusable row, and return the probes of all `paths`, as `probe_sources` does.

        Args:
            rows, is_hit: Result of `match`.
            save: Function that stores the probes known so far; called at intervals, and before an error is raised.

        Raises:
            StorageRefused: A bucket or server refuses many consecutive sources.
        """
        records = _ProbeTable(known_probes)
        source = np.where(is_hit, rows, -1)

        def present_rows() -> pa.Table:
            """Return the rows known so far, in the order of `paths`; omit files that have not been probed yet."""
            return records.table().take(pa.array(source[source >= 0])).combine_chunks()

        todo = np.flatnonzero(~is_hit)
        next_save_s, num_refused = time.monotonic() + _SAVE_INTERVAL_S, 0
        outcomes = _probe_rows(paths, todo.tolist(), states, num_workers=self.num_workers, run=self.run)
        for number, (row, outcome) in enumerate(outcomes, 1):
            old_record = known_probes.slice(rows[row], 1).to_pylist()[0] if rows[row] >= 0 else {}
            state = {"size_bytes": int(states.size_bytes[row]), "mtime_ns": int(states.mtime_ns[row])}
            record = {"path": paths[row].as_py(), **state}
            if isinstance(outcome, SourceFailure):
                # If the failure may be temporary, the next run probes the file again.
                is_known_gone = outcome.code == FailureCode.SOURCE_MISSING and record["size_bytes"] == NO_FILE
                is_kept = outcome.is_lasting or is_known_gone
                failure = {"code": str(outcome.code), "message": outcome.message}
                record = old_record | record | failure | ({} if is_kept else {"mtime_ns": _NEVER})
            else:
                record = asdict(outcome) | record
            source[row] = records.append(record)
            self.on_progress(number, len(todo))
            # Count a refusal only if the file could be checked but not read.
            refusal_code = record.get("code") if row not in states.failures else None
            num_refused = num_refused + 1 if refusal_code in REFUSALS else 0
            if num_refused == _MAX_REFUSED or refusal_code == FailureCode.STORAGE_REFUSED:
                save(present_rows())
                raise StorageRefused(
                    f"{record['path']}: {record['message']}",
                    hint="check the credentials and their permissions, and run the same command again",
                )
            if (begin_s := time.monotonic()) > next_save_s:
                save(present_rows())
                end_s = time.monotonic()
                next_save_s = end_s + max(_SAVE_INTERVAL_S, (end_s - begin_s) / _MAX_SAVE_FRACTION)
        return present_rows()


def failed_sources(probes: pa.Table, *, only_temporary: bool) -> np.ndarray:
    """Return the rows of failed probes, int64.

    Args:
        only_temporary: True to omit failures that the file caused. Such a file is probed again only after a change.
    """
    is_failed = np.asarray(pc.is_valid(probes["code"]))
    return np.flatnonzero(is_failed & (np.asarray(probes["mtime_ns"]) == _NEVER) if only_temporary else is_failed)


def num_to_read(probes: pa.Table) -> int:
    """Return the number of failed sources that a plan would probe again: temporary failures, and changed files.

    Local files are checked for changes. Sources in buckets are not, because each check would cost a request.
    """
    temporary_rows = failed_sources(probes, only_temporary=True)
    lasting_rows = np.setdiff1d(failed_sources(probes, only_temporary=False), temporary_rows)
    return len(temporary_rows) + len(_changed_files(probes, lasting_rows, num_threads=1))


def add_changed_files(probes: pa.Table, *, num_threads: int) -> pa.Table:
    """Return the probes, with a failure for each file that was readable but is now missing or has changed."""
    failures = _changed_files(probes, np.flatnonzero(pc.is_null(probes["code"])), num_threads=num_threads)
    if not failures:
        return probes
    for name in ("code", "message"):
        values = probes[name].to_pylist()
        for row, failure in failures.items():
            values[row] = str(getattr(failure, name))
        probes = probes.set_column(probes.column_names.index(name), name, pa.array(values, pa.string()))
    return probes


def _changed_files(probes: pa.Table, rows: np.ndarray, *, num_threads: int) -> dict[int, SourceFailure]:
    """Return a failure for each local file that is missing or has changed since it was probed, keyed by row."""
    rows = rows[~np.asarray(pc.match_substring(probes["path"], "://"))[rows]]
    files = probes.select(["path", "size_bytes", "mtime_ns"]).take(pa.array(rows))
    states = stat_files(files["path"], num_threads=num_threads)
    is_changed = states.size_bytes != np.asarray(files["size_bytes"])
    is_changed |= states.mtime_ns != np.asarray(files["mtime_ns"])
    failure = SourceFailure(FailureCode.SOURCE_CHANGED, "its size or modification time has changed")
    return {int(rows[index]): states.failures.get(int(index), failure) for index in np.flatnonzero(is_changed)}


class _ProbeTable:
    """Table of the known probes. `append` adds the probes of this run."""

    def __init__(self, known_probes: pa.Table) -> None:
        self._parts = [known_probes.cast(PROBES)]
        self._records: list[dict[str, Any]] = []
        self._num_rows = len(known_probes)

    def append(self, record: dict[str, Any]) -> int:
        """Add a row (schema PROBES) and return its index."""
        if len(self._records) == _MAX_RECORDS:
            self.table()
        self._records.append(record)
        self._num_rows += 1
        return self._num_rows - 1

    def table(self) -> pa.Table:
        """Return all rows."""
        self._parts.append(pa.Table.from_pylist(self._records, schema=PROBES))
        self._records = []
        return pa.concat_tables(self._parts)


def _probe_rows(
    paths: pa.ChunkedArray, todo: list[int], states: FileStates, *, num_workers: int, run: "Run | None"
) -> "Iterator[tuple[int, SourceFacts | SourceFailure]]":
    """Yield the result of each row in `todo`, beginning with the files that could not be checked."""
    failures = states.failures
    yield from ((row, failures[row]) for row in todo if row in failures)
    readable_rows = [row for row in todo if row not in failures]
    if not readable_rows:
        return
    # Size and modification time were read before the probe. If a file has grown since then, the next run detects it.
    source_paths = paths.take(pa.array(readable_rows)).to_pylist()
    if run is None:
        from clipmill.prep.sources.probe_processes import probe_each

        outcomes = probe_each(source_paths, max_processes=num_workers)
    else:
        from clipmill.prep.sources.probe_processes import probe_on_workers

        sizes = states.size_bytes[readable_rows].tolist()
        outcomes = probe_on_workers(source_paths, sizes, run=run, max_processes=num_workers)
    yield from ((readable_rows[index], outcome) for index, outcome in outcomes)


def _rows_of(paths: pa.ChunkedArray, *, known_paths: pa.ChunkedArray) -> np.ndarray:
    """Return the row of each path in `known_paths`, int64; -1 if it is missing."""
    if known_paths.equals(paths):  # the usual case needs no lookup table, which takes 200 MB for a million paths
        return np.arange(len(paths))
    return np.asarray(pc.fill_null(pc.index_in(paths, value_set=known_paths), -1)).astype(np.int64)


def _write_probes(data_dir: Path, table: pa.Table) -> None:
    # Lock the folder, because `prep plan` also writes this file and does not hold the lock of a column.
    with folder_lock(data_dir):
        remove_temporaries(data_dir, matches=lambda target: target == PROBES_FILE)
        write_table_file(data_dir / PROBES_FILE, table)
