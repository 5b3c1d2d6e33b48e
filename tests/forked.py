"""What becomes of work in a forked process."""

import os
import sys
import tempfile
from collections.abc import Callable


def run_forked(work: Callable[[], object]) -> tuple[int, str]:
    """The status of a forked process after `work`, negative for a signal, and what it wrote to stderr."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        if not (child := os.fork()):
            status = 70
            try:
                os.dup2(errors.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                work()
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read()


def forget(*packages: str) -> None:
    """In a forked process: let them be imported anew, beside a torch that is there already and takes seconds."""
    for name in list(sys.modules):
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            del sys.modules[name]
