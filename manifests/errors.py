"""User-facing errors, with their exit codes and what a command prints for them.

    ClipmillError
    ├── UserError          invalid request                           exit 2, `error:` and `hint:` lines
    │   ├── UserErrors     several mistakes in one request           exit 2, `error:` and `hint:` lines for each mistake
    │   └── StorageRefused access denied by object storage           exit 3, `error:` and `hint:` lines
    ├── Inaccessible       file in a bucket that cannot be read now  same as for the OSError that caused it
    ├── FailedWork         part of the work failed                   exit 1, a summary and the path of the failure list
    └── Stopped            the work was saved after SIGTERM          exit 143, how to continue

The message for an OSError contains the path, if the error has one. A missing permission and a missing optional package
are user errors. A full or failing disk and a lack of memory are failed work. Any other exception that reaches the top
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
EXIT_STORAGE_REFUSED = 3  # a scheduler may renew the credentials and run the command again
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 143

# Maximum length of a library's message. If it is longer, the first characters are kept, and the middle is removed.
_MAX_CHARS, _NUM_FIRST_CHARS = 200, 60
_PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM})
# Errors from a disk that is full or read-only, or from a size limit. They are neither invalid requests nor bugs.
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
NOT_A_FILE = "this path is a folder, not a file; remove it or move it away"


class ClipmillError(Exception):
    """Base class of all user-facing errors.

    Attributes:
        exit_code: Exit code of a command that ends with this error.
    """

    exit_code = EXIT_FAILED_WORK


class UserError(ClipmillError):
    """A mistake in flags, files or the environment that the user can fix.

    Args:
        message: Description of the mistake, including the offending value.
        hint: Advice on how to fix the mistake, printed on a separate line.
        flags: Flags that are involved in the mistake; the wrong flag comes first. Code that needs the flags reads this
            attribute and never parses the message.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, message: str, *, hint: str | None = None, flags: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.flags = tuple(flags)
        self._set_hint(hint)

    @property
    def errors(self) -> "tuple[UserError, ...]":
        """One error for each mistake."""
        return (self,)

    def add_hint(self, *hints: str) -> None:
        """Append hints to this error. The error keeps its cause and traceback."""
        self._set_hint("; ".join([*filter(None, [self.hint]), *hints]) or None)

    def rename_flags(self, rename: Callable[[str], str]) -> None:
        """Rename the flags in this error's message, hint and `flags`."""
        new_names = {flag: rename(flag) for flag in self.flags}
        # Longer names come first: --loss is a prefix of --loss.temperature.
        alternatives = "|".join(re.escape(flag) for flag in sorted(new_names, key=len, reverse=True))
        pattern = re.compile(rf"(?:{alternatives})(?![\w-]|\.\w)" if new_names else r"(?!)")
        self.flags = tuple(new_names.values())
        self.args = (pattern.sub(lambda match: new_names[match[0]], str(self)),)
        self._set_hint(self.hint and pattern.sub(lambda match: new_names[match[0]], self.hint))

    def _set_hint(self, hint: str | None) -> None:
        self.hint = hint
        # Python shows notes in the traceback if the error ends a user's own program.
        self.__notes__ = [f"hint: {hint}"] if hint else []


class UserErrors(UserError):
    """Several mistakes in one request. The message and the hint have one line per mistake."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        self._errors = tuple(errors)
        hints = [error.hint for error in self._errors if error.hint]
        flags = dict.fromkeys(flag for error in self._errors for flag in error.flags)
        super().__init__("\n".join(map(str, self._errors)), hint="\n".join(hints) or None, flags=flags)

    @property
    def errors(self) -> tuple[UserError, ...]:
        """One error for each mistake."""
        return self._errors

    def rename_flags(self, rename: Callable[[str], str]) -> None:
        """Rename the flags in each mistake."""
        for error in self._errors:
            error.rename_flags(rename)
        UserErrors.__init__(self, self._errors)


class StorageRefused(UserError):
    """Object storage denies access to an object or a bucket, or the bucket does not exist.

    Attributes:
        denies_bucket: True if access to the entire bucket is denied; False if access to only one object is denied.
    """

    exit_code = EXIT_STORAGE_REFUSED
    denies_bucket = True


class StorageReason(str):
    """Reason why a node cannot run workers: object storage denies access to the node."""


class Inaccessible(ClipmillError):
    """A file in a bucket cannot be read at the moment, so it is unknown whether the file is intact.

    This class is not an OSError, because some callers treat an OSError as evidence of a damaged or missing file.

    Attributes:
        cause: Error from object storage.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        path = f": {self.cause.filename}" if self.cause.filename else ""
        return f"{self.cause.strerror or self.cause}{path}"


