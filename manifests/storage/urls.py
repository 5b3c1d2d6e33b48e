"""URLs of single objects, such as `s3://bucket/videos/a.mp4`: their parts, and what of them may be shown.

In URLs of buckets everything after the bucket is the key, literally. In `http(s)` URLs, the path is percent-encoded.
They must not have a user, a password or a query string: a manifest would store them, and a signed URL expires.
Credentials are taken from the environment (`clipmill.manifests.storage.objects`).
"""

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.mirrors import is_remote, require_not_mistyped

Place = Path | str  # a local path, or a URL

_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/]*)/*(.*)", re.DOTALL)
_USER = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"(\bhttps?://[^\s?#\"']*)[?#][^\s\"']*", re.IGNORECASE)


def place_of(text: str) -> Place:
    """Return a URL as it is, and anything else as a local path; raise UserError for a URL with a single slash."""
    if is_remote(text):
        return text
    require_not_mistyped(text)
    return Path(text)


def folder_of(place: Place) -> Place:
    """Return the folder of a file or an object."""
    return place.parent if isinstance(place, Path) else place.rpartition("/")[0]


def is_web(url: str) -> bool:
    """Return True for a URL of a web server, whose files cannot be listed."""
    return url.lower().startswith(("http://", "https://"))


def split_url(url: str) -> tuple[str, str]:
    """Return the address of the bucket or host, and the key of the object in it.

    Raises:
        UserError: the URL has a user, a password or a query string.
    """
    found = _PARTS.fullmatch(url)
    if found is None:
        raise ValueError(f"not a URL: {mask_secrets(url)}")
    root, key = found.groups()
    if "@" in root:
        raise UserError(
            f"{mask_secrets(url)} contains a user name or password, which the manifest would store",
            hint="give the URL without them; credentials are taken from the variables of the account",
        )
    if not is_web(url):
        return root, key
    if "?" in url or "#" in url:
        raise UserError(
            f"{mask_secrets(url)} has a query string; signed URLs expire, and the manifest would store them",
            hint="give the address in the bucket (s3://BUCKET/KEY), or a URL without a query string",
        )
    return root, unquote(key)


def url_below(folder: str, relative: str) -> str:
    """Return the URL of the object with the path `relative` below the URL of a folder."""
    return f"{folder.rstrip('/')}/{quote(relative) if is_web(folder) else relative}"


def mask_secrets(text: str) -> str:
    """Return a text without the users, passwords and query strings of the URLs in it."""
    return _QUERY.sub(r"\1?...", _USER.sub("...@", text))


def place_name(place: Place) -> PurePosixPath:
    """Return the name of a file or an object without its folders."""
    text = os.fspath(place)
    return PurePosixPath(PurePosixPath(split_url(text)[1] if is_remote(text) else text).name)
