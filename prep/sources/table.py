"""Probes of all sources of a manifest, kept in `<data>/probes.parquet` so that an unchanged file is never read twice.

A file counts as unchanged while its path, size and modification time are. A failure is kept likewise where it lies in
the file; one that the machine may have caused (permissions, a mount, a time limit) is looked into at every run. A
source that cannot be read any more keeps the facts of its last good probe beside the failure: chunks that were made of
it stay, although the file may be gone.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.publish import folder_lock, remove_temporaries
from prep.core.data_folder import PROBES_FILE
from prep.core.failures import FailureCode, SourceFailure
from prep.core.table_file import read_table_file, write_table_file
from prep.sources.files import NO_FILE, look_at_sources

if TYPE_CHECKING:
    from prep.sources.probe import SourceFacts

_SAVE_INTERVAL_S = 30.0
_NEVER = -1  # a time of change that no file has: the row is not kept for the next run
# Goes up when probes begin to accept what they refused before: older failures are then looked into again.
_RULES = {b"probe_rules": b"2"}

PROBES = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),  # NO_FILE: it could not be looked at
        pa.field("mtime_ns", pa.int64(), nullable=False),
        pa.field("code", pa.string()),  # why it cannot be read now; null when it can
        pa.field("message", pa.string()),
        pa.field("fingerprint", pa.string()),
        pa.field("end_s", pa.float64()),
        pa.field("fps", pa.float64()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("codec", pa.string()),
        pa.field("key_gap_s", pa.float64()),
    ],
    metadata=_RULES,
)


def read_probes(data_dir: Path) -> pa.Table:
    """The probes as they were stored last (schema PROBES), empty where missing or damaged; no source is read.

    Raises:
        OSError: they are there, and cannot be read now: no reason to forget sources that have gone since.
    """
    try:
        return read_table_file(data_dir / PROBES_FILE, schema=PROBES)
    except (FileNotFoundError, ValueError):
        return PROBES.empty_table()


def probe_sources(
    data_dir: Path,
    paths: pa.ChunkedArray,
    *,
    num_workers: int,
    again_failed: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Probes of `paths`, one row each in their order (schema PROBES); reads only files that are new or have changed.

    Args:
        num_workers: threads that look at the files, and most processes that read them.
        again_failed: also probe again what failed before, though its file looks the same.
        on_progress: called with (probed, to probe).
    """
    looks = look_at_sources(paths, num_threads=num_workers)
    sizes, mtimes = looks.size_bytes, looks.mtime_ns
    known = read_probes(data_dir)
    rows = _rows_of(paths, known=known["path"])
    hit = rows >= 0
    hit[hit] &= np.asarray(known["size_bytes"])[rows[hit]] == sizes[hit]
    hit[hit] &= np.asarray(known["mtime_ns"])[rows[hit]] == mtimes[hit]
    if again_failed or known.schema.metadata != PROBES.metadata:
        hit[hit] &= ~np.asarray(pc.is_valid(known["code"]))[rows[hit]]
    todo = np.flatnonzero(~hit)
    if not len(todo) and known["path"].equals(paths) and known.schema.metadata == PROBES.metadata:
        return known
    fresh: list[dict[str, Any]] = []
    source = np.where(hit, rows, -1)

    def assembled() -> pa.Table:
        """Known rows and those probed so far, in the order of `paths`; rows not probed yet are left out."""
        both = pa.concat_tables([known.cast(PROBES), pa.Table.from_pylist(fresh, schema=PROBES)])
        return both.take(pa.array(source[source >= 0])).combine_chunks()

    saved_s = time.monotonic()
    for row, outcome in _outcomes(paths, todo.tolist(), looks.failures, num_workers=num_workers):
        old = known.slice(rows[row], 1).to_pylist()[0] if rows[row] >= 0 else {}
        seen = {"path": paths[row].as_py(), "size_bytes": int(sizes[row]), "mtime_ns": int(mtimes[row])}
        source[row] = len(known) + len(fresh)
        fresh.append(_record(seen, outcome, old=old))
        on_progress(len(fresh), len(todo))
        if time.monotonic() - saved_s > _SAVE_INTERVAL_S:
            _write_cache(data_dir, assembled())
            saved_s = time.monotonic()
    table = assembled()
    if not table.equals(known, check_metadata=True):
        _write_cache(data_dir, table)
    return table


def _outcomes(
    paths: pa.ChunkedArray, todo: list[int], failures: dict[int, SourceFailure], *, num_workers: int
) -> "Iterator[tuple[int, SourceFacts | SourceFailure]]":
    """What came of each of the rows `todo`; those with `failures` could not even be looked at."""
    yield from ((row, failures[row]) for row in todo if row in failures)
    readable = [row for row in todo if row not in failures]
    if readable:
        from prep.sources.probe_processes import probe_each

        # Size and time stay as found before the probe: if the file grew meanwhile, the next run sees it.
        given = paths.take(pa.array(readable)).to_pylist()
        yield from ((readable[number], outcome) for number, outcome in probe_each(given, max_processes=num_workers))


def _record(seen: dict[str, Any], outcome: "SourceFacts | SourceFailure", *, old: dict[str, Any]) -> dict[str, Any]:
    """A row of PROBES."""
    if not isinstance(outcome, SourceFailure):
        return asdict(outcome) | seen
    failure = {"code": str(outcome.code), "message": outcome.message}
    is_known_gone = outcome.code == FailureCode.SOURCE_MISSING and seen["size_bytes"] == NO_FILE
    is_kept = outcome.is_lasting or is_known_gone
    return old | seen | failure | ({} if is_kept else {"mtime_ns": _NEVER})


def _rows_of(paths: pa.ChunkedArray, *, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each path in `known`, or -1; int64."""
    if known.equals(paths):  # as a rule; a table of a million paths to search in would take 200 MB
        return np.arange(len(paths))
    return np.asarray(pc.fill_null(pc.index_in(paths, value_set=known), -1)).astype(np.int64)


def _write_cache(data_dir: Path, table: pa.Table) -> None:
    # `prep plan` writes it too, and holds no column.
    with folder_lock(data_dir):
        remove_temporaries(data_dir, of=lambda target: target == PROBES_FILE)
        write_table_file(data_dir / PROBES_FILE, table)
