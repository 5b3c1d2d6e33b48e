"""Divide the probing of sources among the parts of a run (`--part K/N`).

The sources are divided into shares: share s of S contains every source whose row in the manifest modulo S is s. A part
claims a share (`PartRun.claim_share`), probes its new and changed sources, and stores their probes in
`<data>/.probes/<s>-of-<S>.parquet`, at intervals and at the end. If a part dies, another part claims its share and
continues from this file. The part that plans adds all shares to `probes.parquet`.

The file of a share is only a cache: as in `probes.parquet`, a row is used only if path, size and modification time
match the source. A late, outdated or missing file costs time, but never changes a plan.
"""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.locks import folder_lock
from clipmill.manifests.storage.mirrors import refresh
from clipmill.prep.core.data_folder import PROBES_FILE
from clipmill.prep.core.tables import read_table_file, write_table_file
from clipmill.prep.sources.probe_processes import MAX_BYTES, MAX_SOURCES
from clipmill.prep.sources.table import PROBES, SHARES_FOLDER, FileStates, Prober, add_shares, read_probes

if TYPE_CHECKING:
    from clipmill.prep.core.parts import PartRun

_SHARES_PER_PART = 8  # small shares: a killed part loses little, and fast and slow parts end at about the same time


def num_shares(states: FileStates, *, num_parts: int) -> int:
    """Return the number of shares. All parts get the same number, because it depends only on the files."""
    num_sources, num_bytes = len(states.size_bytes), int(states.size_bytes.clip(0).sum())
    num_tasks = max(math.ceil(num_sources / MAX_SOURCES), math.ceil(num_bytes / MAX_BYTES), 1)
    return max(1, min(num_tasks, num_sources, _SHARES_PER_PART * num_parts))


def probe_in_parts(
    data_dir: Path,
    paths: pa.ChunkedArray,
    states: FileStates,
    known_probes: pa.Table,
    *,
    todo: np.ndarray,
    part_run: "PartRun",
    prober: Prober,
) -> bool:
    """Probe shares of the files until no share is left, and store the probes. The caller can plan afterwards.

    Args:
        known_probes: Earlier probes of the files to probe, if any (schema PROBES).
        todo: Rows of the files to probe, int64 [N].

    Returns:
        True if no other part has planned yet. The caller must then add the shares to the stored probes.
    """
    count = num_shares(states, num_parts=part_run.part.count)
    folder, share_of = data_dir / SHARES_FOLDER, todo % count
    unfinished_shares = {int(share): paths.take(pa.array(todo[share_of == share])) for share in np.unique(share_of)}
    last_states: dict[Path, tuple[int, int]] = {}

    def share_path(share: int) -> Path:
        return folder / f"{share}-of-{count}.parquet"

    def has_changed(path: Path) -> bool:
        """Return True if the file exists and has changed since the last call."""
        with suppress(FileNotFoundError):
            state = path.stat()
            last_state, last_states[path] = last_states.get(path), (state.st_size, state.st_mtime_ns)
            return last_state != last_states[path]
        return False

    def find_unfinished() -> list[int]:
        """Return the shares with sources whose probes are neither in the share's file nor in `probes.parquet`."""
        with folder_lock(data_dir):  # this also refreshes the table if the data folder is in a bucket
            refresh(folder)
        # If the table has changed, another part has planned, and may already have ended.
        if unfinished_shares and has_changed(data_dir / PROBES_FILE):
            table = read_probes(data_dir, columns=["path", "size_bytes", "mtime_ns", "code"])
            table = table.filter(pc.is_in(table["path"], value_set=paths.take(pa.array(todo))))
            _, is_hit = prober.match(paths.take(pa.array(todo)), states.take(todo), table)
            for share in unfinished_shares.keys() - set(share_of[~is_hit].tolist()):
                del unfinished_shares[share]
        for share, sources in list(unfinished_shares.items()):
            if has_changed(share_path(share)):
                with suppress(FileNotFoundError, ValueError):
                    probed_paths = read_table_file(share_path(share), schema=PROBES, columns=["path"])["path"]
                    if pc.all(pc.is_in(sources, value_set=probed_paths)).as_py():
                        del unfinished_shares[share]
        return list(unfinished_shares)

    num_done = 0

    while (share := part_run.claim_share(find_unfinished)) is not None:
        rows, save = todo[share_of == share], partial(write_table_file, share_path(share))
        share_paths, file_states = paths.take(pa.array(rows)), states.take(rows)
        folder.mkdir(exist_ok=True)
        stored = add_shares(known_probes, [share_path(share)])
        stored_rows, is_hit = prober.match(share_paths, file_states, stored)
        show = partial(lambda offset, number, _: prober.on_progress(offset + number, len(todo)), num_done)
        save(replace(prober, on_progress=show).probe(share_paths, file_states, stored, stored_rows, is_hit, save=save))
        # Never claim a share twice, even if its file is not yet visible on this machine.
        unfinished_shares.pop(share, None)
        num_done += len(rows)
    return part_run.is_first
