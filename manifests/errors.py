"""User-facing errors and their exit codes.

    ClipmillError
    ├── UserError      the request is invalid                         exit 2, `error:` and `hint:` lines
    │   ├── UserErrors several mistakes in one request                exit 2, two lines for each
    │   └── StorageRefused object storage refuses access              exit 3, `error:` and `hint:` lines
    ├── Inaccessible   a bucket refuses a file, or does not respond   as the OSError that it wraps
    ├── FailedWork     some of the work failed                        exit 1, a summary and the path of the list
    └── Stopped        stopped by SIGTERM after saving the work       exit 143, how to continue

An OSError is always reported with its path. Missing permissions are a user error, and so is a package of an extra that
is not installed (`extras.py`). A full or failing disk and a lack of memory are failed work. Any other exception at top
level is a bug and keeps its traceback.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

EXIT_FAILED_WORK = 1
EXIT_USER_ERROR = 2
EXIT_STORAGE_REFUSED = 3  # status at which a scheduler may renew the credentials and start the command again
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143

_MAX_CHARS, _NUM_FIRST_CHARS = 200, 60  # maximum length of a line from a library, and the length kept at its start
_PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM})
# Errors of a full or failing disk. They are neither invalid requests nor bugs.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
FOLDER_IN_PLACE = "this path is a folder, not a file; remove it or move it away"


class ClipmillError(Exception):
    """Base class of the errors above; `exit_code` is the exit code of a command that ends with the error."""

    exit_code = EXIT_FAILED_WORK


class UserError(ClipmillError):
    """A mistake in flags, files or the environment that the user can fix.

    Args:
        message: Description of the mistake, with the offending value.
        hint: Way to fix it, printed on a separate line.
        flags: Flags that the mistake concerns, the wrong flag first. Code that needs the flags reads this attribute,
            never the message.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, message: str, *, hint: str | None = None, flags: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.flags = tuple(flags)
        self._set_hint(hint)

    @property
    def errors(self) -> "tuple[UserError, ...]":
        """The mistakes as separate errors."""
        return (self,)

    def add_hint(self, *hints: str) -> None:
        """Append to the hint in place, so that the error keeps its cause and traceback."""
        self._set_hint("; ".join([*filter(None, [self.hint]), *hints]) or None)

    def rename_flags(self, rename: Callable[[str], str]) -> None:
        """Replace the names of the flags in message and hint, in place."""
        names = {flag: rename(flag) for flag in self.flags}
        # Longer names come first: --loss is a prefix of --loss.temperature.
        longest_first = "|".join(re.escape(flag) for flag in sorted(names, key=len, reverse=True))
        flags = re.compile(rf"(?:{longest_first})(?![\w-]|\.\w)" if names else r"(?!)")
        self.flags = tuple(names.values())
        self.args = (flags.sub(lambda flag: names[flag[0]], str(self)),)
        self._set_hint(self.hint and flags.sub(lambda flag: names[flag[0]], self.hint))

    def _set_hint(self, hint: str | None) -> None:
        self.hint = hint
        self.__notes__ = [f"hint: {hint}"] if hint else []  # shown in tracebacks of a user's own program


class UserErrors(UserError):
    """Several mistakes in one request. Message and hint have one line per mistake; `errors` has separate errors."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        self._errors = tuple(errors)
        hints = [error.hint for error in self._errors if error.hint]
        flags = dict.fromkeys(flag for error in self._errors for flag in error.flags)
        super().__init__("\n".join(map(str, self._errors)), hint="\n".join(hints) or None, flags=flags)

    @property
    def errors(self) -> tuple[UserError, ...]:
        """The mistakes as separate errors."""
        return self._errors

    def rename_flags(self, rename: Callable[[str], str]) -> None:
        """Replace the names of the flags in each mistake, in place."""
        for error in self._errors:
            error.rename_flags(rename)
        UserErrors.__init__(self, self._errors)


class StorageRefused(UserError):
    """Object storage refuses access to an object or a bucket, or the bucket does not exist.

    Attributes:
        concerns_all: True if storage refuses access to the complete bucket, not only to one object.
    """

    exit_code = EXIT_STORAGE_REFUSED
    concerns_all = True


class StorageReason(str):
    """Reason why a machine must not work, as text: object storage refuses it access."""


class Inaccessible(ClipmillError):
    """A file in a bucket cannot be read now. This says nothing about its content.

    It is not an OSError, so that code that interprets an OSError as a damaged or missing file does not catch it.

    Attributes:
        cause: Error from the storage.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        where = f": {self.cause.filename}" if self.cause.filename else ""
        return f"{self.cause.strerror or self.cause}{where}"


