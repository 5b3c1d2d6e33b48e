"""obstore's stores: which addresses can be served, with which settings.

Credentials and endpoint come from the variables that the tools of each provider use; `objects.py` names them.
"""

import os
import re
from datetime import timedelta
from typing import Any

from manifests.errors import UserError, first_line

_RETRY: dict[str, Any] = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=90),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}
_TIMEOUTS: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),  # without a single byte
    "timeout": timedelta(minutes=15),  # for a whole object
}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# Scheme -> what the address must look like, and the variable that allows http.
_SCHEMES = {
    "s3": ("s3://BUCKET/FOLDER", "AWS_ALLOW_HTTP"),
    "gs": ("gs://BUCKET/FOLDER", "GOOGLE_ALLOW_HTTP"),
    "az": ("az://CONTAINER/FOLDER", "AZURE_ALLOW_HTTP"),
    "abfs": ("abfs://CONTAINER/FOLDER", "AZURE_ALLOW_HTTP"),
    "http": ("http://HOST/FOLDER", ""),
    "https": ("https://HOST/FOLDER", ""),
}


def scheme_of(address: str) -> str:
    """Return the scheme of an address.

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
    if found is None or scheme not in _SCHEMES:
        raise UserError(
            f"addresses of the form {scheme or address}:// are not supported: {address}",
            hint="give one of " + ", ".join(form for form, _ in _SCHEMES.values()) + ", or a local path",
        )
    if not found[2].partition("/")[0] or "//" in found[2]:
        raise UserError(f"the address {address} is incomplete", hint=f"its form is {_SCHEMES[scheme][0]}")
    if re.search(r"[?#]", found[2]):
        raise UserError(
            f"the address {scheme}://{re.split('[?#]', found[2])[0]}?... has a query string", hint="give it without one"
        )
    return scheme


def open_store(address: str, *, scheme: str) -> Any:
    """Return obstore's store for an address."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    variable = _SCHEMES[scheme][1]
    allows_http = scheme == "http" or os.environ.get(variable, "").lower() in ("1", "true", "yes")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") if scheme == "s3" else ""
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise UserError(
            f"AWS_ENDPOINT_URL={endpoint} is not a URL", hint="begin it with https://, or http:// for a local server"
        )
    if endpoint.startswith("http://") and not allows_http:
        raise UserError(
            f"AWS_ENDPOINT_URL={endpoint} is not encrypted", hint="set AWS_ALLOW_HTTP=true to send requests in clear"
        )
    try:
        opened: Any = from_url  # its types know the options of each provider, not those common to all
        return opened(address, retry_config=_RETRY, client_options={**_TIMEOUTS, "allow_http": allows_http})
    except (BaseError, ValueError) as error:
        raise UserError(
            f"{address} cannot be opened: {first_line(error)}",
            hint="set the variables of the account and correct the address; docs/cluster.md names them",
        ) from None
