"""What became of a shard, whatever its column, and how trouble of a worker's machine becomes a named failure."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pyarrow as pa

from prep.core.failures import FailureCode
from shards.commits import Failure


class ShardWork(Protocol):
    """What every task that makes a shard tells of itself."""

    @property
    def shard_id(self) -> int: ...


W = TypeVar("W", bound=ShardWork)


@dataclass(frozen=True)
class Stop:
    """Why nothing of a shard was committed; a failure of all of its videos."""

    code: FailureCode
    message: str


@dataclass(frozen=True)
class ShardResult:
    """What became of a shard, as its worker tells it.

    Attributes:
        num_chunks: in the committed shard.
        num_reused: of these, taken over without encoding.
        num_bytes: of the tar.
        failures: as in the commit.
        stopped_by: why nothing was committed, or None.
        encoded_s: seconds of video that were encoded.
        cpu_s: user and system seconds spent, those of programs that it ran included.
    """

    shard_id: int
    num_chunks: int = 0
    num_reused: int = 0
    num_bytes: int = 0
    failures: tuple[Failure, ...] = ()
    stopped_by: Stop | None = None
    encoded_s: float = 0.0
    cpu_s: float = 0.0


def stopped(work: ShardWork, code: FailureCode, message: str) -> ShardResult:
    """The result of a shard of which nothing was committed."""
    return ShardResult(work.shard_id, stopped_by=Stop(code, message))


def stopping_at_trouble(make: Callable[[W], ShardResult], work: W) -> ShardResult:
    """`make(work)`; what its machine lacks (space, memory, a readable file) is the result, not an exception."""
    try:
        return make(work)
    except OSError as error:
        code = FailureCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FailureCode.IO_ERROR
        where = f": {error.filename}" if error.filename else ""
        return stopped(work, code, f"{error.strerror or error}{where}")
    except pa.ArrowException as error:
        return stopped(work, FailureCode.IO_ERROR, f"a table cannot be read: {error}")
    except MemoryError as error:
        return stopped(work, FailureCode.OUT_OF_MEMORY, str(error) or "the worker has no memory left")


def cpu_s() -> float:
    """User and system seconds of this process and of the programs that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
