"""Heartbeats of running shards: small files that record their progress.

The files are in `<variant>/.tmp-running/`, where the driver's progress bar and `prep status` in another terminal read
them, from any node of a cluster. They are not part of the records: each run begins by deleting those of earlier runs.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from manifests.json_text import parse_json
from manifests.publish import TEMPORARY_PREFIX

RUNNING_FOLDER = f"{TEMPORARY_PREFIX}running"
_INTERVAL_S = 0.5
_STALE_S = 60.0


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


def running_shards(variant_dir: Path) -> list[ShardProgress]:
    """Return the progress of all shards with a heartbeat within the last minute."""
    running = []
    for path in sorted((variant_dir / RUNNING_FOLDER).glob("*.json")):
        # The file may be deleted or half written while it is read.
        with suppress(OSError, ValueError, TypeError):
            if time.time() - path.stat().st_mtime < _STALE_S:
                running.append(ShardProgress(**parse_json(path.read_text())))
    return running
