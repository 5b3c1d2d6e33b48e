"""Requests for S3 that obstore has no function for: listings with names that it rejects, and unfinished uploads.

obstore signs the URLs of objects. The path of a store whose endpoint has a query is appended to the last value of that
query, so it also signs any other URL in a bucket, with the credentials, region and endpoint of all other requests.
Azure drops unfinished uploads after a week; Google needs a rule of the bucket for that (docs/cluster.md).
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

from clipmill.manifests.storage.stores import Unanswered, storage_errors

_VALID = timedelta(minutes=15)
_TIMEOUT_S = 30.0
_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)  # before the next attempt
_IGNORED = "x-clipmill"  # servers ignore parameters that begin with x-


@dataclass(frozen=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted: its parts take space until it is aborted.

    Attributes:
        key: Name that the object would have, relative to the address.
        begun: Time in UTC, as the server writes it.
    """

    key: str
    upload_id: str
    begun: str


class S3Requests:
    """Requests to the bucket of an address such as `s3://bucket/folder`; keys are relative to it.

    All methods raise the errors of `clipmill.manifests.storage.objects.Objects`.

    Args:
        store: obstore's store for the address.
    """

    def __init__(self, address: str, store: Any) -> None:
        self._address, self._store = address, store
        self._prefix = f"{store.prefix}/" if store.prefix else ""

    def list(self, prefix: str, *, recursive: bool, after: str | None, at_once: int) -> Iterator[list[dict[str, str]]]:
        """Yield the fields of the objects in the folder `prefix`, page by page, by S3's names.

        Args:
            after: Key, relative to the address, after which to start.
            at_once: Maximum number of objects of a page.
        """
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        query = {"list-type": "2", "encoding-type": "url", "prefix": self._prefix + folder, "max-keys": str(at_once)}
        if not recursive:
            query["delimiter"] = "/"
        if after is not None:
            query["start-after"] = self._prefix + after
        while True:
            answer = self._ask("GET", query)
            yield [{**entry, "Key": self._key(entry["Key"], answer)} for entry in _entries(answer, "Contents")]
            token = _text(answer, "NextContinuationToken")
            if not token:
                return
            query["continuation-token"] = token

    def open_uploads(self) -> Iterator[OpenUpload]:
        """Yield the uploads below the address that were begun and not completed."""
        query = {"uploads": "", "encoding-type": "url", "prefix": self._prefix}
        while True:
            answer = self._ask("GET", query)
            for entry in _entries(answer, "Upload"):
                yield OpenUpload(self._key(entry["Key"], answer), entry["UploadId"], entry.get("Initiated", ""))
            if _text(answer, "IsTruncated") != "true":
                return
            query["key-marker"] = self._prefix + self._key(_text(answer, "NextKeyMarker"), answer)
            query["upload-id-marker"] = _text(answer, "NextUploadIdMarker")

    def abort(self, upload: OpenUpload) -> None:
        """Abort an upload; its parts are removed."""
        self._ask("DELETE", {"uploadId": upload.upload_id}, key=upload.key)

    def _key(self, text: str, answer: ElementTree.Element) -> str:
        return (unquote_plus(text) if _text(answer, "EncodingType") == "url" else text)[len(self._prefix) :]

    @cached_property
    def _bucket_url(self) -> str:
        """URL of the bucket: a URL that obstore signs, without its path."""
        url = self._sign(self._store, "GET", "x").partition("?")[0]
        return url.rsplit("/", self._prefix.count("/") + 1)[0]

    def _sign(self, store: Any, method: Any, path: str) -> str:
        import obstore

        with storage_errors(self._address, self._address):
            return obstore.sign(store, method, path, _VALID)

    def _ask(self, method: str, query: Mapping[str, str], *, key: str | None = None) -> ElementTree.Element:
        from obstore.store import S3Store

        path = "" if key is None else "/" + quote(self._prefix + key)
        url = f"{self._bucket_url}{path}?{urlencode(query, quote_via=quote)}&{_IGNORED}="
        # Unlike `endpoint`, this name has precedence over the variables of the environment.
        config: Any = {"aws_endpoint_url_s3": url, "virtual_hosted_style_request": True}
        if (region := self._store.config.get("region")) is not None:  # of a profile
            config["region"] = region
        provider = self._store.credential_provider
        options: Any = {"client_options": {"allow_http": True}, "credential_provider": provider}
        store = S3Store(self._store.config["bucket"], config=config, **options)
        where = self._address if key is None else f"{self._address}/{key}"
        for wait_s in (*_WAITS_S, None):
            try:
                signed = self._sign(store, method, "")
                with storage_errors(self._address, where):
                    return _answer(method, signed)
            except Unanswered:
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        raise AssertionError("not reached")


def _answer(method: str, url: str) -> ElementTree.Element:
    """Return the body of an answer; errors are worded as obstore words them (`clipmill.manifests.storage.stores`)."""
    from obstore.exceptions import GenericError

    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=_TIMEOUT_S) as answer:
            body = answer.read()
        return ElementTree.fromstring(body or b"<none/>")
    except urllib.error.HTTPError as error:
        body = error.read().decode("utf-8", "replace")
        raise GenericError(f"status code: {error.code} {HTTPStatus(error.code).phrase}: {body}") from None
    except (http.client.HTTPException, ElementTree.ParseError) as error:
        raise GenericError(f"body error: {error}") from None
    except OSError as error:
        raise GenericError(f"error sending request: {error}") from None


def _entries(answer: ElementTree.Element, name: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each element with a name, in any namespace."""
    for element in answer.iterfind(f"{{*}}{name}"):
        yield {field.tag.rpartition("}")[2]: field.text or "" for field in element}


def _text(answer: ElementTree.Element, name: str) -> str:
    return answer.findtext(f"{{*}}{name}") or ""
