"""Detect the shots of all sources, and store them in `<data>/shots.parquet`, so that no source is searched twice.

A row is identified by the fingerprint and length of a source, and by the detector with its settings. If any of these
changes, the source is searched again. If a source is removed from the manifest, its rows are kept, because it may be
added again. Rows of detectors that no variant uses are removed when the table is next written. Failures that the file
caused are also stored. Sources with failures that the machine may have caused are searched again in every run.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import remove_temporaries
from clipmill.prep.core.data_folder import SHOTS_FILE
from clipmill.prep.core.failures import FailureCode, SourceFailure, loss_code
from clipmill.prep.core.progress import warn_refused
from clipmill.prep.core.shard_result import cpu_s
from clipmill.prep.core.tables import as_array, read_table_file, write_table_file
from clipmill.prep.engines import Check, Engine, MachineFault, Outcome, RefusedNode
from clipmill.prep.sources.access import current_fingerprint
from clipmill.prep.sources.detector import Detector

_MAX_SAVE_FRACTION = 0.05  # maximum fraction of the run time to spend on saving

SHOTS = pa.schema(
    [
        pa.field("detector", pa.string(), nullable=False),  # Detector.key
        pa.field("fingerprint", pa.string(), nullable=False),  # fingerprint of the source
        pa.field("num_frames", pa.int64(), nullable=False),  # length of the video at the detector's frame rate
        # First frame of every shot except the first shot; null after a failure.
        pa.field("cuts", pa.list_(pa.field("element", pa.int32()))),
        pa.field("code", pa.string()),  # failure code, otherwise null
        pa.field("message", pa.string()),
    ]
)


def read_shots(data_dir: Path) -> pa.Table:
    """Return the stored shots (schema SHOTS); empty if they are missing or damaged.

    Raises:
        OSError: The file exists but cannot be read now. The file must not be discarded, because it took hours to make.
    """
    path = data_dir / SHOTS_FILE
    try:
        return read_table_file(path, schema=SHOTS)
    except FileNotFoundError:
        pass
    except ValueError as error:
        sys.stderr.write(f"warning: {path} is damaged: {error}; the shots will be detected again\n")
    return SHOTS.empty_table()


def shot_rows(shots: pa.Table, *, key: str, fingerprints: pa.Array, num_frames: np.ndarray) -> np.ndarray:
    """Return the row of each video in `shots`, int64 [videos]; -1 if its shots are unknown.

    Args:
        key: Key of the detector.
        fingerprints: Fingerprints of the sources; null if a source has none.
        num_frames: Number of frames of each video at the detector's frame rate, int64 [videos].
    """
    rows = np.flatnonzero(np.asarray(pc.equal(shots["detector"], key)))
    known_fingerprints = as_array(shots["fingerprint"]).take(pa.array(rows))
    indices = pc.index_in(fingerprints, value_set=known_fingerprints, skip_nulls=True)
    positions = np.asarray(pc.fill_null(indices, -1)).astype(np.int64)
    is_hit = positions >= 0
    positions[is_hit] = rows[positions[is_hit]]
    is_hit[is_hit] &= np.asarray(shots["num_frames"])[positions[is_hit]] == num_frames[is_hit]
    return np.where(is_hit, positions, -1)


@dataclass(frozen=True)
class ShotTask:
    """A source whose shots a worker detects.

    Attributes:
        num_frames: Number of frames at the detector's frame rate.
        timeline: Timeline of the source (`clipmill.shards.timeline.model.Timeline.to_json`).
    """

    path: str
    fingerprint: str
    num_frames: int
    detector: Detector
    timeline: str = ""


@dataclass(frozen=True)
class ShotResult:
    """The cuts of a source, or the reason why the detection failed."""

    cuts: tuple[int, ...] = ()
    failure: tuple[FailureCode, str, bool] | None = None  # code, message, `SourceFailure.is_lasting`
    cpu_s: float = 0.0

    @property
    def machine_fault(self) -> MachineFault | None:
        """Failure that the worker's machine may have caused, or None."""
        if self.failure is None or self.failure[2]:
            return None
        return MachineFault(f"{self.failure[0]}: {self.failure[1]}")


def find_shots(task: ShotTask) -> ShotResult:
    """Detect the shots of a source. This function runs in a worker."""
    from clipmill.prep.sources.shots import detect_cuts
    from clipmill.shards.timeline.model import Timeline

    begin_s = cpu_s()
    try:
        if current_fingerprint(task.path) != task.fingerprint:
            raise SourceFailure(
                FailureCode.SOURCE_CHANGED, "the file has changed since the run was planned", is_lasting=False
            )
        timeline = Timeline.from_json(task.timeline)
        cuts = detect_cuts(task.path, timeline=timeline, num_frames=task.num_frames, detector=task.detector)
    except SourceFailure as failure:
        return ShotResult(failure=(failure.code, failure.message, failure.is_lasting), cpu_s=cpu_s() - begin_s)
    return ShotResult(tuple(cuts), cpu_s=cpu_s() - begin_s)


