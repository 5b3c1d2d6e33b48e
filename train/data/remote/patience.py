"""Asking again: what fails on a network often works a moment later."""

import io
import time
from collections.abc import Callable
from typing import TypeVar

from manifests.errors import DISK_ERRORS

# Seconds before the second, third and fourth attempt.
_WAITS_S = (0.2, 1.0, 5.0)
_Result = TypeVar("_Result")


def patiently(read: Callable[[], _Result], *, what: str) -> _Result:
    """What `read` gives, by the fourth attempt at the latest.

    Raises:
        OSError: it failed every time, or in a way that does not pass.
    """
    for wait_s in (*_WAITS_S, None):
        try:
            return read()
        except (FileNotFoundError, PermissionError, io.UnsupportedOperation):
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            if wait_s is None:
                attempts = len(_WAITS_S) + 1
                raise OSError(f"{what} cannot be read, {attempts} attempts failed; the last: {error}") from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")
