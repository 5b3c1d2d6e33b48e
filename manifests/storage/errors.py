"""Errors of object storage: what obstore raises becomes an OSError or a UserError that says what to do."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from clipmill.manifests.errors import Inaccessible, UserError, first_line
from clipmill.manifests.quoting import on_one_line
from clipmill.manifests.storage.clouds import cloud_of
from clipmill.manifests.storage.waiting import watch_request

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3} [\w '-]+)")
_ODD_NAME = re.compile(r'path: "(.*)"')
_OTHER_REGION = re.compile(
    "incorrectly configured region|"
    "<Code>(?:PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException)</Code>"
)
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_CLOCK_CODES = ("RequestTimeTooSkewed", "RequestExpired")
_CREDENTIAL_CODES = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
    *("AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo", "NoAuthenticationInformation"),
)
_METADATA_PATHS = ("/latest/api/token", "/latest/meta-data", "/computeMetadata/", "/metadata/identity/")
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
_BAD_NAME_CODES = ("InvalidBucketName", "InvalidResourceName", "OutOfRangeInput")
_CUT = "the answer ended early, again and again"
_NO_ANSWER = "the server does not answer"
_PASSING = re.compile(r"5\d\d|429|408", re.ASCII)

_was_used = False
_is_forked = False


class Conflict(FileExistsError):
    """A conditional write found that another writer was faster: the object exists, or is not the expected one."""


class Unanswered(OSError):
    """The server gives no usable answer; nothing is known about the object."""


class NoAnswer(Unanswered):
    """A request failed in passing (no answer, 5xx, 429 or 408), and repeating it for a while has not helped.

    If it was to change an object, it may have done so.
    """


class CutAnswer(NoAnswer):
    """The body of an answer ended early. obstore resumes the content of objects, and leaves other answers to us."""


class AccessRefused(UserError, PermissionError):
    """The server refuses the credentials or the request."""


class AccessDenied(AccessRefused):
    """The credentials are valid, and do not allow the request."""


class OddName(OSError):
    """A listing has an object whose name obstore does not take: with `//`, `.` or `..` as a folder, or unprintable."""


@contextmanager
def no_damage() -> Iterator[None]:
    """Context manager around reads of files whose content may be damaged: a server that gives none is Inaccessible."""
    try:
        yield
    except (AccessRefused, Unanswered) as error:
        raise Inaccessible(error) from error


@contextmanager
def storage_errors(address: str, where: str, *, num_bytes: int = 0) -> Iterator[None]:
    """Context manager around calls of obstore.

    Args:
        address: address of the folder, which names the bucket.
        where: address of the object.
        num_bytes: size of what is sent or received, as far as it is known.

    Raises:
        RuntimeError: this process was forked from one that had used obstore, whose threads do not exist here; without
            this check, the call would never return.
    """
    global _was_used
    from obstore.exceptions import BaseError

    if _is_forked:
        raise RuntimeError("object storage was used before this process was forked; start workers with spawn")
    _was_used = True
    try:
        with watch_request(address, num_bytes=num_bytes):
            yield
    except (BaseError, FileNotFoundError, PermissionError, ValueError) as error:
        _raise_for(error, address=address, where=where)


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or _was_used


os.register_at_fork(after_in_child=_note_fork)


def _raise_for(error: Exception, *, address: str, where: str) -> NoReturn:
    from obstore.exceptions import AlreadyExistsError, InvalidPathError, PreconditionError, UnauthenticatedError

    code, reason, cloud = _code(error), _reason(error), cloud_of(address)
    if code in _NO_BUCKET_CODES:
        message = f"the bucket of {address} does not exist"
        raise UserError(message, hint="create the bucket, or correct the address") from None
    if code in _BAD_NAME_CODES:
        raise UserError(f"{where}: the server refuses the name ({code})", hint="correct the address") from None
    if isinstance(error, AlreadyExistsError | PreconditionError):
        raise Conflict(errno.EEXIST, "another writer was faster", where) from None
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such object", where) from None
    if isinstance(error, InvalidPathError):
        found = _ODD_NAME.search(str(error))
        raise OddName(errno.EINVAL, on_one_line(found[1] if found else first_line(error)), where) from None
    if _OTHER_REGION.search(str(error)):
        region = _REGION.search(str(error))
        raise UserError(
            f"the bucket of {address} is in another region than the requests are sent to",
            hint=f"set AWS_REGION={region[1] if region else 'REGION, that of the bucket'}",
        ) from None
    if code in _CLOCK_CODES:
        message = f"{where}: the clock of this machine differs too much from the server's ({code})"
        raise AccessRefused(message, hint="set the clock, for example with NTP") from None
    if any(path in str(error) for path in _METADATA_PATHS):  # asked for without credentials
        raise AccessRefused(
            f"{where}: there are no credentials", hint=f"set {cloud.credentials}, or use a machine with a role"
        ) from None
    if code in _CREDENTIAL_CODES or isinstance(error, UnauthenticatedError) or reason.startswith("401"):
        hint = f"check {cloud.credentials}" + ("" if cloud.names_clock else ", and the clock of this machine")
        raise AccessRefused(f"{where}: the credentials are refused ({code or reason})", hint=hint) from None
    if reason.startswith("403"):
        raise AccessDenied(
            f"{where}: access denied ({code or reason})",
            hint="grant this account access to the bucket, or check its credentials",
        ) from None
    if code == "NotImplemented" or reason.startswith("501"):
        raise UserError(
            f"{where}: the server does not support this request ({code or reason})",
            hint="write to a server with conditional writes (If-None-Match and If-Match)",
        ) from None
    is_passing = reason == _NO_ANSWER or _PASSING.match(reason)
    kind = CutAnswer if reason == _CUT else NoAnswer if is_passing else Unanswered
    raise kind(errno.EIO, reason, where) from error


def _code(error: Exception) -> str:
    """Return the error code that the server names, such as "SlowDown"; empty if it names none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _reason(error: Exception) -> str:
    """Return what a user can use of obstore's message: the status of the answer, or that there was none."""
    text = str(error)
    if found := _STATUS.search(text):
        code = _code(error)
        return f"{found[1]} ({code})" if code else found[1]
    if "error sending request" in text:
        return _NO_ANSWER
    if "body error" in text:
        return _CUT
    return first_line(error)
