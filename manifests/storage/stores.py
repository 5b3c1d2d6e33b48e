"""Open obstore's stores for the supported URLs, and convert obstore's errors to OSErrors and user errors.

Credentials and endpoints come from the environment variables that each provider's own tools use (`clouds.py`). obstore
renews the credentials of web identities, containers and instances. boto3 renews the credentials of a profile
(`profiles.py`).
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

RETRY_S = 90.0  # time during which a request with transient failures is retried; the last attempt may end later
# The wait before a retry is random, between `init_backoff` and `base` times the previous wait. With a base of 2 or
# less, the waits hardly grow. The limit is a time, not a number of attempts, because attempts take different times.
_RETRY: dict[str, Any] = {
    "max_retries": 10_000,
    "retry_timeout": timedelta(seconds=RETRY_S),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 3},
}
_TIMEOUTS: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),  # maximum time without receiving a byte
    "timeout": timedelta(minutes=15),  # maximum time for a complete object
}
# A request that changes objects is retried by `objects.py`, because the right to change them may end. obstore retries
# it only briefly, so that the failure of one part does not abort the upload of a tar.
_WRITE_RETRY: dict[str, Any] = {
    "max_retries": 10_000,
    "retry_timeout": timedelta(seconds=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 3},
}
_WRITE_TIMEOUTS: dict[str, Any] = {**_TIMEOUTS, "timeout": timedelta(seconds=30)}  # for an object or an uploaded part
WRITE_LIMIT_S = 34.0  # maximum time for writing an object in one part: retries 3, last wait 1, last attempt 30
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def scheme_of(url: str, *, is_written: bool = False) -> str:
    """Validate a URL, and return its scheme.

    Args:
        is_written: True if objects will be written, so that hints do not suggest web servers, which are read-only.

    Raises:
        UserError: The scheme is not supported, the URL has no bucket or host, or it contains a user name, a password or
            a query string.
    """
    match = _URL.fullmatch(url)
    scheme = match[1].lower() if match else ""
    if match is not None and "@" in match[2].partition("/")[0]:
        raise UserError(
            f"the URL {scheme}://...@{match[2].partition('@')[2]} contains a user name or password",
            hint="remove it from the URL; credentials are read from the environment",
        )
    if scheme in ("s3a", "s3n"):
        raise UserError(f"{scheme}:// URLs are not supported: {url}", hint="use s3://...")
    if match is None or scheme not in CLOUDS:
        forms = [cloud.form for cloud in CLOUDS.values() if cloud.credentials or not is_written]
        raise UserError(
            f"{scheme or url}:// URLs are not supported: {url}",
            hint="use one of " + ", ".join(dict.fromkeys(forms)) + ", or a local path",
        )
    if not match[2].partition("/")[0] or "//" in match[2]:
        raise UserError(f"the URL {url} is incomplete", hint=f"use the form {CLOUDS[scheme].form}")
    if re.search(r"[?#]", match[2]):
        raise UserError(
            f"the URL {scheme}://{re.split('[?#]', match[2])[0]}?... has a query string", hint="remove the query string"
        )
    return scheme


def open_store(url: str, *, scheme: str, is_written: bool = False) -> Any:
    """Open an obstore store for a URL.

    Args:
        is_written: True for a store whose requests change objects. Such requests have different time limits.

    Raises:
        UserError: The URL or an environment variable is invalid.
    """
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
                f"{variable}={endpoint} is not encrypted",
                hint=f"set {cloud.allow_http}=true to allow unencrypted requests",
            )
    try:
        open_url: Any = from_url  # its type stubs lack the options that are common to all providers
        retry, timeouts = (_WRITE_RETRY, _WRITE_TIMEOUTS) if is_written else (_RETRY, _TIMEOUTS)
        options: dict[str, Any] = {"retry_config": retry, "client_options": {**timeouts, "allow_http": allows_http}}
        profile = os.environ.get("AWS_PROFILE")
        if scheme == "s3" and profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
            from clipmill.manifests.storage.profiles import provider_of_profile

            options["credential_provider"] = provider_of_profile(profile)
        return open_url(url, **options)
    except (BaseError, ValueError) as error:
        raise UserError(
            f"{url} cannot be opened: {first_line(error)}",
            hint=f"set {cloud.credentials}, and correct the URL" if cloud.credentials else "correct the URL",
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
_TRUNCATED = "the response was truncated in all attempts"
_NO_RESPONSE = "the server does not respond"
_TRANSIENT = re.compile(r"5\d\d|429|408", re.ASCII)

_was_used = False
_is_forked = False


class Conflict(FileExistsError):
    """A conditional write failed, because another process wrote the object in the meantime."""


class UnusableResponse(OSError):
    """The server does not give a usable response, so nothing is known about the object."""


class NoResponse(UnusableResponse):
    """A request had transient failures (no response, 5xx, 429 or 408) until the time limit for retries was reached.

    A request that changes an object may have succeeded nevertheless.
    """


class TruncatedResponse(NoResponse):
    """The body of a response is truncated. obstore resumes the content of objects, but not other responses."""


class AccessRefused(StorageRefused, PermissionError):
    """The server rejects the credentials or the request."""


class AccessDenied(AccessRefused):
    """The credentials are valid, but do not allow the request."""

    denies_bucket = False


class NoCredentials(AccessRefused):
    """No credentials are set, and the metadata server of the machine currently provides none."""


class OddName(OSError):
    """A listing contains a name that obstore rejects, with `//`, a folder `.` or `..`, or unprintable characters."""


@contextmanager
def raise_inaccessible() -> Iterator[None]:
    """Context manager for code that interprets an OSError as damage.

    It raises Inaccessible if the server denies access or does not give a usable response.
    """
    try:
        yield
    except (AccessRefused, UnusableResponse) as error:
        raise Inaccessible(error) from error


@contextmanager
def storage_errors(url: str, object_url: str, *, num_bytes: int = 0) -> Iterator[None]:
    """Context manager that converts the errors of calls to obstore.

    Args:
        url: URL of the folder that contains the object.
        object_url: URL of the object.
        num_bytes: Number of bytes that are sent or received, if known.

    Raises:
        RuntimeError: This process was forked after its parent had used obstore. The threads of obstore do not exist in
            this process, so the call would never return.
    """
    global _was_used
    from obstore.exceptions import BaseError

    if _is_forked:
        raise RuntimeError("object storage was used before this process was forked; start workers with spawn")
    _was_used = True
    try:
        with watch_request(url, num_bytes=num_bytes):
            yield
    except (BaseError, FileNotFoundError, PermissionError, ValueError) as error:
        _raise_storage_error(error, url=url, object_url=object_url)


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or _was_used


os.register_at_fork(after_in_child=_note_fork)


def _raise_storage_error(error: Exception, *, url: str, object_url: str) -> NoReturn:
    """Convert an error from obstore to an error with a clear message and a hint, and raise it."""
    from obstore.exceptions import AlreadyExistsError, InvalidPathError, PreconditionError, UnauthenticatedError

    code, reason, cloud = _code(error), _reason(error), cloud_of(url)
    if code in _NO_BUCKET_CODES:
        message = f"the bucket of {url} does not exist"
        raise StorageRefused(message, hint="create the bucket, or correct the URL") from None
    if code in _BAD_NAME_CODES:
        raise UserError(f"{object_url}: the server rejects the name ({code})", hint="correct the URL") from None
    if isinstance(error, AlreadyExistsError | PreconditionError):
        raise Conflict(errno.EEXIST, "another process has written it in the meantime", object_url) from None
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such object", object_url) from None
    if isinstance(error, InvalidPathError):
        name = _ODD_NAME.search(str(error))
        raise OddName(errno.EINVAL, on_one_line(name[1] if name else first_line(error)), object_url) from None
    if _OTHER_REGION.search(str(error)):
        region = _REGION.search(str(error))
        raise UserError(
            f"the bucket of {url} is in a different region than the requests",
            hint="set AWS_REGION to the region of the bucket" if region is None else f"set AWS_REGION={region[1]}",
        ) from None
    if code in _CLOCK_CODES:
        message = f"{object_url}: the clock of this machine differs too much from the clock of the server ({code})"
        raise AccessRefused(message, hint="set the clock, for example with NTP") from None
    if any(path in str(error) for path in _METADATA_PATHS):  # obstore asks the metadata server last
        raise NoCredentials(
            f"{object_url}: there are no credentials", hint=f"set {cloud.credentials}, or use a machine with a role"
        ) from None
    if (renewal := _RENEWAL.search(str(error))) is not None:
        message = f"{object_url}: the credentials cannot be renewed: {on_one_line(renewal[1])}"
        raise AccessRefused(message, hint="check the profile in AWS_PROFILE") from None
    if code in _CREDENTIAL_CODES or isinstance(error, UnauthenticatedError) or reason.startswith("401"):
        hint = f"check {cloud.credentials}" + ("" if cloud.reports_clock else ", and the clock of this machine")
        refusal = AccessRefused(f"{object_url}: the credentials are refused ({code or reason})", hint=hint)
        # For a web server, which has no common credentials for all files, the response concerns only this file.
        raise (refusal if cloud.credentials else AccessDenied(str(refusal), hint=hint)) from None
    if reason.startswith("403"):
        raise AccessDenied(
            f"{object_url}: access denied ({code or reason})",
            hint="grant this account access to the bucket, or check its credentials",
        ) from None
    if code == "NotImplemented" or reason.startswith("501"):
        raise UserError(
            f"{object_url}: the server does not support this request ({code or reason})",
            hint="use a server that supports conditional writes (If-None-Match and If-Match)",
        ) from None
    is_transient = reason == _NO_RESPONSE or _TRANSIENT.match(reason)
    kind = TruncatedResponse if reason == _TRUNCATED else NoResponse if is_transient else UnusableResponse
    raise kind(errno.EIO, reason, object_url) from error


def _code(error: Exception) -> str:
    """Return the error code of the server, such as "SlowDown", or "" if there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def _reason(error: Exception) -> str:
    """Return the relevant part of obstore's message: the HTTP status, or a description of the missing response."""
    text = str(error)
    if status := _STATUS.search(text):
        code = _code(error)
        return f"{status[1]} ({code})" if code else status[1]
    if "error sending request" in text:
        return _NO_RESPONSE
    if "body error" in text:
        return _TRUNCATED
    return first_line(error)
