"""The errors that a user sees, and what each does to the exit status.

    ClipmillError
    ├── UserError      the request cannot be carried out as given      exit 2, `error:` and `hint:` lines
    ├── FailedWork     the work was done except for the failed parts   exit 1, a summary and where the list is
    └── Stopped        told to stop (SIGTERM), and what was done saved exit 143, how to go on

A disk that takes no more (full, over a quota, read-only) and memory that does not suffice are failed work as well,
wherever they show. Anything else that reaches the top is a bug and keeps its traceback.
"""

import errno
import os
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_FAILED_WORK = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143

# Of a disk that takes no more: nobody's mistake in the request, and no bug.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


class ClipmillError(Exception):
    """Base of the errors above; catch it to catch them all."""


class UserError(ClipmillError):
    """A mistake in flags, files or environment that the user can mend.

    Args:
        message: what is wrong, with the offending value.
        hint: what to do now; printed on its own line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class FailedWork(ClipmillError):
    """Some of the work failed; the message says how much, and where the list is."""


class Stopped(ClipmillError):
    """The program was told to stop and has saved its work; the message says how to go on."""


def run_command(command: Callable[[], object], *, has_daemons: bool = False) -> NoReturn:
    """Runs `command` and leaves the process with the exit status that its outcome calls for.

    Args:
        has_daemons: an interrupted process leaves without the interpreter's own end, in which threads that were in the
            middle of something could hold it up for ever.
    """
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except FailedWork as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    except Stopped as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except KeyboardInterrupt as interrupt:
        # Python's own has no words; a command may have added how to go on.
        how = f"; {interrupt}" if interrupt.args else ""
        print(f"interrupted; nothing that was finished is lost{how}", file=sys.stderr, flush=True)
        if has_daemons:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; Python would complain once more while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError as error:
        print(f"failed: out of memory: {error}; what was finished is kept", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = error.filename or "a file"
        print(f"failed: {where} cannot be written: {error.strerror}; what was finished is kept", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    sys.exit(0)
