"""A run in a bucket: its lock, the write access of its ranks, and uploads that survive an outage.

Each process has its own local folder, which mirrors the run (`clipmill.train.config.shards.local_folder` mounts the run
with `clipmill.manifests.storage.mounting`). All other code therefore works with paths, and the nodes share only the
bucket:

- Rank 0 holds the lock of the run, which is a lease. The other ranks write only while rank 0 holds the lock
  (`share_lock`). Therefore a node that comes back after the lease has expired cannot change anything.
- Small files are uploaded as soon as they are published. Files that grow line by line are uploaded twice a minute,
  before a checkpoint becomes complete, and at the end (`upload_periodically`).
- Each rank uploads its part of a checkpoint under a name that is unique to this process. Rank 0 uploads checkpoint.json
  last: a checkpoint exists as soon as this file exists (`clipmill.train.run.checkpoint_writer`).
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.leases import EXPIRY_S, LeaseHeld, LeaseLost
from clipmill.manifests.storage.mirrors import Mirror
from clipmill.manifests.storage.stores import NoResponse
from clipmill.train.distributed.world import World

LOCK = "run.lock"
PERIOD_S = 30.0  # time between uploads of growing files
PATIENCE_S = 900.0  # maximum time to retry requests; less than the half hour that ranks wait for each other
_POLL_S, _PAUSE_S = 1.0, 5.0

Outcome = TypeVar("Outcome")


@contextmanager
def hold_run(mirror: Mirror, *, wait_s: float) -> Iterator[None]:
    """Hold the lock of a run within the block.

    The lock of a killed process expires after a minute, or immediately if the next process is on the same machine.

    Args:
        wait_s: Maximum time in seconds to wait for a process that still renews its lock.

    Raises:
        LeaseHeld: Another process trains in this run.
    """
    deadline_s = time.monotonic() + wait_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(mirror.column_lock(LOCK, on_wait=_report_wait))
                break
            except LeaseHeld:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(_POLL_S)
        yield


def _report_wait(holder: str) -> None:
    sys.stderr.write(
        f"waiting for the lock of {holder}; the lock expires within {EXPIRY_S:g} s if that process was killed\n"
    )


def share_lock(mirror: Mirror, *, world: World) -> None:
    """Let all ranks write into a run while rank 0 holds the lock of the run. All ranks must call this function.

    Raises:
        UserError: A rank cannot find the lock, or cannot write. The error is raised on all ranks.
    """
    access = world.first(lambda: mirror.access)

    def join() -> None:
        rank = f"rank {world.rank} on {socket.gethostname()}"
        try:
            mirror.join(access)
        except LeaseLost as error:
            raise UserError(
                f"--out {mirror.url} is not the same bucket for all ranks: {rank} cannot find the lock of rank 0",
                hint="use the same endpoint and credentials on every node",
                flags=("--out",),
            ) from error
        except OSError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{rank} cannot use --out {mirror.url}: {error.strerror}", hint="try again") from error

    world.each(join if not world.is_first else lambda: None)


@contextmanager
def upload_periodically(upload: Callable[[], object]) -> Iterator[None]:
    """Call `upload` every `PERIOD_S` within the block, and at the end of the block."""
    is_over = threading.Event()

    def run_uploads() -> None:
        while not is_over.wait(PERIOD_S):
            with suppress(OSError, UserError):  # the next upload includes the same lines
                upload()

    thread = threading.Thread(target=run_uploads, name="uploads of growing files", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        is_over.set()
        with suppress(OSError, UserError):  # the error in the block is more important
            upload()
        raise
    finally:
        is_over.set()
        thread.join()
    upload()


def retry_until_response(work: Callable[[], Outcome]) -> Outcome:
    """Return the result of `work`. While the bucket does not respond, retry for at most `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return work()
        except NoResponse:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_PAUSE_S)
