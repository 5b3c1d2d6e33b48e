"""Probes of all sources of a manifest, stored in `<data>/probes.parquet` so that an unchanged file is never read twice.

A file counts as unchanged if its path, size and modification time are the same. Failures caused by the file are stored
likewise; failures that the machine may have caused (permissions, a mount, a timeout) are probed again in every run. If
a source becomes unreadable, the properties from its last successful probe are kept beside the failure: chunks made from
it are kept, although the file may be gone.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import remove_temporaries
from clipmill.prep.core.data_folder import PROBES_FILE
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.table_file import read_table_file, write_table_file
from clipmill.prep.sources.files import NO_FILE, FileStates, stat_files

if TYPE_CHECKING:
    from clipmill.prep.sources.access import SourceFacts
    from clipmill.prep.sources.probe_tasks import Run

_SAVE_INTERVAL_S = 30.0
_MAX_SAVING = 0.03  # of the time may be spent on saving, which takes longer the more is known
_FRESH_AT_ONCE = 4096  # probes held as Python objects
_NEVER = -1  # an impossible modification time: the row is not reused by the next run
# Increment this when probes begin to accept files that they used to reject: older failures are then probed again.
_RULES = {b"probe_rules": b"3"}

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
        pa.field("notes", pa.string()),  # what may surprise, a line each
    ],
    metadata=_RULES,
)


def read_probes(
    data_dir: Path, *, paths: pa.ChunkedArray | None = None, columns: Collection[str] | None = None
) -> pa.Table:
    """Return the stored probes (schema PROBES); empty if they are missing or damaged. No source is read.

    Args:
        paths: those of the manifest, which are returned as the column of paths if they are the same.
        columns: names of the columns to return; None for all.

    Raises:
        OSError: the file exists but cannot be read now; discarding it would lose what is known of vanished sources.
    """
    try:
        expected = None if paths is None else {"path": paths}
        return read_table_file(data_dir / PROBES_FILE, schema=PROBES, columns=columns, expected=expected)
    except (FileNotFoundError, ValueError):
        return PROBES.empty_table().select(PROBES.names if columns is None else list(columns))


def probes_of(paths: pa.ChunkedArray, probes: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Return the probes of those of `paths` that have been probed, in this order, and which these are, bool[N]."""
    if probes["path"].equals(paths):
        return probes, np.ones(len(paths), bool)
    rows = _rows_of(paths, known=probes["path"])
    return probes.take(pa.array(rows[rows >= 0])), rows >= 0


