"""obstore's stores: which addresses can be served, with which settings.

Credentials and endpoint come from the variables that the tools of each provider use (`clouds.py`).
"""

import os
import re
from datetime import timedelta
from typing import Any

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.storage.clouds import CLOUDS

RETRY_S = 90.0  # how long a request is repeated that fails in passing; the last attempt begins within this time
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
    "timeout": timedelta(minutes=15),  # for a whole object
}
# Requests that change objects are repeated by us (`changes.py`), because the right to do so may end. obstore repeats
# them only for so long that a failed part does not cost the upload of a tar.
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
        is_written: leave the forms of web servers out of hints.

    Raises:
        UserError: it is not supported, or the address names no bucket or host.
    """
    found = _ADDRESS.fullmatch(address)
    scheme = found[1].lower() if found else ""
    if found is not None and "@" in found[2].partition("/")[0]:
        raise UserError(
            f"the address {scheme}://...@{found[2].partition('@')[2]} contains a user name or password",
            hint="give the address without them; credentials are taken from the variables of the account",
        )
    if scheme in ("s3a", "s3n"):
        raise UserError(f"addresses of the form {scheme}:// are not supported: {address}", hint="write it as s3://...")
    if found is None or scheme not in CLOUDS:
        forms = [cloud.form for cloud in CLOUDS.values() if cloud.credentials or not is_written]
        raise UserError(
            f"addresses of the form {scheme or address}:// are not supported: {address}",
            hint="give one of " + ", ".join(dict.fromkeys(forms)) + ", or a local path",
        )
    if not found[2].partition("/")[0] or "//" in found[2]:
        raise UserError(f"the address {address} is incomplete", hint=f"its form is {CLOUDS[scheme].form}")
    if re.search(r"[?#]", found[2]):
        raise UserError(
            f"the address {scheme}://{re.split('[?#]', found[2])[0]}?... has a query string", hint="give it without one"
        )
    return scheme


def open_store(address: str, *, scheme: str, is_written: bool = False) -> Any:
    """Return obstore's store for an address: for requests that read, or for those that change objects."""
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
        opened: Any = from_url  # its types know the options of each provider, not those common to all
        retry, timeouts = (_WRITE_RETRY, _WRITE_TIMEOUTS) if is_written else (_RETRY, _TIMEOUTS)
        return opened(address, retry_config=retry, client_options={**timeouts, "allow_http": allows_http})
    except (BaseError, ValueError) as error:
        raise UserError(
            f"{address} cannot be opened: {first_line(error)}",
            hint=f"set {cloud.credentials}, and correct the address" if cloud.credentials else "correct the address",
        ) from None
