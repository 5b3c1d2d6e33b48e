"""Make a shard of any column in a worker: add samples, record failures, show progress, commit, and return the result.

A worker writes its progress to a heartbeat, a small file in `<variant>/.tmp-running/`. The driver and `prep status`
read the heartbeats of all nodes of a cluster. A run deletes the heartbeats of earlier runs when it starts. System
errors become results with failure codes.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import pyarrow as pa

from clipmill.manifests.errors import Inaccessible, StorageRefused
from clipmill.manifests.publish import TEMPORARY_PREFIX, parse_json
from clipmill.prep.core.failures import (
    MACHINE_FAULTS,
    MOUNT_FAULTS,
    PROGRAM_FAULTS,
    SOURCE_AWAY,
    FailureCode,
    refusal_code,
)
from clipmill.prep.engines import MachineFault
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.writer import Sample, ShardWriter

RUNNING_FOLDER = f"{TEMPORARY_PREFIX}running"
_INTERVAL_S = 0.5
_STALE_S = 60.0
_MAX_READ_FRACTION = 0.02  # maximum fraction of the driver's time that is spent on reading heartbeats


class ShardWork(Protocol):
    """Interface of a task that makes a shard."""

    @property
    def shard_id(self) -> int: ...


class NewShardWork(ShardWork, Protocol):
    """Interface of a task that makes a shard with `begin_shard`."""

    @property
    def variant_dir(self) -> Path: ...
    @property
    def plan_fingerprint(self) -> str: ...


W = TypeVar("W", bound=ShardWork)


@dataclass(frozen=True)
class Stop:
    """Reason why no commit was written for a shard. A stop counts as a failure of all videos in the shard."""

    code: FailureCode
    message: str


@dataclass(frozen=True)
class ShardResult:
    """Result of a task that makes a shard, as reported by its worker.

    Attributes:
        shard_id: ID of the shard.
        num_chunks: Number of samples in the committed shard.
        num_reused: Number of samples that were copied from stored shards.
        num_bytes: Size of the tar in bytes.
        failures: Failures recorded in the commit.
        stopped_by: Reason why no commit was written, or None.
        encoded_s: Seconds of video that were encoded or read to make samples.
        cpu_s: User and system CPU time in seconds, including child processes.
    """

    shard_id: int
    num_chunks: int = 0
    num_reused: int = 0
    num_bytes: int = 0
    failures: tuple[Failure, ...] = ()
    stopped_by: Stop | None = None
    encoded_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def reasons(self) -> "list[Stop | Failure]":
        """Failures of samples, and the reason why no commit was written."""
        return [*self.failures, *([] if self.stopped_by is None else [self.stopped_by])]

    @property
    def machine_fault(self) -> MachineFault | None:
        """Failure that the worker's machine may have caused, or None."""
        # A machine that lacks a mount, or whose programs do not run, makes no sample at all. If the shard has new
        # samples, a mount may have been lost while the shard was made.
        sure_codes = MACHINE_FAULTS if self.has_new_samples else MACHINE_FAULTS | MOUNT_FAULTS
        doubtful_codes = MOUNT_FAULTS if self.has_new_samples else PROGRAM_FAULTS
        for codes in (sure_codes, doubtful_codes):
            for failure in self.reasons:
                if failure.code in codes:
                    return MachineFault(f"{failure.code}: {failure.message}", is_doubtful=codes is doubtful_codes)
        return None

    @property
    def has_new_samples(self) -> bool:
        """True if the worker made at least one sample that is not a copy."""
        return self.num_chunks > self.num_reused

    @property
    def common_cause(self) -> Stop | None:
        """Reason for the missing commit or missing samples, if it may affect other shards too; otherwise None."""
        if self.stopped_by is not None:
            return self.stopped_by
        codes = {FailureCode.STORAGE_REFUSED}  # affects other shards even if this shard has new samples
        if not self.has_new_samples:
            codes |= {FailureCode.DISK_FULL, FailureCode.ACCESS_REFUSED, *SOURCE_AWAY}
        causes = (Stop(FailureCode(failure.code), failure.message) for failure in self.failures)
        return next((cause for cause in causes if cause.code in codes), None)


