"""Messages while a server does not respond to a request.

A request is retried for a while before it fails (`stores.py`). Without a message, the command would seem to hang.
Commands set a function that shows a line (`report_waiting_with`); other processes show nothing.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 8.0
_BYTES_PER_S = 1e6  # speed of a connection below which a line is shown during a transfer
_PERIOD_S = 1.0
_LIMIT = "2 minutes"  # time limit in `stores.py`: attempts for 90 s, and 30 s for the last attempt

_tell: Callable[[str], object] | None = None
_pending: dict[int, tuple[float, str]] = {}  # requests by number: time at which a line is due, and URL of the folder
_numbers = itertools.count()
_has_begun = threading.Event()
_watcher: threading.Thread | None = None


def report_waiting_with(tell: Callable[[str], object] | None) -> None:
    """Set the function that is called with a line when a request has had no response for a few seconds."""
    global _tell
    _tell = tell


@contextmanager
def watch_request(where: str, *, num_bytes: int) -> Iterator[None]:
    """Context manager around a request.

    Args:
        where: URL of the folder, as the user typed it. (The names of objects such as locks mean nothing to users.)
        num_bytes: Number of bytes that are sent or received, which extends the time until a line is shown.
    """
    global _watcher
    if _tell is None:
        yield
        return
    if _watcher is None:
        _watcher = threading.Thread(target=_watch, name="waiting for storage", daemon=True)
        _watcher.start()
    number = next(_numbers)
    _pending[number] = time.monotonic() + _PATIENCE_S + num_bytes / _BYTES_PER_S, where
    _has_begun.set()
    try:
        yield
    finally:
        del _pending[number]


def _watch() -> None:
    """Show a line when a request is late. This is the main function of a thread."""
    is_told = False
    while True:
        _has_begun.wait()
        time.sleep(_PERIOD_S)
        now_s, pending = time.monotonic(), list(_pending.values())
        late_urls = [where for due_s, where in pending if due_s <= now_s]
        if late_urls and not is_told and _tell is not None:
            _tell(
                f"waiting for {late_urls[0]}, which has not responded for {_PATIENCE_S:g} s; giving up after {_LIMIT}"
            )
        is_told = bool(late_urls)  # once per outage
        if not pending:
            _has_begun.clear()
            if _pending:  # a request has begun in the meantime
                _has_begun.set()
