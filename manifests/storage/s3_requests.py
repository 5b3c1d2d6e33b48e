"""Send requests to S3 that obstore does not support: list arbitrary names, and list and abort unfinished uploads.

obstore signs the URLs of these requests, with the same credentials, region and endpoint as for all other requests.
obstore signs only URLs of objects. But if the endpoint of a store has a query string, obstore appends the path to the
last value of the query, and can therefore sign any URL of a bucket.

Azure removes unfinished uploads after a week. On Google Cloud Storage, the bucket needs a rule that removes them
(docs/cluster.md).
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree

from clipmill.manifests.storage.stores import UnusableResponse, storage_errors

_LIFETIME = timedelta(minutes=15)  # lifetime of a signed URL
_TIMEOUT_S = 30.0
_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)  # pause before each retry
_LAST_PARAMETER = "x-clipmill"  # query parameter that servers ignore, because its name begins with x-


@dataclass(frozen=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted. Its parts take up space until it is aborted.

    Attributes:
        key: Key of the object, relative to the URL.
        upload_id: ID of the upload on the server.
        start_time: Start time in UTC, in the format of the server.
    """

    key: str
    upload_id: str
    start_time: str


class S3Requests:
    """Client that sends requests to a bucket. Keys are relative to a URL such as `s3://bucket/folder`.

    All methods raise the same errors as the methods of `clipmill.manifests.storage.objects.Objects`.

    Args:
        store: obstore's store for the URL.
    """

    def __init__(self, url: str, store: Any) -> None:
        self._url, self._store = url, store
        self._prefix = f"{store.prefix}/" if store.prefix else ""

    def list(
        self, prefix: str, *, recursive: bool, start_after: str | None, page_size: int
    ) -> Iterator[list[dict[str, str]]]:
        """Yield pages of the objects in the folder `prefix`, as dicts with S3's field names.

        Args:
            recursive: Also list the subfolders.
            start_after: Key after which the listing starts; None lists all keys.
            page_size: Maximum number of objects on a page.
        """
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        query = {"list-type": "2", "encoding-type": "url", "prefix": self._prefix + folder, "max-keys": str(page_size)}
        if not recursive:
            query["delimiter"] = "/"
        if start_after is not None:
            query["start-after"] = self._prefix + start_after
        while True:
            response = self._request("GET", query)
            yield [{**entry, "Key": self._key(entry["Key"], response)} for entry in _entries(response, "Contents")]
            token = _text(response, "NextContinuationToken")
            if not token:
                return
            query["continuation-token"] = token

    def open_uploads(self) -> Iterator[OpenUpload]:
        """Yield the unfinished uploads under the URL."""
        query = {"uploads": "", "encoding-type": "url", "prefix": self._prefix}
        while True:
            response = self._request("GET", query)
            for entry in _entries(response, "Upload"):
                yield OpenUpload(self._key(entry["Key"], response), entry["UploadId"], entry.get("Initiated", ""))
            if _text(response, "IsTruncated") != "true":
                return
            query["key-marker"] = self._prefix + self._key(_text(response, "NextKeyMarker"), response)
            query["upload-id-marker"] = _text(response, "NextUploadIdMarker")

    def abort(self, upload: OpenUpload) -> None:
        """Abort an upload, so that the server removes its parts."""
        self._request("DELETE", {"uploadId": upload.upload_id}, key=upload.key)

    def _key(self, text: str, response: ElementTree.Element) -> str:
        return (unquote_plus(text) if _text(response, "EncodingType") == "url" else text)[len(self._prefix) :]

    @cached_property
    def _bucket_url(self) -> str:
        """URL of the bucket: a signed URL without the path of the object."""
        url = self._sign(self._store, "GET", "x").partition("?")[0]
        return url.rsplit("/", self._prefix.count("/") + 1)[0]

    def _sign(self, store: Any, method: Any, path: str) -> str:
        import obstore

        with storage_errors(self._url, self._url):
            return obstore.sign(store, method, path, _LIFETIME)

    def _request(self, method: str, query: Mapping[str, str], *, key: str | None = None) -> ElementTree.Element:
        from obstore.store import S3Store

        path = "" if key is None else "/" + quote(self._prefix + key)
        url = f"{self._bucket_url}{path}?{urlencode(query, quote_via=quote)}&{_LAST_PARAMETER}="
        # Unlike `endpoint`, this setting overrides environment variables.
        config: Any = {"aws_endpoint_url_s3": url, "virtual_hosted_style_request": True}
        if (region := self._store.config.get("region")) is not None:  # set by a profile
            config["region"] = region
        provider = self._store.credential_provider
        options: Any = {"client_options": {"allow_http": True}, "credential_provider": provider}
        store = S3Store(self._store.config["bucket"], config=config, **options)
        object_url = self._url if key is None else f"{self._url}/{key}"
        for wait_s in (*_WAITS_S, None):
            try:
                signed = self._sign(store, method, "")
                with storage_errors(self._url, object_url):
                    return _send(method, signed)
            except UnusableResponse:
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        raise AssertionError("not reached")


def _send(method: str, url: str) -> ElementTree.Element:
    """Send a request and return the body of the response. Errors have obstore's wording, which `stores.py` parses."""
    from obstore.exceptions import GenericError

    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=_TIMEOUT_S) as response:
            body = response.read()
        return ElementTree.fromstring(body or b"<none/>")
    except urllib.error.HTTPError as error:
        body = error.read().decode("utf-8", "replace")
        raise GenericError(f"status code: {error.code} {HTTPStatus(error.code).phrase}: {body}") from None
    except (http.client.HTTPException, ElementTree.ParseError) as error:
        raise GenericError(f"body error: {error}") from None
    except OSError as error:
        raise GenericError(f"error sending request: {error}") from None


def _entries(response: ElementTree.Element, name: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each element with the given name, in any namespace."""
    for element in response.iterfind(f"{{*}}{name}"):
        yield {field.tag.rpartition("}")[2]: field.text or "" for field in element}


def _text(response: ElementTree.Element, name: str) -> str:
    return response.findtext(f"{{*}}{name}") or ""