def stop_result(work: ShardWork, code: FailureCode, message: str) -> ShardResult:
    """Return the result of a shard for which no commit was written."""
    return ShardResult(work.shard_id, stopped_by=Stop(code, message))


def system_errors_as_results(make: Callable[[W], ShardResult], work: W) -> ShardResult:
    """Call `make(work)`, and return its result with the CPU time of the call.

    Errors of the machine or the bucket (disk full, out of memory, unreadable file) become results with failure codes.
    """
    start_cpu_s = cpu_s()
    try:
        result = make(work)
        return replace(result, cpu_s=cpu_s() - start_cpu_s)
    except StorageRefused as error:
        return stop_result(work, refusal_code(error), str(error))
    except OSError as error:
        code = FailureCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureCode.IO_ERROR
        where = f": {error.filename}" if error.filename else ""
        return stop_result(work, code, f"{error.strerror or error}{where}")
    except Inaccessible as error:
        code = refusal_code(error.cause) if isinstance(error.cause, StorageRefused) else FailureCode.IO_ERROR
        return stop_result(work, code, str(error))
    except pa.ArrowException as error:
        return stop_result(work, FailureCode.IO_ERROR, f"a table cannot be read: {error}")
    except MemoryError as error:
        return stop_result(work, FailureCode.OUT_OF_MEMORY, str(error) or "the worker is out of memory")


