"""Show a message while a server does not respond to a request.

A request is retried for a while before it fails (`stores.py`). Without a message, the command would seem to hang.
`set_wait_reporter` sets the function that shows the message. A process that does not call it shows no message.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 8.0  # time without a response after which a message is shown
_BYTES_PER_S = 1e6  # transfer speed below which a message is shown
_PERIOD_S = 1.0
_LIMIT = "2 minutes"  # `stores.py` starts attempts for 90 s, and each attempt takes at most 30 s

_report: Callable[[str], object] | None = None
_pending: dict[int, tuple[float, str]] = {}  # pending requests: time at which a message is due, and URL of the folder
_numbers = itertools.count()
_has_pending = threading.Event()
_watcher: threading.Thread | None = None


def set_wait_reporter(report: Callable[[str], object] | None) -> None:
    """Set the function that is called with a message when a request gets no response for a few seconds."""
    global _report
    _report = report


@contextmanager
def watch_request(url: str, *, num_bytes: int) -> Iterator[None]:
    """Context manager for a request. It shows a message if the server does not respond in time.

    Args:
        url: URL of the folder as the user typed it. (Names of objects, such as locks, would mean nothing to the user.)
        num_bytes: Number of bytes that are sent or received. For a larger transfer, the message appears later.
    """
    global _watcher
    if _report is None:
        yield
        return
    if _watcher is None:
        _watcher = threading.Thread(target=_watch, name="waiting for storage", daemon=True)
        _watcher.start()
    number = next(_numbers)
    _pending[number] = time.monotonic() + _PATIENCE_S + num_bytes / _BYTES_PER_S, url
    _has_pending.set()
    try:
        yield
    finally:
        del _pending[number]


def _watch() -> None:
    """Show a message when a request is late. This is the main function of a thread."""
    has_reported = False
    while True:
        _has_pending.wait()
        time.sleep(_PERIOD_S)
        now_s, pending = time.monotonic(), list(_pending.values())
        late_urls = [url for due_s, url in pending if due_s <= now_s]
        if late_urls and not has_reported and _report is not None:
            _report(
                f"waiting for {late_urls[0]}, which has not responded for {_PATIENCE_S:g} s; giving up after {_LIMIT}"
            )
        has_reported = bool(late_urls)  # there is one message per outage
        if not pending:
            _has_pending.clear()
            if _pending:  # a request was started in the meantime
                _has_pending.set()
