"""obstore's stores for the supported addresses, and its errors as errors of files, of the user, or as Inaccessible.

Credentials and endpoint come from the variables that the tools of each provider use (`clouds.py`). obstore renews the
credentials of web identity, containers and instances; boto3 renews the credentials of a profile (`profiles.py`).
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from clipmill.manifests.errors import Inaccessible, StorageRefused, UserError, first_line
from clipmill.manifests.formatting import on_one_line
from clipmill.manifests.storage.clouds import CLOUDS, cloud_of
from clipmill.manifests.storage.waiting import watch_request

RETRY_S = 90.0  # a request with a transient failure is repeated for so long; the last attempt begins within this time
# obstore waits a random time between the first backoff and `base` times the one before; with a base of 2 or less, the
# waits hardly grow, and a number of attempts says nothing about the time that they take.
_RETRY: dict[str, Any] = {
    "max_retries": 10_000,
    "retry_timeout": timedelta(seconds=RETRY_S),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 3},
}
_TIMEOUTS: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),  # without a single byte
    "timeout": timedelta(minutes=15),  # for a complete object
}
# Requests that change objects are repeated by `objects.py`, because the right to change them may end. obstore repeats
# them only so long that a failed part does not cost the upload of a tar.
_WRITE_RETRY: dict[str, Any] = {
    "max_retries": 10_000,
    "retry_timeout": timedelta(seconds=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 3},
}
_WRITE_TIMEOUTS: dict[str, Any] = {**_TIMEOUTS, "timeout": timedelta(seconds=30)}  # for an object, or a part of it
WRITE_LIMIT_S = 34.0  # a call of obstore that writes an object in one part has ended by then: 3 + 1 + 30
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def scheme_of(address: str, *, is_written: bool = False) -> str:
    """Return the scheme of an address.

    Args:
        is_written: Omit the forms of web servers in hints.

    Raises:
        UserError: The scheme is not supported, or the address names no bucket or host.
    """
    match = _ADDRESS.fullmatch(address)
    scheme = match[1].lower() if match else ""
    if match is not None and "@" in match[2].partition("/")[0]:
        raise UserError(
            f"the address {scheme}://...@{match[2].partition('@')[2]} contains a user name or password",
            hint="remove them from the address; credentials are read from the environment",
        )
    if scheme in ("s3a", "s3n"):
        raise UserError(f"addresses of the form {scheme}:// are not supported: {address}", hint="write it as s3://...")
    if match is None or scheme not in CLOUDS:
        forms = [cloud.form for cloud in CLOUDS.values() if cloud.credentials or not is_written]
        raise UserError(
            f"addresses of the form {scheme or address}:// are not supported: {address}",
            hint="give one of " + ", ".join(dict.fromkeys(forms)) + ", or a local path",
        )
    if not match[2].partition("/")[0] or "//" in match[2]:
        raise UserError(f"the address {address} is incomplete", hint=f"its form is {CLOUDS[scheme].form}")
    if re.search(r"[?#]", match[2]):
        raise UserError(
            f"the address {scheme}://{re.split('[?#]', match[2])[0]}?... has a query string", hint="give it without one"
        )
    return scheme


def open_store(address: str, *, scheme: str, is_written: bool = False) -> Any:
    """Return obstore's store for an address: for requests that read, or for requests that change objects."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    cloud = CLOUDS[scheme]
    allows_http = scheme == "http" or os.environ.get(cloud.allow_http, "").lower() in ("1", "true", "yes")
    for variable in cloud.endpoints:
        endpoint = os.environ.get(variable, "")
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise UserError(
                f"{variable}={endpoint} is not a URL", hint="begin it with https://, or http:// for a local server"
            )
        if endpoint.startswith("http://") and not allows_http:
            raise UserError(
                f"{variable}={endpoint} is not encrypted", hint=f"set {cloud.allow_http}=true to send requests in clear"
            )
    try:
        open_url: Any = from_url  # its types know the options of each provider, not the options common to all
        retry, timeouts = (_WRITE_RETRY, _WRITE_TIMEOUTS) if is_written else (_RETRY, _TIMEOUTS)
        options: dict[str, Any] = {"retry_config": retry, "client_options": {**timeouts, "allow_http": allows_http}}
        profile = os.environ.get("AWS_PROFILE")
        if scheme == "s3" and profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
            from clipmill.manifests.storage.profiles import provider_of_profile

            options["credential_provider"] = provider_of_profile(profile)
        return open_url(address, **options)
    except (BaseError, ValueError) as error:
        raise UserError(
            f"{address} cannot be opened: {first_line(error)}",
            hint=f"set {cloud.credentials}, and correct the address" if cloud.credentials else "correct the address",
        ) from None


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
_RENEWAL = re.compile("External AWS credential provider: (.*)")
_METADATA_PATHS = ("/latest/api/token", "/latest/meta-data", "/computeMetadata/", "/metadata/identity/")
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
_BAD_NAME_CODES = ("InvalidBucketName", "InvalidResourceName", "OutOfRangeInput")
_CUT = "the answer ended early in all attempts"
_NO_ANSWER = "the server does not answer"
_PASSING = re.compile(r"5\d\d|429|408", re.ASCII)

