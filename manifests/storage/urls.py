"""Parse URLs of single objects such as `s3://bucket/videos/a.mp4`, mask secrets in them, and check their hosts.

In the URL of an object in a bucket, everything after the name of the bucket is the literal key. In an `http(s)` URL,
the path is percent-encoded. A URL must not contain a user name or password, and an `http(s)` URL must not contain a
query string, because the manifest would store these secrets. Signed URLs also expire. Credentials are read from the
environment (`clipmill.manifests.storage.objects`).

A table of URLs or the response of a server may be malicious, and try to make this machine send requests to services
that only this machine can reach, such as services of other users, routers, or the metadata server of a cloud instance.
Therefore, requests to this machine and its network are rejected unless the user allows them. URLs that the user types
are not checked.
"""

import ipaddress
import os
import re
import socket
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urljoin, urlsplit

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote, reject_mistyped_url

Location = Path | str  # a local path, or a URL

_ROOT_AND_KEY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/]*)/*(.*)", re.DOTALL)
_USER = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"(\bhttps?://[^\s?#\"']*)[?#][^\s\"']*", re.IGNORECASE)


def parse_location(text: str) -> Location:
    """Return a URL unchanged, and any other text as a local path.

    Raises:
        UserError: The text resembles a URL, but a slash or colon is missing.
    """
    if is_remote(text):
        return text
    reject_mistyped_url(text)
    return Path(text)


def folder_of(location: Location) -> Location:
    """Return the folder that contains a file or an object."""
    return location.parent if isinstance(location, Path) else location.rpartition("/")[0]


def is_web(url: str) -> bool:
    """Return True for a URL of a web server, whose files cannot be listed."""
    return url.lower().startswith(("http://", "https://"))


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of an object into the URL of the bucket or host, and the key.

    Raises:
        UserError: The URL contains a user name or password, or it is an `http(s)` URL with a query string.
        ValueError: The text is not a URL.
    """
    match = _ROOT_AND_KEY.fullmatch(url)
    if match is None:
        raise ValueError(f"not a URL: {mask_secrets(url)}")
    root, key = match.groups()
    if "@" in root:
        raise UserError(
            f"{mask_secrets(url)} contains a user name or password, which the manifest would store",
            hint="remove it from the URL; credentials are read from the environment",
        )
    if not is_web(url):
        return root, key
    if "?" in url or "#" in url:
        raise UserError(
            f"{mask_secrets(url)} has a query string; signed URLs expire, and the manifest would store them",
            hint="use the URL in the bucket (s3://BUCKET/KEY), or a URL without a query string",
        )
    return root, unquote(key)


def join_url(folder: str, relative: str) -> str:
    """Return the URL of an object from the URL of a folder and the path of the object relative to the folder."""
    return f"{folder.rstrip('/')}/{quote(relative) if is_web(folder) else relative}"


def mask_secrets(text: str) -> str:
    """Mask the user names, passwords and query strings of all URLs in a text."""
    return _QUERY.sub(r"\1?...", _USER.sub("...@", text))


def location_name(location: Location) -> PurePosixPath:
    """Return the name of a file or an object without the folders that contain it."""
    text = os.fspath(location)
    return PurePosixPath(PurePosixPath(split_url(text)[1] if is_remote(text) else text).name)


ALLOWED_HOSTS = "CLIPMILL_ALLOWED_HOSTS"
_MAX_REDIRECTS = 10
_TIMEOUT_S = 10.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NO_HEAD = frozenset({400, 403, 405, 501})


def host_problem(url: str) -> str | None:
    """Return the reason why requests to the host of a URL are not allowed, or None if they are allowed.

    The environment variable `CLIPMILL_ALLOWED_HOSTS` contains additional allowed hosts, separated by commas. `*` allows
    all hosts.
    """
    host = (urlsplit(url).hostname or "").lower()
    allowed = {name.strip().lower() for name in os.environ.get(ALLOWED_HOSTS, "").split(",")}
    if not host or allowed & {host, "*"}:
        return None
    private = _private_address(host)
    if private is None:
        return None
    return f"{host} is in the network of this machine ({private}); set {ALLOWED_HOSTS}={host} to allow it"


def redirect_problem(url: str) -> str | None:
    """Return the reason why the redirects of a URL must not be followed, or None if they are allowed or unknown."""
    for _ in range(_MAX_REDIRECTS):
        target = _redirect(url)
        if target is None:
            return None
        if urlsplit(target).hostname != urlsplit(url).hostname and (problem := host_problem(target)) is not None:
            return f"the server redirects to a different host: {problem}"
        url = target
    return f"the server redirects at least {_MAX_REDIRECTS} times"


@lru_cache(maxsize=4096)
def _private_address(host: str) -> str | None:
    """Return a private IP address of a host, or None if its addresses are public or the host cannot be resolved."""
    try:
        addresses = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return None  # a later request to the URL reports that the host does not exist
    for text in sorted(addresses):
        address = ipaddress.ip_address(text)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        if not (mapped or address).is_global:
            return text
    return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _redirect(url: str) -> str | None:
    """Return the target of a URL's redirect, or None if there is no redirect.

    If the server rejects HEAD, or the URL is signed for a different method, one byte is requested with GET instead.
    """
    for method, headers in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError as response:
            location = response.headers.get("Location")
            response.close()
            if response.code in _REDIRECTS and location:
                return urljoin(url, location)
            if response.code in _NO_HEAD:
                continue
        except (OSError, ValueError):
            pass
        return None
    return None
