"""Objects under a URL such as `s3://bucket/folder`: the only interface to obstore (its errors: `stores.py`).

Credentials and endpoint come from the variables that the tools of each provider use (`clouds.py`).

*Reading.* obstore retries requests with transient failures (5xx, 429, no response, a truncated body) for 90 s with
exponential backoff; a truncated body is resumed. obstore's threads do not survive a fork, so a process that has used
this module must spawn its workers.

*Listing.* A bucket may contain any names: folder markers, and names that obstore rejects (`a//b`, `../c`, unprintable
characters). If a page of a listing contains such a name, obstore rejects the page. S3 is then listed without obstore,
and these names are set aside, because obstore cannot access these objects.

*Changing.* The right to change an object may end while a request is in progress: the lock that a command holds in the
bucket is a lease (`leases.py`), and a network that drops packets can delay a request for minutes. Therefore,

- each attempt of a request first calls its guard, which raises an error if the right has ended, or may end within
  `stores.WRITE_LIMIT_S`, the time limit of an attempt with all retries by obstore;
- a record is written under the condition that it is still the version that the writer has seen (`put_if`), so that a
  delayed request is rejected once another process has replaced the record.

An attempt with a transient failure (5xx, 429, no response) is retried for `RETRY_S`.
"""

import errno
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import tag_errors, temporary_path
from clipmill.manifests.storage.clouds import cloud_of
from clipmill.manifests.storage.stores import (
    RETRY_S,
    Conflict,
    NoCredentials,
    NoResponse,
    OddName,
    TruncatedResponse,
    UnusableResponse,
    open_store,
    scheme_of,
    storage_errors,
)
from clipmill.manifests.storage.stores import AccessDenied as AccessDenied
from clipmill.manifests.storage.stores import AccessRefused as AccessRefused
from clipmill.manifests.storage.waiting import watch_request

if TYPE_CHECKING:
    from clipmill.manifests.storage.s3_requests import OpenUpload, S3Requests