@dataclass(frozen=True)
class Detection:
    """Result of `detect_shots`.

    Attributes:
        shots: Stored and new rows, including failures that are not stored (schema SHOTS).
        num_videos: Number of sources that were searched.
        cpu_s: CPU time of the workers in seconds.
        refused_nodes: Nodes that were refused or lost during the detection.
    """

    shots: pa.Table
    num_videos: int
    cpu_s: float
    refused_nodes: tuple[RefusedNode, ...]


def detect_shots(
    data_dir: Path,
    tasks: list[ShotTask],
    *,
    shots: pa.Table,
    key: str,
    used_detectors: Collection[str],
    engine: Engine,
    check: Check,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Detection:
    """Detect the shots of sources in parallel, and store the results as they arrive.

    The caller must hold the lock of `video`.

    Args:
        tasks: Sources to search, without duplicates.
        shots: Stored shots.
        key: Key of the detector that all tasks use.
        used_detectors: Keys of the detectors in use. Rows of other detectors are removed.
        check: Function to call in every worker before its first task.
        on_progress: Function to call with (number of sources searched, number of sources to search).
    """
    fingerprints = pa.array([task.fingerprint for task in tasks], pa.string())
    is_searched = pc.and_(pc.is_in(shots["fingerprint"], value_set=fingerprints), pc.equal(shots["detector"], key))
    is_used = pc.is_in(shots["detector"], value_set=pa.array(sorted(used_detectors), pa.string()))
    kept_rows = shots.filter(pc.and_not(is_used, is_searched))
    new_rows: list[dict[str, object]] = []
    transient_rows: list[dict[str, object]] = []  # failures of sources that the next run may be able to search
    refused_nodes: list[RefusedNode] = []
    last_save_s = time.monotonic()
    save_duration_s, total_cpu_s = 0.0, 0.0

    def save() -> None:
        nonlocal last_save_s, save_duration_s
        begin_s = time.monotonic()
        table = _join_rows(kept_rows, new_rows)
        # Sort the table, so that it does not depend on the order in which the sources finished.
        table = table.sort_by([("detector", "ascending"), ("fingerprint", "ascending")]).combine_chunks()
        with folder_lock(data_dir):
            remove_temporaries(data_dir, matches=lambda target: target == SHOTS_FILE)
            write_table_file(data_dir / SHOTS_FILE, table)
        last_save_s = time.monotonic()
        save_duration_s = last_save_s - begin_s

    sorted_tasks = sorted(tasks, key=lambda task: (-task.num_frames, task.fingerprint))
    num_saved = 0
    try:
        for outcome in _search_sources(engine, sorted_tasks, check=check):
            if isinstance(outcome, RefusedNode):
                refused_nodes.append(outcome)
                warn_refused(outcome)
            elif outcome is not None:
                task = outcome.task
                result = outcome.result or ShotResult(
                    failure=(loss_code(crashed=outcome.crashed), outcome.lost or "", False)
                )
                row = {"detector": key, "fingerprint": task.fingerprint, "num_frames": task.num_frames}
                if result.failure is None:
                    new_rows.append({**row, "cuts": list(result.cuts)})
                else:
                    code, message, is_lasting = result.failure
                    (new_rows if is_lasting else transient_rows).append({**row, "code": str(code), "message": message})
                total_cpu_s += result.cpu_s
                on_progress(len(new_rows) + len(transient_rows), len(tasks))
            if len(new_rows) > num_saved and time.monotonic() - last_save_s >= save_duration_s / _MAX_SAVE_FRACTION:
                save()
                num_saved = len(new_rows)
    finally:
        if len(new_rows) > num_saved:
            save()
    return Detection(_join_rows(kept_rows, [*new_rows, *transient_rows]), len(tasks), total_cpu_s, tuple(refused_nodes))


def _search_sources(
    engine: Engine, tasks: list[ShotTask], *, check: Check
) -> Iterator[Outcome[ShotTask, ShotResult] | RefusedNode | None]:
    """Search all sources with `find_shots`. Then search the sources of lost workers again, one at a time.

    Without the shots of a source, its chunks would be unknown, and a later run would assign them to different shards.
    """
    lost_tasks = []
    for outcome in engine.run(find_shots, tasks, check=check, name=_task_name):
        if isinstance(outcome, Outcome) and outcome.lost is not None:
            lost_tasks.append(outcome.task)
        else:
            yield outcome
    for task in lost_tasks:
        yield from engine.run(find_shots, [task], check=check, name=_task_name)


def _task_name(task: ShotTask) -> str:
    return f"shots {Path(task.path).name}"


def _join_rows(stored: pa.Table, rows: list[dict[str, object]]) -> pa.Table:
    return pa.concat_tables([stored.cast(SHOTS), pa.Table.from_pylist(rows, schema=SHOTS)]).combine_chunks()