def cpu_s() -> float:
    """Return the user and system CPU time in seconds of this process and its finished child processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(frozen=True)
class ShardProgress:
    """Progress of a running shard.

    Attributes:
        shard_id: ID of the shard.
        num_chunks: Number of planned samples.
        num_done: Number of finished samples.
    """

    shard_id: int
    num_chunks: int
    num_done: int


class Heartbeat:
    """Context manager that writes the progress of a shard to a file, and removes the file at the end."""

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
        """Record the number of finished samples. The file is written at most twice a second."""
        now_s = time.monotonic()
        if now_s - self._written_s < _INTERVAL_S:
            return
        self._written_s = now_s
        text = json.dumps(asdict(ShardProgress(self._shard_id, self._num_chunks, num_done)))
        # A heartbeat that cannot be written must not fail the shard. If the disk is full, writing the shard fails.
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(text)


class NewShard:
    """Shard that is being made (`begin_shard`).

    Attributes:
        failures: Failures of samples so far.
        show: Function that records the number of finished samples. `add` calls it.
        check: Function that raises a ValueError for a sample that `add` would reject.
    """

    def __init__(self, work: NewShardWork, writer: ShardWriter, beat: Heartbeat, *, column: str, split: str) -> None:
        self._work, self._writer, self._column, self._split = work, writer, column, split
        self._content = hashlib.sha256(work.plan_fingerprint.encode())
        self.failures: list[Failure] = []
        self.show, self.check = beat.show, writer.check

    @property
    def num_samples(self) -> int:
        """Number of samples added so far."""
        return self._writer.num_samples

    def add(self, sample: Sample, *, content: bytes = b"") -> None:
        """Append a sample.

        Args:
            content: Bytes to hash for the file names, in addition to the fingerprint of the plan.
        """
        self._writer.add(sample)
        self._content.update(content)
        self.show(self.num_samples)

    def fail(self, failure: Failure, *, content: str) -> None:
        """Record the failure of a sample.

        Args:
            content: Text to hash for the file names, in addition to the fingerprint of the plan.
        """
        self.failures.append(failure)
        self._content.update(content.encode())

    def commit(self, *, num_reused: int = 0, encoded_s: float = 0.0) -> ShardResult:
        """Publish the files of the shard (if it has samples) and its commit; return the result.

        Args:
            num_reused: Number of samples that were copied from stored shards.
            encoded_s: Seconds of video that were encoded or read to make samples.
        """
        work, num_samples = self._work, self.num_samples
        files = self._writer.publish(self._content.hexdigest()) if num_samples else None
        failures = tuple(self.failures)
        commit = Commit(self._column, work.shard_id, self._split, work.plan_fingerprint, files, failures)
        write_commit(work.variant_dir, commit)
        num_bytes = files.tar_bytes if files else 0
        return ShardResult(work.shard_id, num_samples, num_reused, num_bytes, failures, encoded_s=encoded_s)


@contextmanager
def begin_shard(
    work: NewShardWork,
    *,
    column: str,
    split: str,
    extensions: Sequence[str],
    fields: Sequence[pa.Field],
    num_planned: int,
) -> Iterator[NewShard]:
    """Context manager that starts a shard, and removes its files at the end unless the shard was committed.

    Args:
        work: Task of the worker.
        column: Name of the column.
        split: Split of the samples.
        extensions: Extensions of the members of every sample, in order.
        fields: Index fields of the column.
        num_planned: Number of planned samples, for the progress display.
    """
    writer = ShardWriter(work.variant_dir, shard_id=work.shard_id, extensions=extensions, fields=fields)
    with Heartbeat(work.variant_dir, work.shard_id, num_chunks=num_planned) as beat, writer:
        yield NewShard(work, writer, beat, column=column, split=split)


class RunningChunks:
    """Counter of finished samples in running shards, for the progress bar of the driver.

    Reading the heartbeats of thousands of workers takes time, especially on a network disk. The heartbeats are
    therefore read at most once a second, and less often if reading takes long.

    Args:
        variant_dir: Folder of the variant.
        shard_ids: IDs of the shards to count. Other parts of the run may also write heartbeats.
        costs: Mean cost of a sample in each shard, keyed by shard ID: 1 for a sample that is made, and less for a
            sample that is copied. Default: 1.

    Attributes:
        has_begun: True once a worker has started a shard.
    """

    def __init__(
        self, variant_dir: Path, *, shard_ids: Container[int], costs: Mapping[int, float] | None = None
    ) -> None:
        self._variant_dir, self._shard_ids, self._costs = variant_dir, shard_ids, costs or {}
        self._num_done: dict[int, int] = {}
        self.has_begun = False
        self._total = 0
        self._next_s = time.monotonic()

    def finish(self, shard_id: int) -> None:
        """Stop counting a shard that has finished."""
        self._total -= self._num_done.pop(shard_id, 0)

    def work_done(self) -> float:
        """Return the cost of the finished samples in running shards, as of the last call to `num_done`."""
        return sum(num_done * self._costs.get(shard_id, 1.0) for shard_id, num_done in self._num_done.items())

    def num_done(self) -> int:
        """Return the number of finished samples in running shards when the heartbeats were last read."""
        start_s = time.monotonic()
        if start_s >= self._next_s:
            running = running_shards(self._variant_dir)
            self._num_done = {shard.shard_id: shard.num_done for shard in running if shard.shard_id in self._shard_ids}
            self.has_begun = self.has_begun or bool(self._num_done)
            self._total = sum(self._num_done.values())
            end_s = time.monotonic()
            self._next_s = end_s + max(1.0, (end_s - start_s) / _MAX_READ_FRACTION)
        return self._total


def running_shards(variant_dir: Path) -> list[ShardProgress]:
    """Return the progress of all shards with a heartbeat from the last minute."""
    running = []
    for path in sorted((variant_dir / RUNNING_FOLDER).glob("*.json")):
        # The file may be deleted or incompletely written while it is read.
        with suppress(OSError, ValueError, TypeError):
            if time.time() - path.stat().st_mtime < _STALE_S:
                running.append(ShardProgress(**parse_json(path.read_text())))
    return running