class FailedWork(ClipmillError):
    """Part of the work failed. The message states how much failed, and contains the path of the failure list."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILED_WORK) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Stopped(ClipmillError):
    """The program saved its work and ended after SIGTERM. The message says how to continue."""

    exit_code = EXIT_STOPPED


def run_command(command: Callable[[], object], *, program: str = "", has_daemons: bool = False) -> NoReturn:
    """Run a command, print its errors, and exit with the exit code for its outcome.

    Args:
        program: Name of the program. The extra with the same name installs its packages.
        has_daemons: True if the command has daemon threads. An interrupt then skips the interpreter's shutdown, which
            could wait forever for a thread in the middle of an operation.
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
        # The exception has no message, unless the command raised it with advice on how to continue.
        advice = f"; {interrupt}" if interrupt.args else ""
        print(f"interrupted; finished work is kept{advice}", file=sys.stderr, flush=True)
        if has_daemons:
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output (such as `| head`) has exited. Python flushes stdout again at shutdown, which
        # would report the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError as error:
        print(f"failed: out of memory: {error}; finished work is kept", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    except OSError as error:
        _exit_with_os_error(error)
    sys.exit(0)


def _call(command: Callable[[], object], *, program: str) -> None:
    """Call `command`. Replace Inaccessible with its cause, and the error for a missing package with a UserError."""
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


def not_a_file_error(path: Path) -> IsADirectoryError:
    """Return the error for a path that must be a file but is a folder. No command reads or replaces such a folder."""
    return IsADirectoryError(errno.EISDIR, NOT_A_FILE, os.fspath(path))


def _open_closed_streams() -> None:
    """Connect standard streams that the shell has closed (`>&-`) to the null device.

    Python sets a closed stream to None, and its descriptor becomes free. The first file that the command opens would
    get this descriptor, and would receive the output that a library or a child process prints to the stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace"))


def _exit_with_os_error(error: OSError) -> NoReturn:
    """Report an OSError with its path and a remedy, and exit."""
    # If a rename failed, report the target, because the source has a temporary name.
    filename = error.filename2 or error.filename
    path = os.fsdecode(filename) if isinstance(filename, str | bytes) else ""
    prefix = f"{path}: " if path else ""
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    if error.errno == errno.EISDIR:
        print(f"failed: {prefix}{NOT_A_FILE}, and run the same command again", file=sys.stderr)
        sys.exit(EXIT_FAILED_WORK)
    if error.errno in _PERMISSION_ERRORS:
        print(f"error: {prefix}{reason}", file=sys.stderr)
        print("hint: grant this user access to this path, or use a different path", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if error.errno in DISK_ERRORS:
        file = f"the local copy of {path} in $TMPDIR" if "://" in path else path or "a file"
        print(f"failed: {file} cannot be written: {reason}; finished work is kept", file=sys.stderr)
    else:
        causes = "disk or mount"
        if "://" in path:
            from clipmill.manifests.storage.clouds import CLOUDS

            endpoints = CLOUDS[scheme].endpoints if (scheme := path.partition("://")[0].lower()) in CLOUDS else ()
            causes = f"URL, the network and the endpoint ({endpoints[0]})" if endpoints else "URL and the network"
        advice = f"check the {causes}, and run the same command again"
        print(f"failed: {prefix}{reason}; finished work is kept; {advice}", file=sys.stderr)
    sys.exit(EXIT_FAILED_WORK)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty.

    If the line is too long, its middle is removed: libraries put the failed action first and the cause last.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if len(line) <= _MAX_CHARS:
        return line
    return f"{line[:_NUM_FIRST_CHARS]} ... {line[_NUM_FIRST_CHARS + 5 - _MAX_CHARS :]}"


def program_version() -> str:
    """Return the version of clipmill, or "unknown" if clipmill runs from a checkout without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("clipmill")
    except PackageNotFoundError:
        return "unknown"