_was_used = False
_is_forked = False


class Conflict(FileExistsError):
    """A conditional write failed because another writer was faster: the object exists, or is not the expected one."""


class Unanswered(OSError):
    """The server gives no usable answer; nothing is known about the object."""


class NoAnswer(Unanswered):
    """A request had a transient failure (no answer, 5xx, 429 or 408), and repeating it for a while has not helped.

    A request that changes an object may have changed it.
    """


class CutAnswer(NoAnswer):
    """The body of an answer ended early. obstore resumes only the content of objects, not other answers."""


class AccessRefused(StorageRefused, PermissionError):
    """The server refuses the credentials or the request."""


class AccessDenied(AccessRefused):
    """The credentials are valid, but do not allow the request."""

    concerns_all = False


class NoCredentials(AccessRefused):
    """No credentials are set, and the machine gives none, at least now."""


class OddName(OSError):
    """A listing has an object whose name obstore rejects: with `//`, with `.` or `..` as a folder, or unprintable."""


@contextmanager
def no_damage() -> Iterator[None]:
    """Context manager around reads that report damage: a server that returns no content raises Inaccessible."""
    try:
        yield
    except (AccessRefused, Unanswered) as error:
        raise Inaccessible(error) from error


@contextmanager
def storage_errors(address: str, where: str, *, num_bytes: int = 0) -> Iterator[None]:
    """Context manager around calls of obstore.

    Args:
        address: Address of the folder, which names the bucket.
        where: Address of the object.
        num_bytes: Number of bytes that are sent or received, as far as it is known.

    Raises:
        RuntimeError: This process was forked from a process that had used obstore, whose threads do not exist here;
            without this check, the call would never return.
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
    """Raise the error that tells a user what to do about an error of obstore."""
    from obstore.exceptions import AlreadyExistsError, InvalidPathError, PreconditionError, UnauthenticatedError

    code, reason, cloud = _code(error), _reason(error), cloud_of(address)
    if code in _NO_BUCKET_CODES:
        message = f"the bucket of {address} does not exist"
        raise StorageRefused(message, hint="create the bucket, or correct the address") from None
    if code in _BAD_NAME_CODES:
        raise UserError(f"{where}: the server rejects the name ({code})", hint="correct the address") from None
    if isinstance(error, AlreadyExistsError | PreconditionError):
        raise Conflict(errno.EEXIST, "another writer was faster", where) from None
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such object", where) from None
    if isinstance(error, InvalidPathError):
        name = _ODD_NAME.search(str(error))
        raise OddName(errno.EINVAL, on_one_line(name[1] if name else first_line(error)), where) from None
    if _OTHER_REGION.search(str(error)):
        region = _REGION.search(str(error))
        raise UserError(
            f"the bucket of {address} is in another region than the requests",
            hint=f"set AWS_REGION={region[1] if region else 'REGION to the region of the bucket'}",
        ) from None
    if code in _CLOCK_CODES:
        message = f"{where}: the clock of this machine differs too much from the server's ({code})"
        raise AccessRefused(message, hint="set the clock, for example with NTP") from None
    if any(path in str(error) for path in _METADATA_PATHS):  # obstore's last resort without credentials
        raise NoCredentials(
            f"{where}: there are no credentials", hint=f"set {cloud.credentials}, or use a machine with a role"
        ) from None
    if (renewal := _RENEWAL.search(str(error))) is not None:
        message = f"{where}: the credentials cannot be renewed: {on_one_line(renewal[1])}"
        raise AccessRefused(message, hint="check the profile that AWS_PROFILE names") from None
    if code in _CREDENTIAL_CODES or isinstance(error, UnauthenticatedError) or reason.startswith("401"):
        hint = f"check {cloud.credentials}" + ("" if cloud.names_clock else ", and the clock of this machine")
        refused = AccessRefused(f"{where}: the credentials are refused ({code or reason})", hint=hint)
        # A web server, which has no credentials of its own, answers for a single file.
        raise (refused if cloud.credentials else AccessDenied(str(refused), hint=hint)) from None
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
    unanswered = CutAnswer if reason == _CUT else NoAnswer if is_passing else Unanswered
    raise unanswered(errno.EIO, reason, where) from error


def _code(error: Exception) -> str:
    """Return the error code that the server names, such as "SlowDown"; empty if it names none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def _reason(error: Exception) -> str:
    """Return the useful part of obstore's message: the status of the answer, or that there was none."""
    text = str(error)
    if status := _STATUS.search(text):
        code = _code(error)
        return f"{status[1]} ({code})" if code else status[1]
    if "error sending request" in text:
        return _NO_ANSWER
    if "body error" in text:
        return _CUT
    return first_line(error)
