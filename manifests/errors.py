"""The errors that a user sees, and what each does to the exit status.

    ClipmillError
    ├── UserError      the request cannot be carried out as given      exit 2, `error:` and `hint:` lines
    │   └── UserErrors several mistakes in it                          exit 2, two lines for each
    ├── FailedWork     the work was done except for the failed parts   exit 1, a summary and where the list is
    └── Stopped        told to stop (SIGTERM), and what was done saved exit 143, how to go on

An error of the operating system is told with its path, wherever it shows: a file that this user may not touch is for
the user to mend, a disk that is full or fails is failed work, and so is memory that does not suffice. Anything else
that reaches the top is a bug and keeps its traceback.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

EXIT_FAILED_WORK = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143

_PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM})
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


class UserErrors(UserError):
    """Several mistakes of one request. Messages and hints have a line for each; `errors` has them one by one."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        self.errors = tuple(errors)
        hints = [error.hint for error in self.errors if error.hint]
        super().__init__("\n".join(map(str, self.errors)), hint="\n".join(hints) or None)


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
    _open_closed_streams()
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        for one in error.errors if isinstance(error, UserErrors) else (error,):
            print(f"error: {one}", file=sys.stderr)
            if one.hint:
                print(f"hint: {one.hint}", file=sys.stderr)
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
        _exit_for(error)
    sys.exit(0)


def _open_closed_streams() -> None:
    """Opens the null device in place of standard streams that were closed at the start (`>&-`).

    Python has None for such a stream. The lowest free descriptor is its own: without this the first file that a
    command opens would get it, and with it whatever a library or another process prints there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace"))


def _exit_for(error: OSError) -> NoReturn:
    """Says which path an error of the operating system is about and what to do, and leaves the process."""
    # Of a rename, the file that was to be replaced: the other one had a temporary name.
    path = error.filename2 or error.filename
    where = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes) else ""
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    if error.errno in _PERMISSION_ERRORS:
        print(f"error: {where}{reason}", file=sys.stderr)
        print("hint: give this user access to it, or name another place", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if error.errno in DISK_ERRORS:
        where = os.fsdecode(path) if isinstance(path, str | bytes) else "a file"
        print(f"failed: {where} cannot be written: {reason}; what was finished is kept", file=sys.stderr)
    else:
        advice = "look at the disk or mount that it is on, and run the same command again"
        print(f"failed: {where}{reason}; what was finished is kept; {advice}", file=sys.stderr)
    sys.exit(EXIT_FAILED_WORK)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for a message of one line; the error's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
