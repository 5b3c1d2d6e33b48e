"""Rules for requests to web servers: none to this machine and its network, unless the user allows it.

A table of URLs may come from elsewhere, and so may the answer of a server. Neither may make this machine ask services
that only it can reach, such as those of other users, routers, or the credentials of a cloud's machines. An address that
the user types is not checked.
"""

import ipaddress
import os
import socket
import urllib.error
import urllib.request
from functools import lru_cache
from urllib.parse import urljoin, urlsplit

ALLOWED_HOSTS = "CLIPMILL_ALLOWED_HOSTS"
_MAX_REDIRECTS = 10
_TIMEOUT_S = 10.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NO_HEAD = frozenset({400, 403, 405, 501})


def host_problem(url: str) -> str | None:
    """Return why the host of a URL may not be asked; None if it may.

    The variable `CLIPMILL_ALLOWED_HOSTS` holds the names of further hosts, separated by commas, or `*` for all.
    """
    host = (urlsplit(url).hostname or "").lower()
    allowed = {name.strip().lower() for name in os.environ.get(ALLOWED_HOSTS, "").split(",")}
    if not host or allowed & {host, "*"}:
        return None
    private = _private_address(host)
    if private is None:
        return None
    return f"{host} is in the network of this machine ({private}); {ALLOWED_HOSTS}={host} allows it"


def redirect_problem(url: str) -> str | None:
    """Return why the redirects of a URL may not be followed; None if they may, or if the server does not answer."""
    for _ in range(_MAX_REDIRECTS):
        target = _redirect(url)
        if target is None:
            return None
        if urlsplit(target).hostname != urlsplit(url).hostname and (problem := host_problem(target)) is not None:
            return f"the server redirects to another host: {problem}"
        url = target
    return "the server redirects too often"


@lru_cache(maxsize=4096)
def _private_address(host: str) -> str | None:
    """Return an address of a host that is not one of the public internet; None if all are, or if it has none."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return None  # reading says that it does not exist
    for text in sorted(found):
        address = ipaddress.ip_address(text)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        if not (mapped or address).is_global:
            return text
    return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _redirect(url: str) -> str | None:
    """Return where a server redirects a request for a URL; None if it does not.

    A server that does not answer HEAD, or only for other signatures, is asked for one byte.
    """
    for method, headers in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError as answer:
            location = answer.headers.get("Location")
            answer.close()
            if answer.code in _REDIRECTS and location:
                return urljoin(url, location)
            if answer.code in _NO_HEAD:
                continue
        except (OSError, ValueError):
            pass
        return None
    return None
