"""Read, list, write and delete the objects under a URL such as `s3://bucket/folder`, with obstore.

Credentials and endpoints come from environment variables (`clouds.py`). `stores.py` converts obstore's errors.

*Reading.* obstore retries requests with transient failures (5xx, 429, no response, a truncated body) for 90 s with
exponential backoff, and resumes a truncated body. The threads of obstore do not survive a fork, so a process that has
used this module must spawn its workers.

*Listing.* A bucket may contain objects with arbitrary names: folder markers, and names that obstore rejects (`a//b`,
`../c`, unprintable characters). obstore rejects each page of a listing that contains such a name. In this case, S3 is
listed without obstore, and the rejected names are collected separately, because obstore cannot access these objects.

*Changing.* The right to change an object may end while a request is in progress: the lock that a command holds in a
bucket is a lease (`leases.py`), and a network that drops packets can delay a request for minutes. Therefore,

- each attempt to send a request first calls a guard, which raises an error if the right has ended or may end within
  `stores.WRITE_LIMIT_S`, the time limit for an attempt, including obstore's own retries;
- a record is written on the condition that the object is still the version that the writer has seen (`put_if`), so that
  a delayed request is rejected after another process has replaced the record.

Requests that fail for a transient reason (5xx, 429, no response) are retried for `RETRY_S`.
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
MAX_ATTEMPTS = 4  # attempts at a request whose response is truncated, if obstore neither resumes nor retries it
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ObjectInfo:
    """Metadata of an object.

    Attributes:
        key: Key relative to the URL of `Objects`.
        etag: Entity tag of the content in quotes, as the server reports it; empty if the server does not report one.
        modified_s: Time of the last write according to the server, in seconds since the epoch.
    """

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Listing:
    """Listing of the objects under one URL.

    Args:
        errors: Function that takes a key and returns a context manager that converts the errors of requests.

    Attributes:
        odd_names: Listed keys that obstore rejects.
    """

    def __init__(
        self, url: str, store: Any, *, scheme: str, errors: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._url, self._store, self._scheme, self._errors = url, store, scheme, errors
        self._s3: S3Requests | None = None  # set once a listing has contained an odd name
        self.odd_names: set[str] = set()

    def pages(self, prefix: str, *, recursive: bool) -> Iterator[list[ObjectInfo]]:
        """Yield pages of the objects in the folder `prefix`, in any order.

        Args:
            recursive: Also list the subfolders.
        """
        last_key: str | None = None  # listings are ordered by key, and can be continued after any key
        source, num_truncated = self._source(prefix, recursive=recursive, start_after=last_key), 0
        while True:
            try:
                page = next(source, None)
            except TruncatedResponse:
                num_truncated += 1
                if num_truncated == MAX_ATTEMPTS or self._s3 is not None:
                    raise
                source = self._source(prefix, recursive=recursive, start_after=last_key)
                continue
            except OddName as odd:
                if self._scheme != "s3":
                    raise UserError(
                        f"{self._url} contains an object whose name cannot be listed: {odd.strerror}",
                        hint="rename or remove the object with the provider's tools",
                    ) from None
                from clipmill.manifests.storage.s3_requests import S3Requests

                self._s3 = S3Requests(self._url, self._store)
                source = self._source(prefix, recursive=recursive, start_after=last_key)
                continue
            if page is None:
                return
            # Azure's emulator ignores the offset, so keys that were listed before are skipped.
            yield [info for info in page if info.key > (last_key or "")]
            last_key, num_truncated = page[-1].key if page else last_key, 0

    def _source(self, prefix: str, *, recursive: bool, start_after: str | None) -> Iterator[list[ObjectInfo]]:
        import obstore

        if self._s3 is not None:
            yield from self._signed_pages(
                self._s3.list(prefix, recursive=recursive, start_after=start_after, page_size=PAGE)
            )
            return
        if not recursive:
            with self._errors(prefix):
                entries = obstore.list_with_delimiter(self._store, prefix or None)["objects"]
            yield [info_of(entry) for entry in entries]
            return
        with self._errors(prefix):
            pages = iter(obstore.list(self._store, prefix or None, offset=start_after, chunk_size=PAGE))
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
                key = entry["Key"].removesuffix("/")  # the slash of a folder marker, which obstore removes as well
                modified_s = datetime.fromisoformat(entry["LastModified"]).timestamp()
                infos.append(ObjectInfo(key, int(entry["Size"]), quoted_etag(entry.get("ETag")), modified_s))
            yield infos


def is_odd(key: str) -> bool:
    """Return True for a key that obstore rejects."""
    parts = key.removesuffix("/").split("/")
    return key != "" and (not {"", ".", ".."}.isdisjoint(parts) or _UNPRINTABLE.search(key) is not None)


def info_of(meta: Any) -> ObjectInfo:
    """Convert the metadata that obstore returns for an object."""
    return ObjectInfo(meta["path"], meta["size"], quoted_etag(meta["e_tag"]), meta["last_modified"].timestamp())


def quoted_etag(etag: str | None) -> str:
    """Return an etag with quotes, which are missing in listings from Azure."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
