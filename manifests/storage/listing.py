"""Listings of the objects below an address, whatever their names.

A bucket also holds what others put there: markers of folders, and names that obstore does not take (`a//b`, `../c`,
unprintable characters), for each of which it refuses the whole page. S3 is then asked for the same listing without
obstore, and such names are set aside: nothing can ask for these objects.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.errors import CutAnswer, OddName

if TYPE_CHECKING:
    from clipmill.manifests.storage.s3_requests import S3Requests

PAGE = 1000  # objects of an answer, at most
MAX_ATTEMPTS = 4  # at answers without resumable content, which obstore does not repeat
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ObjectInfo:
    """An object without its content.

    Attributes:
        key: name relative to the address that it was listed from.
        etag: version of the content, as the server names it, in quotes; empty if the server gives none.
        modified_s: time of the last write in seconds since the epoch, by the server's clock.
    """

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Listing:
    """Listings of one address.

    Args:
        errors: context manager around requests, which gets the key.

    Attributes:
        odd_names: keys below the address that were met and set aside.
    """

    def __init__(
        self, address: str, store: Any, *, scheme: str, errors: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._address, self._store, self._scheme, self._errors = address, store, scheme, errors
        self._s3: S3Requests | None = None  # once a listing had an odd name
        self.odd_names: set[str] = set()

    def pages(self, prefix: str, *, recursive: bool) -> Iterator[list[ObjectInfo]]:
        """Yield the objects in the folder `prefix`, in no particular order; with `recursive` those in folders below."""
        last: str | None = None  # listings are in the order of keys, and can be continued after any of them
        source, num_cut = self._source(prefix, recursive=recursive, after=last), 0
        while True:
            try:
                page = next(source, None)
            except CutAnswer:
                num_cut += 1
                if num_cut == MAX_ATTEMPTS or self._s3 is not None:
                    raise
                source = self._source(prefix, recursive=recursive, after=last)
                continue
            except OddName as odd:
                if self._scheme != "s3":
                    raise UserError(
                        f"{self._address} has an object that this client cannot list: {odd.strerror}",
                        hint="rename or remove it with a tool of the provider",
                    ) from None
                from clipmill.manifests.storage.s3_requests import S3Requests

                self._s3 = S3Requests(self._address, self._store)
                source = self._source(prefix, recursive=recursive, after=last)
                continue
            if page is None:
                return
            begin = last or ""  # Azure's emulator lists everything again
            yield [info for info in page if info.key > begin]
            last, num_cut = page[-1].key if page else last, 0

    def _source(self, prefix: str, *, recursive: bool, after: str | None) -> Iterator[list[ObjectInfo]]:
        import obstore

        if self._s3 is not None:
            yield from self._signed_pages(self._s3.list(prefix, recursive=recursive, after=after, at_once=PAGE))
            return
        if not recursive:
            with self._errors(prefix):
                found = obstore.list_with_delimiter(self._store, prefix or None)["objects"]
            yield [info_of(one) for one in found]
            return
        with self._errors(prefix):
            pages = iter(obstore.list(self._store, prefix or None, offset=after, chunk_size=PAGE))
        while True:
            with self._errors(prefix):
                page = next(pages, None)
            if page is None:
                return
            yield [info_of(one) for one in page]

    def _signed_pages(self, pages: Iterator[list[dict[str, str]]]) -> Iterator[list[ObjectInfo]]:
        for page in pages:
            found = []
            for one in page:
                if is_odd(one["Key"]):
                    self.odd_names.add(one["Key"])
                    continue
                key = one["Key"].removesuffix("/")  # as obstore names the marker of a folder
                modified_s = datetime.fromisoformat(one["LastModified"]).timestamp()
                found.append(ObjectInfo(key, int(one["Size"]), quoted_etag(one.get("ETag")), modified_s))
            yield found


def is_odd(key: str) -> bool:
    """Return True for a name that obstore does not take."""
    parts = key.removesuffix("/").split("/")
    return key != "" and (not {"", ".", ".."}.isdisjoint(parts) or _UNPRINTABLE.search(key) is not None)


def info_of(found: Any) -> ObjectInfo:
    """Return what obstore says about an object."""
    return ObjectInfo(found["path"], found["size"], quoted_etag(found["e_tag"]), found["last_modified"].timestamp())


def quoted_etag(etag: str | None) -> str:
    """Return an etag in quotes; Azure's listings leave them out."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""
