"""Messages while a server does not answer a request.

A request is repeated for a while before it fails (`stores.py`): without a message, a command would look as if it had
stopped. Commands give a function that shows a line (`tell_of_waiting`); other processes show nothing.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 8.0
_BYTES_PER_S = 1e6  # a line is shown only for slower connections
_PERIOD_S = 1.0
_LIMIT = "2 minutes"  # in `stores.py`: attempts for 90 s, and 30 s for the last attempt

_tell: Callable[[str], object] | None = None
_pending: dict[int, tuple[float, str]] = {}  # number -> time at which a line about a request is due, and its folder
_numbers = itertools.count()
_has_begun = threading.Event()
_watcher: threading.Thread | None = None


def tell_of_waiting(tell: Callable[[str], object] | None) -> None:
    """Set the function that is called with a line when a request has not been answered for a few seconds."""
    global _tell
    _tell = tell


@contextmanager
def watch_request(where: str, *, num_bytes: int) -> Iterator[None]:
    """Context manager around a request.

    Args:
        where: Address of the folder, as the user gave it; the names of objects such as locks mean nothing to users.
        num_bytes: Number of bytes that are sent or received, which takes time.
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
    """Show a line when a request is late; this is the main function of a thread."""
    is_told = False
    while True:
        _has_begun.wait()
        time.sleep(_PERIOD_S)
        now_s, pending = time.monotonic(), list(_pending.values())
        late = [where for due_s, where in pending if due_s <= now_s]
        if late and not is_told and _tell is not None:
            _tell(f"waiting for {late[0]}, which has not answered for {_PATIENCE_S:g} s; giving up after {_LIMIT}")
        is_told = bool(late)  # once for each outage
        if not pending:
            _has_begun.clear()
            if _pending:  # a request that has begun in the meantime
                _has_begun.set()
