"""Stop requests: Ctrl-C (SIGINT), Slurm or `timeout` (SIGTERM), and a closed terminal (SIGHUP)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from manifests.errors import Stopped

_HOW_TO_RESUME = "the running part was terminated; run the command again with --part for the missing parts"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopping() -> Iterator[None]:
    """Convert the first of these signals into an exception, and ignore further ones during cleanup.

    Raises:
        KeyboardInterrupt: for SIGINT; Stopped for the others.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt(_HOW_TO_RESUME)
        raise Stopped(f"{signal.Signals(number).name}; {_HOW_TO_RESUME}")

    before = {}
    for one in _SIGNALS:
        # Under nohup, SIGHUP stays ignored. SIGINT is handled even if a script that started this in the background
        # ignores it: the parts would inherit that, and could not be interrupted.
        if one == signal.SIGINT or signal.getsignal(one) != signal.SIG_IGN:
            before[one] = signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