_NUM_BATCHES = 20  # number of deletion requests that obstore sends concurrently

PART_BYTES = 8 * 2**20  # size of the parts in which larger objects are uploaded
Guard = Callable[[], object]  # function that raises an error if this process may no longer change objects
_T = TypeVar("_T")


def allow_always() -> None:
    """Do nothing. This is the guard for objects that no lock protects."""


class Changes:
    """Requests of `Objects` that change objects; see the methods of `Objects`. Thread-safe.

    Args:
        is_writable: False for a web server, which would reject such requests.
        read: Function that returns the content and metadata of an object.
        count: Function that is called with the number of requests and the number of bytes sent.
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
            except FileNotFoundError:  # a multipart upload was completed, but the response was lost
                if num_parts <= 1 or attempt == MAX_ATTEMPTS - 1:
                    raise
        self._count(1 if num_parts <= 1 else num_parts + 2, num_bytes)
        return quoted_etag(result["e_tag"])

    def put_if(self, key: str, content: bytes, *, replaces: str | None, guard: Guard) -> str:
        """Write an object if its etag is `replaces` (None: if it does not exist), and return the new etag.

        Raises:
            Conflict: Another process has written the object. (A conflict with an earlier attempt at the same write
                counts as a success.)
        """
        try:
            mode: Any = "create"
            if replaces is not None:
                mode = self._retry(key, lambda: self._precondition(key, replaces), guard)
            return self.put(key, content, guard=guard, mode=mode)
        except FileNotFoundError:
            raise self._conflict(key) from None
        except (Conflict, NoResponse):
            # An earlier attempt may have written the object, although its response was lost.
            with suppress(FileNotFoundError):
                stored, info = self._read(key)
                if stored == content and info.etag:
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

        num_per_request = cloud_of(self._url).max_deletions
        self._count(-(-len(keys) // num_per_request), 0)
        batch_size = num_per_request * _NUM_BATCHES
        for start in range(0, len(keys), batch_size):
            batch = list(keys[start : start + batch_size])
            try:
                self._retry(batch[0], partial(obstore.delete, self._store, batch), guard)
            except FileNotFoundError:  # an object is missing (Azure, Google), and others may not have been deleted
                for key in batch if len(batch) > 1 else ():
                    self.delete([key], guard=guard)

    def _precondition(self, key: str, etag: str) -> Any:
        """Return the condition, in obstore's form, that an object still has the given etag.

        Google's server compares generations instead of etags.
        """
        import obstore

        if self._scheme != "gs":
            return {"e_tag": etag}
        meta = obstore.head(self._store, key)
        self._count(1, 0)
        if quoted_etag(meta["e_tag"]) != etag:
            raise self._conflict(key)
        return {"e_tag": etag, "version": meta["version"]}

    def _retry(self, key: str, request: Callable[[], _T], guard: Guard, *, num_bytes: int = 0) -> _T:
        """Send a request and return its result; retry transient failures for RETRY_S. Each attempt calls the guard."""
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
_GAP_BYTES = 256 * 2**10  # maximum gap between two ranges that are read with one request


def open_objects(url: str) -> "Objects":
    """Return the objects under a URL. No request is sent yet.

    Raises:
        UserError: The scheme is unknown, the URL has no bucket or host, or required settings are missing.
    """
    return Objects(url)


class Objects:
    """The objects under a URL. Keys are relative to the URL. Thread-safe.

    All methods raise FileNotFoundError if the object does not exist, UserError if the bucket does not exist,
    AccessRefused (a UserError and a PermissionError) if access is denied, and OSError if all retries have failed. The
    file name of an OSError is the URL of the object.

    Attributes:
        url: URL without a trailing slash.
        num_requests: Number of requests, not counting retries.
        num_bytes: Number of bytes of content that were sent and received.
    """

    def __init__(self, url: str) -> None:
        self.scheme = scheme_of(url)
        self.url = url.rstrip("/")
        self.num_requests = 0
        self.num_bytes = 0
        self._count_lock = threading.Lock()
        self._checked_keys = set[str]()  # keys whose redirects have been checked
        self._store = open_store(self.url, scheme=self.scheme)
        self._changes = Changes(
            self.url, scheme=self.scheme, is_writable=self.is_writable, read=self.read_version, count=self._count
        )
        self._listing = Listing(self.url, self._store, scheme=self.scheme, errors=self._errors)

    def __reduce__(self) -> tuple[type["Objects"], tuple[str]]:
        return Objects, (self.url,)

    @property
    def is_writable(self) -> bool:
        """True for a bucket; False for a web server, which is read-only."""
        return self.scheme not in ("http", "https")

    def url_of(self, key: str) -> str:
        """Return the URL of the object `key`."""
        return f"{self.url}/{key}" if key else self.url

    def read(self, key: str) -> bytes:
        """Return the content of an object."""
        return self.read_version(key)[0]

    def read_version(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return the content and the metadata of an object."""
        import obstore

        self._check_redirects(key)
        with self._errors(key):
            response = obstore.get(self._store, key)
            content = bytes(response.bytes())
        self._count(1, len(content))
        return content, info_of({**response.meta, "path": key})

    def read_range(self, key: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of an object, starting at `offset`. If the object is too short, raise OSError."""
        return self.read_ranges(key, [(offset, size)])[0]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges (offset, size) of an object concurrently. Ranges with small gaps are read with one request."""
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
        # Count the requests that obstore has sent after joining ranges with small gaps.
        num_requests, end = 0, None
        for offset, size in sorted(nonempty):
            is_far = end is None or offset - end > _GAP_BYTES
            num_requests += is_far
            end = offset + size if is_far or end is None else max(end, offset + size)
        self._count(num_requests, sum(map(len, result)))
        return result

    def info(self, key: str) -> ObjectInfo:
        """Return the metadata of an object."""
        import obstore

        self._check_redirects(key)
        try:
            with self._errors(key):
                meta = obstore.head(self._store, key)
        except NoResponse:
            raise
        except (AccessDenied, UnusableResponse):
            if self.is_writable:
                self.read_range(key, 0, 1)  # raises the cause, such as expired keys, which a HEAD response omits
            raise
        self._count(1, 0)
        return info_of({**meta, "path": key})

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix`, in any order, except for the objects in `odd_names`.

        Args:
            recursive: Also yield the objects in subfolders.

        Raises:
            UserError: The URL is on a web server, which cannot be listed.
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
        """Listed keys that obstore rejects: keys with `//`, `/../`, `/./`, or unprintable characters."""
        return self._listing.odd_names

    def open_uploads(self) -> Iterator["OpenUpload"]:
        """Yield the incomplete multipart uploads under an S3 URL. For other URLs, yield nothing."""
        from clipmill.manifests.storage.s3_requests import S3Requests

        if self.scheme == "s3":
            yield from S3Requests(self.url, self._store).open_uploads()

    def abort(self, upload: "OpenUpload") -> None:
        """Abort a multipart upload."""
        from clipmill.manifests.storage.s3_requests import S3Requests

        S3Requests(self.url, self._store).abort(upload)

    def fetch(self, key: str, path: Path) -> None:
        """Download an object to the file `path`, which appears only when it is complete."""
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
        """Write an object and return its etag. Readers see either the old object or the complete new object.

        A conditional write is retried if its response was lost, and the retry may encounter the object that the first
        attempt wrote. Therefore, a conflict with an object that has the same content is not an error.

        Args:
            content: Content, or the path of a file with the content.
            only_new: Write only if the object does not exist.
            replaces: Write only if the object still has this etag.
            guard: Function that is called before each attempt (see *Changing* at the top of this file).

        Raises:
            Conflict: The condition is not met.
        """
        if not only_new and replaces is None:
            return self._changes.put(key, content, guard=guard)
        content = content if isinstance(content, bytes) else content.read_bytes()
        return self._changes.put_if(key, content, replaces=None if only_new else replaces, guard=guard)

    def replace(self, key: str, content: bytes, *, seen: ObjectInfo | None, old: Path, guard: Guard) -> str:
        """Write a record if the stored version is still the one that this process has seen, and return the new etag.

        Args:
            seen: Metadata of the version that this process has seen; None if the record did not exist.
            old: Local file with the content of that version.
            guard: Function that is called before each attempt.

        Raises:
            Conflict: Another process has written or removed the record.
        """
        replaces = None if seen is None else seen.etag
        try:
            return self.write(key, content, only_new=seen is None, replaces=replaces, guard=guard)
        except Conflict as conflict:
            guard()  # if another process has taken over a lock, the guard raises an error that names the process
            with suppress(FileNotFoundError):
                stored, info = self.read_version(key)
                if seen is not None and stored == old.read_bytes():
                    # The version is the same: some servers return a different etag in the response to a write.
                    return self.write(key, content, replaces=info.etag, guard=guard)
            conflict.strerror = "another command has written it in the meantime"
            raise

    def copy(self, source: str, target: str, *, guard: Guard = allow_always) -> None:
        """Copy an object within the bucket without downloading it."""
        self._changes.copy(source, target, guard=guard)

    def delete(self, *keys: str, guard: Guard = allow_always) -> None:
        """Delete objects. Ignore objects that do not exist."""
        self._changes.delete(keys, guard=guard)

    def _check_redirects(self, key: str) -> None:
        """Raise an OSError if a web server redirects to a forbidden host. (obstore follows all redirects silently.)"""
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