def probe_sources(
    data_dir: Path,
    paths: pa.ChunkedArray,
    *,
    num_workers: int,
    retry_failed: bool = False,
    run: "Run | None" = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Return the probes of `paths`, one row each in the same order (schema PROBES); only new or changed files are read.

    Args:
        num_workers: number of threads that check the files, and maximum number of processes here that read them.
        retry_failed: also probe files that failed before, even if they are unchanged.
        run: runs tasks in the workers of a cluster (`probe_on_workers`); None to read all files on this machine.
        on_progress: called with (probed, to probe).
    """
    states = stat_files(paths, num_threads=num_workers)
    sizes, mtimes = states.size_bytes, states.mtime_ns
    known = read_probes(data_dir, paths=paths)
    rows = _rows_of(paths, known=known["path"])
    hit = rows >= 0
    hit[hit] &= np.asarray(known["size_bytes"])[rows[hit]] == sizes[hit]
    hit[hit] &= np.asarray(known["mtime_ns"])[rows[hit]] == mtimes[hit]
    if retry_failed or known.schema.metadata != PROBES.metadata:
        hit[hit] &= ~np.asarray(pc.is_valid(known["code"]))[rows[hit]]
    todo = np.flatnonzero(~hit)
    if not len(todo) and known["path"].equals(paths) and known.schema.metadata == PROBES.metadata:
        return known
    fresh = _Fresh(known)
    source = np.where(hit, rows, -1)

    def assembled() -> pa.Table:
        """Return the known rows and those probed so far, in the order of `paths`; rows not probed yet are left out."""
        return fresh.table().take(pa.array(source[source >= 0])).combine_chunks()

    next_save_s = time.monotonic() + _SAVE_INTERVAL_S
    outcomes = _outcomes(paths, todo.tolist(), states, num_workers=num_workers, run=run)
    for number, (row, outcome) in enumerate(outcomes, 1):
        old = known.slice(rows[row], 1).to_pylist()[0] if rows[row] >= 0 else {}
        seen = {"path": paths[row].as_py(), "size_bytes": int(sizes[row]), "mtime_ns": int(mtimes[row])}
        source[row] = fresh.append(_record(seen, outcome, old=old))
        on_progress(number, len(todo))
        if (begin_s := time.monotonic()) > next_save_s:
            _write_cache(data_dir, assembled())
            end_s = time.monotonic()
            next_save_s = end_s + max(_SAVE_INTERVAL_S, (end_s - begin_s) / _MAX_SAVING)
    table = assembled()
    if not table.equals(known, check_metadata=True):
        _write_cache(data_dir, table)
    return table


def failed_sources(probes: pa.Table, *, only_passing: bool) -> np.ndarray:
    """Return the rows of the probes that have failed, int64.

    Args:
        only_passing: Leave out the failures that lie in the file, which is read again only when it has changed.
    """
    is_failed = np.asarray(pc.is_valid(probes["code"]))
    return np.flatnonzero(is_failed & (np.asarray(probes["mtime_ns"]) == _NEVER) if only_passing else is_failed)


def num_to_read(probes: pa.Table) -> int:
    """Return how many failed sources a plan would read again: their failure may pass, or their file has changed.

    The files on this machine are looked at; sources in buckets are not, since they would cost requests.
    """
    passing = failed_sources(probes, only_passing=True)
    failed = np.setdiff1d(failed_sources(probes, only_passing=False), passing)
    failed = failed[~np.asarray(pc.match_substring(probes["path"], "://"))[failed]]
    lasting = probes.take(pa.array(failed))
    states = stat_files(lasting["path"], num_threads=1)
    is_changed = states.size_bytes != np.asarray(lasting["size_bytes"])
    is_changed |= states.mtime_ns != np.asarray(lasting["mtime_ns"])
    return len(passing) + int(is_changed.sum())


class _Fresh:
    """Probes of this run, behind those that were known before."""

    def __init__(self, known: pa.Table) -> None:
        self._parts = [known.cast(PROBES)]
        self._waiting: list[dict[str, Any]] = []
        self._num_rows = len(known)

    def append(self, record: dict[str, Any]) -> int:
        """Add a row of PROBES and return its number."""
        if len(self._waiting) == _FRESH_AT_ONCE:
            self.table()
        self._waiting.append(record)
        self._num_rows += 1
        return self._num_rows - 1

    def table(self) -> pa.Table:
        """Return all rows."""
        self._parts.append(pa.Table.from_pylist(self._waiting, schema=PROBES))
        self._waiting = []
        return pa.concat_tables(self._parts)


def _outcomes(
    paths: pa.ChunkedArray, todo: list[int], states: FileStates, *, num_workers: int, run: "Run | None"
) -> "Iterator[tuple[int, SourceFacts | SourceFailure]]":
    """Yield the result for each row in `todo`; some files could not even be checked."""
    failures = states.failures
    yield from ((row, failures[row]) for row in todo if row in failures)
    readable = [row for row in todo if row not in failures]
    if not readable:
        return
    # Size and modification time are those from before the probe: if the file grew meanwhile, the next run notices it.
    given = paths.take(pa.array(readable)).to_pylist()
    if run is None:
        from clipmill.prep.sources.probe_processes import probe_each

        outcomes = probe_each(given, max_processes=num_workers)
    else:
        from clipmill.prep.sources.probe_tasks import probe_on_workers

        sizes = states.size_bytes[readable].tolist()
        outcomes = probe_on_workers(given, sizes, run=run, max_processes=num_workers)
    yield from ((readable[number], outcome) for number, outcome in outcomes)


def _record(seen: dict[str, Any], outcome: "SourceFacts | SourceFailure", *, old: dict[str, Any]) -> dict[str, Any]:
    """Return a row of PROBES."""
    if not isinstance(outcome, SourceFailure):
        return asdict(outcome) | seen
    failure = {"code": str(outcome.code), "message": outcome.message}
    is_known_gone = outcome.code == FailureCode.SOURCE_MISSING and seen["size_bytes"] == NO_FILE
    is_kept = outcome.is_lasting or is_known_gone
    return old | seen | failure | ({} if is_kept else {"mtime_ns": _NEVER})


def _rows_of(paths: pa.ChunkedArray, *, known: pa.ChunkedArray) -> np.ndarray:
    """Return the row of each path in `known`, or -1; int64."""
    if known.equals(paths):  # the usual case; a lookup table of a million paths would take 200 MB
        return np.arange(len(paths))
    return np.asarray(pc.fill_null(pc.index_in(paths, value_set=known), -1)).astype(np.int64)


def _write_cache(data_dir: Path, table: pa.Table) -> None:
    # `prep plan` also writes this file, without the lock of a column.
    with folder_lock(data_dir):
        remove_temporaries(data_dir, of=lambda target: target == PROBES_FILE)
        write_table_file(data_dir / PROBES_FILE, table)