class FailedWork(ClipmillError):
    """Some of the work failed. The message contains the amount, and the path of the list of failures."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILED_WORK) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(ClipmillError):
    """The program was stopped, and has saved its work. The message says how to continue."""

    exit_code = EXIT_STOPPED


def run_command(command: Callable[[], object], *, program: str = "", has_daemons: bool = False) -> NoReturn:
    """Run `command` and exit with the code for its outcome.

    Args:
        program: Name of the program, which is also the name of the extra with its packages.
        has_daemons: If interrupted, exit without interpreter shutdown, because threads in the middle of an operation
            could block the shutdown forever.
    """
    _open_closed_streams()
    try:
        _call(command, program=program)
        sys.stdout.flush()
    except UserError as error:
        for mistake in error.errors:
            print(f"error: {mistake}", file=sys.stderr)
            if mistake.hint:
                print(f"hint: {mistake.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except FailedWork as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Stopped as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)
    except KeyboardInterrupt as interrupt:
        # Python's own message is empty. A command may have added a note about how to continue.
        note = f"; {interrupt}" if interrupt.args else ""
        print(f"interrupted; finished work is kept{note}", file=sys.stderr, flush=True)
        if has_daemons:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output (`| head`) has exited. Flushing again would make Python report the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError as error:
        print(f"failed: out of memory: {error}; finished work is kept", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    except OSError as error:
        _exit_for(error)
    sys.exit(0)


def _call(command: Callable[[], object], *, program: str) -> None:
    """Call `command`; raise the cause of an Inaccessible, and a UserError if a package of an extra is missing."""
    try:
        command()
    except Inaccessible as error:
        raise error.cause from error
    except ModuleNotFoundError as error:
        from clipmill.manifests.extras import extra_with

        module = error.name or ""
        if (extra := extra_with(module, program=program)) is None:
            raise
        raise UserError(
            f"the Python package {module.partition('.')[0]}, which this command needs, is not installed",
            hint=f"pip install 'clipmill[{extra}]'",
        ) from error


def folder_in_place(path: Path) -> IsADirectoryError:
    """Return the error for a folder in the place of a required file. Commands neither read nor replace the folder."""
    return IsADirectoryError(errno.EISDIR, FOLDER_IN_PLACE, os.fspath(path))


def _open_closed_streams() -> None:
    """Redirect standard streams that were closed at startup (`>&-`) to the null device.

    Python sets such a stream to None. Its descriptor is then free, so the first file that a command opens would get
    this descriptor, and receive whatever a library or another process prints to the stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace"))


def _exit_for(error: OSError) -> NoReturn:
    """Report the path and the remedy of an OSError, and exit."""
    # For a rename, report the target, because the source has a temporary name.
    path = error.filename2 or error.filename
    where = f"{os.fsdecode(path)}: " if isinstance(path, str | bytes) else ""
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    if error.errno == errno.EISDIR:
        print(f"failed: {where}{FOLDER_IN_PLACE}, and run the same command again", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    if error.errno in _PERMISSION_ERRORS:
        print(f"error: {where}{reason}", file=sys.stderr)
        print("hint: grant this user access to it, or use a different path", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if error.errno in DISK_ERRORS:
        where = os.fsdecode(path) if isinstance(path, str | bytes) else "a file"
        if "://" in where:
            where = f"the local copy of {where} in $TMPDIR"
        print(f"failed: {where} cannot be written: {reason}; finished work is kept", file=sys.stderr)
    else:
        suspects = "disk or mount"
        if "://" in where:
            from clipmill.manifests.storage.clouds import CLOUDS

            endpoints = CLOUDS[scheme].endpoints if (scheme := where.partition("://")[0].lower()) in CLOUDS else ()
            suspects = "URL and the network"
            if endpoints:
                suspects = f"URL, the network and the endpoint ({endpoints[0]})"
        advice = f"check the {suspects}, and run the same command again"
        print(f"failed: {where}{reason}; finished work is kept; {advice}", file=sys.stderr)
    sys.exit(EXIT_FAILED_WORK)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    The middle of a long line is removed, because libraries put the failed action first and the cause last.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if len(line) <= _MAX_CHARS:
        return line
    return f"{line[:_NUM_FIRST_CHARS]} ... {line[_NUM_FIRST_CHARS + 5 - _MAX_CHARS :]}"


def program_version() -> str:
    """Return the version of clipmill; "unknown" for a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("clipmill")
    except PackageNotFoundError:
        return "unknown"