PAGE = 1000  # maximum number of objects in one response
MAX_ATTEMPTS = 4  # maximum number of attempts if a truncated response cannot be resumed, which obstore does not retry
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ObjectInfo:
    """An object without its content.

    Attributes:
        key: Name relative to the URL that was listed.
        etag: Version of the content, from the server, in quotes; empty if the server does not report one.
        modified_s: Time of the last write in seconds since the epoch, by the server's clock.
    """

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Listing:
    """Listings of the objects under one URL.

    Args:
        errors: Function that takes a key, and returns a context manager for requests.

    Attributes:
        odd_names: Keys under the URL that were listed and set aside.
    """

    def __init__(
        self, url: str, store: Any, *, scheme: str, errors: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._url, self._store, self._scheme, self._errors = url, store, scheme, errors
        self._s3: S3Requests | None = None  # set once a listing has contained an odd name
        self.odd_names: set[str] = set()

    def pages(self, prefix: str, *, recursive: bool) -> Iterator[list[ObjectInfo]]:
        """Yield the objects in the folder `prefix` and, with `recursive`, in its subfolders, in any order."""
        last: str | None = None  # last key: listings are in the order of keys, and can be continued after any key
        source, num_cut = self._source(prefix, recursive=recursive, after=last), 0
        while True:
            try:
                page = next(source, None)
            except TruncatedResponse:
                num_cut += 1
                if num_cut == MAX_ATTEMPTS or self._s3 is not None:
                    raise
                source = self._source(prefix, recursive=recursive, after=last)
                continue
            except OddName as odd:
                if self._scheme != "s3":
                    raise UserError(
                        f"{self._url} contains an object whose name cannot be listed: {odd.strerror}",
                        hint="rename or remove it with the provider's tools",
                    ) from None
                from clipmill.manifests.storage.s3_requests import S3Requests

                self._s3 = S3Requests(self._url, self._store)
                source = self._source(prefix, recursive=recursive, after=last)
                continue
            if page is None:
                return
            begin = last or ""  # skip earlier keys, because Azure's emulator lists everything again
            yield [info for info in page if info.key > begin]
            last, num_cut = page[-1].key if page else last, 0

    def _source(self, prefix: str, *, recursive: bool, after: str | None) -> Iterator[list[ObjectInfo]]:
        import obstore

        if self._s3 is not None:
            yield from self._signed_pages(self._s3.list(prefix, recursive=recursive, after=after, at_once=PAGE))
            return
        if not recursive:
            with self._errors(prefix):
                entries = obstore.list_with_delimiter(self._store, prefix or None)["objects"]
            yield [info_of(entry) for entry in entries]
            return
        with self._errors(prefix):
            pages = iter(obstore.list(self._store, prefix or None, offset=after, chunk_size=PAGE))
        while True:
            with self._errors(prefix):
                page = next(pages, None)
            if page is None:
                return
            yield [info_of(entry) for entry in page]

    def _signed_pages(self, pages: Iterator[list[dict[str, str]]]) -> Iterator[list[ObjectInfo]]:
        for page in pages:
            infos = []
            for entry in page:
                if is_odd(entry["Key"]):
                    self.odd_names.add(entry["Key"])
                    continue
                key = entry["Key"].removesuffix("/")  # obstore removes the slash of a folder marker, too
                modified_s = datetime.fromisoformat(entry["LastModified"]).timestamp()
                infos.append(ObjectInfo(key, int(entry["Size"]), quoted_etag(entry.get("ETag")), modified_s))
            yield infos


def is_odd(key: str) -> bool:
    """Return True for a name that obstore rejects."""
    parts = key.removesuffix("/").split("/")
    return key != "" and (not {"", ".", ".."}.isdisjoint(parts) or _UNPRINTABLE.search(key) is not None)


def info_of(meta: Any) -> ObjectInfo:
    """Convert obstore's metadata for an object."""
    return ObjectInfo(meta["path"], meta["size"], quoted_etag(meta["e_tag"]), meta["last_modified"].timestamp())


def quoted_etag(etag: str | None) -> str:
    """Return an etag in quotes, which Azure's listings omit."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
_NUM_BATCHES = 20  # number of deletion requests that obstore sends at once

PART_BYTES = 8 * 2**20  # size of the parts in which larger objects are uploaded
Guard = Callable[[], object]  # function that raises an error if objects must not be changed any more
_T = TypeVar("_T")


def allow_always() -> None:
    """Do nothing. This is the guard for objects that no lock protects."""


class Changes:
    """Requests of `Objects` that change objects; the methods of `Objects` document them. Thread-safe.

    Args:
        is_writable: False for a web server, to which no request is sent.
        read: Function that returns the content and version of an object.
        count: Function that is called with the numbers of requests made and bytes sent.
    """

    def __init__(
        self,
        url: str,
        *,
        scheme: str,
        is_writable: bool,
        read: Callable[[str], tuple[bytes, ObjectInfo]],
        count: Callable[[int, int], object],
    ) -> None:
        self._url, self._scheme, self._read, self._count = url, scheme, read, count
        self._store: Any = open_store(url, scheme=scheme, is_written=True) if is_writable else None

    def put(self, key: str, content: bytes | Path, *, guard: Guard, mode: Any = "overwrite") -> str:
        """Write an object and return its etag."""
        import obstore

        put_once = partial(obstore.put, self._store, key, content, mode=mode, chunk_size=PART_BYTES, max_concurrency=4)
        num_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        num_parts = 1 if mode != "overwrite" else -(-num_bytes // PART_BYTES)
        for attempt in range(MAX_ATTEMPTS):
            try:
                result = self._retry(key, put_once, guard, num_bytes=num_bytes)
                break
            except FileNotFoundError:  # an upload in parts was completed, but the response was lost
                if num_parts <= 1 or attempt == MAX_ATTEMPTS - 1:
                    raise
        self._count(1 if num_parts <= 1 else num_parts + 2, num_bytes)
        return quoted_etag(result["e_tag"])

    def put_if(self, key: str, content: bytes, *, replaces: str | None, guard: Guard) -> str:
        """Write an object that does not exist (None), or that has the etag `replaces`; return the new etag.

        Raises:
            Conflict: Another process has written the object. (An earlier attempt of this write counts as success.)
        """
        try:
            mode: Any = "create"
            if replaces is not None:
                mode = self._retry(key, lambda: self._precondition(key, replaces), guard)
            return self.put(key, content, guard=guard, mode=mode)
        except FileNotFoundError:
            raise self._conflict(key) from None
        except (Conflict, NoResponse):
            # The object may be the result of an earlier attempt whose response was lost.
            with suppress(FileNotFoundError):
                present, info = self._read(key)
                if present == content and info.etag:
                    return info.etag
            raise

    def copy(self, source: str, target: str, *, guard: Guard) -> None:
        """Copy an object."""
        import obstore

        self._retry(source, lambda: obstore.copy(self._store, source, target), guard)
        self._count(1, 0)

    def delete(self, keys: Sequence[str], *, guard: Guard) -> None:
        """Delete objects."""
        import obstore

        per_request = cloud_of(self._url).num_deleted
        self._count(-(-len(keys) // per_request), 0)
        num_at_once = per_request * _NUM_BATCHES
        for begin in range(0, len(keys), num_at_once):
            batch = list(keys[begin : begin + num_at_once])
            try:
                self._retry(batch[0], partial(obstore.delete, self._store, batch), guard)
            except FileNotFoundError:  # one is missing (Azure, Google); it is unknown if the others were deleted
                for key in batch if len(batch) > 1 else ():
                    self.delete([key], guard=guard)

    def _precondition(self, key: str, etag: str) -> Any:
        """Return obstore's condition that an object still has the given etag; Google compares generations instead."""
        import obstore

        if self._scheme != "gs":
            return {"e_tag": etag}
        meta = obstore.head(self._store, key)
        self._count(1, 0)
        if quoted_etag(meta["e_tag"]) != etag:
            raise self._conflict(key)
        return {"e_tag": etag, "version": meta["version"]}

    def _retry(self, key: str, request: Callable[[], _T], guard: Guard, *, num_bytes: int = 0) -> _T:
        """Return the response to a request; retry after transient failures while the guard allows it."""
        if self._store is None:
            raise UserError(
                f"{self._url} is read-only: objects can be written only to s3://, gs:// and az://",
                hint="use the URL of a bucket",
            )
        end_s, pause_s = time.monotonic() + RETRY_S, _FIRST_PAUSE_S
        with watch_request(self._url, num_bytes=num_bytes):
            while True:
                guard()
                try:
                    with storage_errors(self._url, f"{self._url}/{key}", num_bytes=num_bytes):
                        return request()
                except (NoResponse, NoCredentials):
                    if time.monotonic() > end_s:
                        raise
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _conflict(self, key: str) -> Conflict:
        return Conflict(errno.EEXIST, "another process has written it in the meantime", f"{self._url}/{key}")


_STREAM_BYTES = 4 * 2**20
_GAP_BYTES = 256 * 2**10  # largest gap between ranges that are read with one request


def open_objects(url: str) -> "Objects":
    """Return the objects under the URL `address`; no request is sent yet.

    Raises:
        UserError: The scheme is unknown, the URL has no bucket or host, or required settings are missing.
    """
    return Objects(url)


class Objects:
    """The objects under a URL. Keys are relative to the URL. Thread-safe.

    All methods raise FileNotFoundError for an object that does not exist, UserError for a bucket that does not exist,
    AccessRefused (a UserError and a PermissionError), and OSError when retries have failed. The file name of an OSError
    is the URL of the object.

    Attributes:
        address: URL without a trailing slash.
        num_requests, num_bytes: Number of requests, without retries, and of bytes of content sent and received.
    """

    def __init__(self, url: str) -> None:
        self.scheme = scheme_of(url)
        self.url = url.rstrip("/")
        self.num_requests = 0
        self.num_bytes = 0
        self._count_lock = threading.Lock()
        self._checked_keys = set[str]()  # keys whose redirects were checked
        self._store = open_store(self.url, scheme=self.scheme)
        self._changes = Changes(
            self.url, scheme=self.scheme, is_writable=self.is_writable, read=self.read_version, count=self._count
        )
        self._listing = Listing(self.url, self._store, scheme=self.scheme, errors=self._errors)

    def __reduce__(self) -> tuple[type["Objects"], tuple[str]]:
        return Objects, (self.url,)

    @property
    def is_writable(self) -> bool:
        """False for a web server, which is read-only."""
        return self.scheme not in ("http", "https")

    def url_of(self, key: str) -> str:
        """Return the URL of the object `key`."""
        return f"{self.url}/{key}" if key else self.url

    def read(self, key: str) -> bytes:
        """Return the content of an object."""
        return self.read_version(key)[0]

    def read_version(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return the content of an object, with its size, version and time."""
        import obstore

        self._check_redirects(key)
        with self._errors(key):
            response = obstore.get(self._store, key)
            content = bytes(response.bytes())
        self._count(1, len(content))
        return content, info_of({**response.meta, "path": key})

    def read_range(self, key: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of an object, starting at `offset`; raise OSError if the object is too short."""
        return self.read_ranges(key, [(offset, size)])[0]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ranges (offset, size) of an object, read in parallel; one request reads neighbouring ranges."""
        import obstore

        nonempty = [(offset, size) for offset, size in ranges if size]
        if not nonempty:
            return [b""] * len(ranges)
        self._check_redirects(key)
        with self._errors(key, num_bytes=sum(size for _, size in nonempty)):
            buffers = obstore.get_ranges(
                self._store,
                key,
                starts=[offset for offset, _ in nonempty],
                lengths=[size for _, size in nonempty],
                coalesce=_GAP_BYTES,
            )
        contents = iter(map(bytes, buffers))
        result = [next(contents) if size else b"" for _, size in ranges]
        for (offset, size), content in zip(ranges, result, strict=True):
            if len(content) != size:
                reason = f"the object ends before byte {offset + size}"
                raise OSError(errno.EIO, reason, self.url_of(key))
        # Count the requests, because obstore joins ranges with small gaps.
        num_requests, end = 0, None
        for offset, size in sorted(nonempty):
            is_far = end is None or offset - end > _GAP_BYTES
            num_requests += is_far
            end = offset + size if is_far or end is None else max(end, offset + size)
        self._count(num_requests, sum(map(len, result)))
        return result

    def info(self, key: str) -> ObjectInfo:
        """Return the size, version and time of an object."""
        import obstore

        self._check_redirects(key)
        try:
            with self._errors(key):
                meta = obstore.head(self._store, key)
        except NoResponse:
            raise
        except (AccessDenied, UnusableResponse):
            if self.is_writable:
                self.read_range(key, 0, 1)  # raises the cause, such as expired keys, which a HEAD response lacks
            raise
        self._count(1, 0)
        return info_of({**meta, "path": key})

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix`, in any order, without the objects in `odd_names`.

        Args:
            recursive: Also yield the objects in its subfolders.

        Raises:
            UserError: A web server cannot be listed.
        """
        if not self.is_writable:
            raise UserError(
                f"{self.url} is on a web server, which cannot be listed",
                hint="use a URL with s3://, gs:// or az://",
            )
        for page in self._listing.pages(prefix, recursive=recursive):
            self._count(1, 0)
            yield from page

    @property
    def odd_names(self) -> set[str]:
        """Listed keys that obstore cannot access: with `//`, `/../`, `/./`, or unprintable characters."""
        return self._listing.odd_names

    def open_uploads(self) -> Iterator["OpenUpload"]:
        """Yield the incomplete multipart uploads under the URL; only for S3 (`s3_requests.py`)."""
        from clipmill.manifests.storage.s3_requests import S3Requests

        if self.scheme == "s3":
            yield from S3Requests(self.url, self._store).open_uploads()

    def abort(self, upload: "OpenUpload") -> None:
        """Abort a multipart upload."""
        from clipmill.manifests.storage.s3_requests import S3Requests

        S3Requests(self.url, self._store).abort(upload)

    def fetch(self, key: str, path: Path) -> None:
        """Copy an object to `path`, which appears only when it is complete."""
        import obstore

        self._check_redirects(key)
        temporary = temporary_path(path)
        num_bytes = 0
        try:
            with tag_errors(path), temporary.open("wb") as file:
                with self._errors(key):
                    response = obstore.get(self._store, key)
                    blocks = iter(response.stream(min_chunk_size=_STREAM_BYTES))
                while True:
                    with self._errors(key, num_bytes=_STREAM_BYTES):
                        block = next(blocks, None)
                    if block is None:
                        break
                    num_bytes += file.write(block)
            if num_bytes != response.meta["size"]:
                reason = f"received {num_bytes} of {response.meta['size']} bytes"
                raise OSError(errno.EIO, reason, self.url_of(key))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._count(1, num_bytes)

    def write(
        self,
        key: str,
        content: bytes | Path,
        *,
        only_new: bool = False,
        replaces: str | None = None,
        guard: Guard = allow_always,
    ) -> str:
        """Write a complete object and return its etag; readers see either the old object or the new object.

        A conditional write whose response was lost is retried, and may then find the object that it has written. A
        conflict with an object of the same content is therefore not an error.

        Args:
            content: Bytes, or the path of a file.
            only_new: Write only if the object does not exist.
            replaces: Write only if the object still has this etag.
            guard: Function that is called before each attempt (*Changing* above).

        Raises:
            Conflict: The condition is not met.
        """
        if not only_new and replaces is None:
            return self._changes.put(key, content, guard=guard)
        content = content if isinstance(content, bytes) else content.read_bytes()
        return self._changes.put_if(key, content, replaces=None if only_new else replaces, guard=guard)

    def replace(self, key: str, content: bytes, *, seen: ObjectInfo | None, old: Path, guard: Guard) -> str:
        """Replace the version of a record that this process has seen, and return the new etag.

        Args:
            seen: Version that this process has seen; None if the record did not exist.
            old: Local file with the content of that version.

        Raises:
            Conflict: Another process has written or removed the record.
        """
        replaces = None if seen is None else seen.etag
        try:
            return self.write(key, content, only_new=seen is None, replaces=replaces, guard=guard)
        except Conflict as conflict:
            guard()  # its error names the process that has taken over a lock
            with suppress(FileNotFoundError):
                present, info = self.read_version(key)
                if seen is not None and present == old.read_bytes():
                    # Some servers return a different etag in their response to a write.
                    return self.write(key, content, replaces=info.etag, guard=guard)
            conflict.strerror = "another command has written it in the meantime"
            raise

    def copy(self, source: str, target: str, *, guard: Guard = allow_always) -> None:
        """Copy an object within the bucket, without sending its content through this machine."""
        self._changes.copy(source, target, guard=guard)

    def delete(self, *keys: str, guard: Guard = allow_always) -> None:
        """Delete objects; objects that do not exist are not an error."""
        self._changes.delete(keys, guard=guard)

    def _check_redirects(self, key: str) -> None:
        """Raise an OSError if a web server redirects to a forbidden host; obstore follows redirects silently."""
        if self.is_writable or key in self._checked_keys:
            return
        from clipmill.manifests.storage.urls import redirect_problem

        problem = redirect_problem(self.url_of(quote(key)))
        if problem is not None:
            raise UnusableResponse(errno.EIO, problem, self.url_of(key))
        self._checked_keys.add(key)

    def _count(self, num_requests: int, num_bytes: int) -> None:
        with self._count_lock:
            self.num_requests += num_requests
            self.num_bytes += num_bytes

    def _errors(self, key: str, *, num_bytes: int = 0) -> AbstractContextManager[None]:
        return storage_errors(self.url, self.url_of(key), num_bytes=num_bytes)
