"""Signs of life of a running shard: a small file that says how far it is.

The files lie in `<variant>/.tmp-running/`, where the driver's progress bar and `prep status` of another terminal
find them, on any node of a cluster. They are no record of anything: a run begins by removing what an earlier one
left.
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
    """How far a running shard is."""

    shard_id: int
    num_chunks: int  # planned
    num_done: int


class Heartbeat:
    """Writes a shard's progress while its block runs."""

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
        """Tells that `num_done` chunks are done; at most twice a second."""
        now_s = time.monotonic()
        if now_s - self._written_s < _INTERVAL_S:
            return
        self._written_s = now_s
        text = json.dumps(asdict(ShardProgress(self._shard_id, self._num_chunks, num_done)))
        # A sign of life is not worth failing for: a full disk will be met, and named, by the shard itself.
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(text)


def running_shards(variant_dir: Path) -> list[ShardProgress]:
    """The shards that have shown a sign of life within the last minute."""
    running = []
    for path in sorted((variant_dir / RUNNING_FOLDER).glob("*.json")):
        # It may go, or be half written, while it is read.
        with suppress(OSError, ValueError, TypeError):
            if time.time() - path.stat().st_mtime < _STALE_S:
                running.append(ShardProgress(**parse_json(path.read_text())))
    return running
