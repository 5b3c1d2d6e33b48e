"""Probes of all sources of a manifest, kept in `<data>/probes.parquet` so that an unchanged file is never read twice.

A file counts as unchanged while its path, size and modification time are. A source that cannot be read any more
keeps the facts of its last good probe beside the failure: chunks that were made of it stay, although the file may
be gone.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.publish import folder_lock, remove_temporaries
from prep.failures import FailureCode, SourceFailure
from prep.table_file import read_table_file, write_table_file

PROBES_FILE = "probes.parquet"
_SAVE_INTERVAL_S = 30.0
_NO_FILE = -1

PROBES = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),  # -1: no such file
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
    ]
)


def read_probes(data_dir: Path) -> pa.Table:
    """The probes as they were stored last (schema PROBES), empty where missing or damaged; no source is read.

    Raises:
        OSError: they are there, and cannot be read. That is no reason to forget sources that have gone meanwhile.
    """
    try:
        return read_table_file(data_dir / PROBES_FILE, schema=PROBES)
    except (FileNotFoundError, ValueError):
        return PROBES.empty_table()


def probe_sources(
    data_dir: Path,
    paths: pa.ChunkedArray,
    *,
    num_threads: int,
    again_failed: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Probes of `paths`, one row each in their order (schema PROBES); reads only files that are new or have changed.

    Args:
        again_failed: also probe again what failed before, though its file looks the same.
        on_progress: called with (probed, to probe).
    """
    sizes, mtimes = _stat_all(paths, num_threads=num_threads)
    known = read_probes(data_dir)
    rows = _rows_of(paths, known=known["path"])
    hit = rows >= 0
    hit[hit] &= np.asarray(known["size_bytes"])[rows[hit]] == sizes[hit]
    hit[hit] &= np.asarray(known["mtime_ns"])[rows[hit]] == mtimes[hit]
    if again_failed:
        hit[hit] &= ~np.asarray(pc.is_valid(known["code"]))[rows[hit]]
    todo = np.flatnonzero(~hit)
    if not len(todo) and known["path"].equals(paths):
        return known
    fresh: list[dict[str, Any]] = []

    def assembled() -> pa.Table:
        """Known rows and those probed so far, in the order of `paths`; rows not probed yet are left out."""
        probed = pa.Table.from_pylist(fresh, schema=PROBES)
        both = pa.concat_tables([known, probed])
        source = np.where(hit, rows, -1)
        source[todo[: len(fresh)]] = len(known) + np.arange(len(fresh))
        return both.take(pa.array(source[source >= 0])).combine_chunks()

    saved_s = time.monotonic()
    with ThreadPoolExecutor(num_threads) as pool:

        def probe_one(row: int) -> dict[str, Any]:
            old = known.slice(rows[row], 1).to_pylist()[0] if rows[row] >= 0 else {}
            return _probe_row(paths[row].as_py(), int(sizes[row]), int(mtimes[row]), old=old)

        for record in pool.map(probe_one, todo.tolist()):
            fresh.append(record)
            on_progress(len(fresh), len(todo))
            if time.monotonic() - saved_s > _SAVE_INTERVAL_S:
                _write_cache(data_dir, assembled())
                saved_s = time.monotonic()
    table = assembled()
    _write_cache(data_dir, table)
    return table


def _rows_of(paths: pa.ChunkedArray, *, known: pa.ChunkedArray) -> np.ndarray:
    """Row of each path in `known`, or -1; int64."""
    if known.equals(paths):  # as a rule; a table of a million paths to search in would take 200 MB
        return np.arange(len(paths))
    return np.asarray(pc.fill_null(pc.index_in(paths, value_set=known), -1)).astype(np.int64)


def _stat_all(paths: pa.ChunkedArray, *, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.full(len(paths), _NO_FILE, np.int64)
    mtimes = np.zeros(len(paths), np.int64)

    def stat_slice(begin: int) -> None:
        for row, path in enumerate(paths.slice(begin, 4096).to_pylist(), begin):
            try:
                found = os.stat(path)  # noqa: PTH116 - a Path for each of a million files takes its time
            except (OSError, ValueError):
                continue
            sizes[row], mtimes[row] = found.st_size, found.st_mtime_ns

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(stat_slice, range(0, len(paths), 4096)))
    return sizes, mtimes


def _probe_row(path: str, size_bytes: int, mtime_ns: int, *, old: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"path": path, "size_bytes": size_bytes, "mtime_ns": mtime_ns}
    try:
        if size_bytes == _NO_FILE:
            raise SourceFailure(FailureCode.SOURCE_MISSING, "there is no such file")
        from prep.probe import probe

        # Size and time stay as found before the probe: if the file grew meanwhile, the next run sees it.
        return asdict(probe(Path(path))) | row
    except SourceFailure as failure:
        return old | row | {"code": str(failure.code), "message": failure.message}


def _write_cache(data_dir: Path, table: pa.Table) -> None:
    # `prep plan` writes it too, and holds no column.
    with folder_lock(data_dir):
        remove_temporaries(data_dir, of=lambda target: target == PROBES_FILE)
        write_table_file(data_dir / PROBES_FILE, table)
