"""Heartbeats of running shards: small files that record their progress.

The files are in `<variant>/.tmp-running/`, where the driver's progress bar and `prep status` in another terminal read
them, from any node of a cluster. They are not part of the records: each run begins by deleting those of earlier runs.
"""

import json
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from clipmill.manifests.json_text import parse_json
from clipmill.manifests.publish import TEMPORARY_PREFIX

RUNNING_FOLDER = f"{TEMPORARY_PREFIX}running"
_INTERVAL_S = 0.5
_STALE_S = 60.0
_MAX_READING = 0.02  # of a driver's time may be spent on reading heartbeats


@dataclass(frozen=True)
class ShardProgress:
    """Progress of a running shard."""

    shard_id: int
    num_chunks: int  # number of chunks planned
    num_done: int


class Heartbeat:
    """Context manager that writes a shard's progress while its block runs."""

    def __init__(self, variant_dir: Path, shard_id: int, *, num_chunks: int) -> None:
        self._path = variant_dir / RUNNING_FOLDER / f"{shard_id:06d}.json"
        self._shard_id, self._num_chunks = shard_id, num_chunks
        self._written_s = 0.0

    def __enter__(self) -> Self:
        self.show(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def show(self, num_done: int) -> None:
        """Record that `num_done` chunks are done; the file is written at most twice a second."""
        now_s = time.monotonic()
        if now_s - self._written_s < _INTERVAL_S:
            return
        self._written_s = now_s
        text = json.dumps(asdict(ShardProgress(self._shard_id, self._num_chunks, num_done)))
        # A heartbeat must not fail the shard: if the disk is full, the shard itself will report it.
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(text)


class RunningChunks:
    """Number of chunks that are done in running shards, for the progress bar of the driver.

    The heartbeats of thousands of workers take time to read, above all on a network disk. They are read at most once a
    second, and less often if reading takes long.

    Args:
        shard_ids: the shards to count; other parts of the same work may be running too.
        shares: share of a shard's chunks that are work, by shard ID; the others are copied at almost no cost. Shards
            that are not listed have none to copy.
    """

    def __init__(
        self, variant_dir: Path, *, shard_ids: Container[int], shares: Mapping[int, float] | None = None
    ) -> None:
        self._variant_dir, self._shard_ids, self._shares = variant_dir, shard_ids, shares or {}
        self._num_done: dict[int, int] = {}
        self._has_begun = False
        self._total = 0
        self._next_s = time.monotonic()

    def finish(self, shard_id: int) -> None:
        """Stop counting a shard, which has finished."""
        self._total -= self._num_done.pop(shard_id, 0)

    @property
    def has_begun(self) -> bool:
        """True once a worker has begun a shard."""
        return self._has_begun

    def work_done(self) -> float:
        """Return the work done in running shards when `num_done` was called, in chunks."""
        return sum(done * self._shares.get(shard_id, 1.0) for shard_id, done in self._num_done.items())

    def num_done(self) -> int:
        """Return the number of chunks done when the heartbeats were last read."""
        begin_s = time.monotonic()
        if begin_s >= self._next_s:
            running = running_shards(self._variant_dir)
            self._num_done = {one.shard_id: one.num_done for one in running if one.shard_id in self._shard_ids}
            self._has_begun = self._has_begun or bool(self._num_done)
            self._total = sum(self._num_done.values())
            end_s = time.monotonic()
            self._next_s = end_s + max(1.0, (end_s - begin_s) / _MAX_READING)
        return self._total


def running_shards(variant_dir: Path) -> list[ShardProgress]:
    """Return the progress of all shards with a heartbeat within the last minute."""
    running = []
    for path in sorted((variant_dir / RUNNING_FOLDER).glob("*.json")):
        # The file may be deleted or half written while it is read.
        with suppress(OSError, ValueError, TypeError):
            if time.time() - path.stat().st_mtime < _STALE_S:
                running.append(ShardProgress(**parse_json(path.read_text())))
    return running
