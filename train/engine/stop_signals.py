"""SIGTERM and Ctrl-C: how a run is stopped, and what it says then."""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from train.run.checkpoint import latest_checkpoint
from train.run.folder import RunFolder


class StopSignal:
    """SIGTERM, remembered until the loop has finished its step.

    The ranks exchange it before each step (train.engine.failure_log): if one has received it, all save a checkpoint and
    stop.
    """

    def __init__(self) -> None:
        self.is_received = False

    @contextmanager
    def handled(self) -> Iterator["StopSignal"]:
        """Handle SIGTERM within the block: it sets `is_received` instead of ending the process."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # Python allows only the main thread to set a signal handler
            return

        def remember(_: int, __: FrameType | None) -> None:
            self.is_received = True

        before = signal.signal(signal.SIGTERM, remember)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def resume_hint(run: RunFolder) -> Iterator[None]:
    """Add to a KeyboardInterrupt (Ctrl-C) how to resume the run."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        step = "the latest checkpoint" if latest_checkpoint(run.checkpoints) else "its begin: it has no checkpoint yet"
        out = shlex.quote(str(run.path))
        raise KeyboardInterrupt(f"--resume --out {out} goes on from {step}") from interrupt
