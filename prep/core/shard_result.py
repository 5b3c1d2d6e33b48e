"""The result of making a shard, common to all columns, and the mapping of system errors to failure codes."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pyarrow as pa

from clipmill.manifests.errors import Inaccessible
from clipmill.prep.core.failures import MACHINE_FAULTS, SOURCE_AWAY, FailureCode
from clipmill.shards.commits import Failure


class ShardWork(Protocol):
    """Interface of a task that makes a shard."""

    @property
    def shard_id(self) -> int: ...


W = TypeVar("W", bound=ShardWork)


@dataclass(frozen=True)
class Stop:
    """Why nothing was committed for a shard; it counts as a failure of all videos in the shard."""

    code: FailureCode
    message: str


@dataclass(frozen=True)
class ShardResult:
    """Result of making a shard, as reported by its worker.

    Attributes:
        num_chunks: number of samples in the committed shard.
        num_reused: how many of them were copied from the previous shard without encoding.
        num_bytes: size of the tar in bytes; 0 is left out of the summary.
        failures: failures listed in the commit.
        stopped_by: why nothing was committed, or None.
        encoded_s: seconds of video encoded.
        cpu_s: user and system CPU time in seconds, including child processes.
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
        """All failures."""
        return [*self.failures, *([] if self.stopped_by is None else [self.stopped_by])]

    @property
    def machine_fault(self) -> str | None:
        """A failure that may be of the worker's machine (`clipmill.prep.engines`), or None."""
        # Mounts, a network or credentials that are missing there leave no sample at all.
        away = SOURCE_AWAY | {FailureCode.ACCESS_REFUSED, FailureCode.IO_ERROR}
        codes = MACHINE_FAULTS if self.num_chunks else MACHINE_FAULTS | away
        return next((f"{failure.code}: {failure.message}" for failure in self.reasons if failure.code in codes), None)

    @property
    def common_cause(self) -> Stop | None:
        """Why nothing was committed, or no sample made, if the reason may stop other shards too; None if it may not."""
        if self.stopped_by is not None or self.num_chunks > self.num_reused:
            return self.stopped_by
        causes = (Stop(FailureCode(failure.code), failure.message) for failure in self.failures)
        shared = (FailureCode.DISK_FULL, FailureCode.ACCESS_REFUSED)
        return next((cause for cause in causes if cause.code in shared), None)


def stopped(work: ShardWork, code: FailureCode, message: str) -> ShardResult:
    """Return the result of a shard for which nothing was committed."""
    return ShardResult(work.shard_id, stopped_by=Stop(code, message))


def system_errors_as_results(make: Callable[[W], ShardResult], work: W) -> ShardResult:
    """Return `make(work)`; errors of machine and bucket (disk full, out of memory, unreadable file) become a result."""
    try:
        return make(work)
    except OSError as error:
        code = FailureCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureCode.IO_ERROR
        where = f": {error.filename}" if error.filename else ""
        return stopped(work, code, f"{error.strerror or error}{where}")
    except Inaccessible as error:
        return stopped(work, FailureCode.IO_ERROR, str(error))
    except pa.ArrowException as error:
        return stopped(work, FailureCode.IO_ERROR, f"a table cannot be read: {error}")
    except MemoryError as error:
        return stopped(work, FailureCode.OUT_OF_MEMORY, str(error) or "the worker is out of memory")


def cpu_s() -> float:
    """Return the user and system CPU time in seconds of this process and of the child processes that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
