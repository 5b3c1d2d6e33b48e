"""Objects below an address such as `s3://bucket/folder`: the only interface to obstore (its errors: `errors.py`).

Credentials and endpoint come from the variables that the tools of each provider use (`clouds.py`).

Answers that fail in passing (5xx, 429, no answer, a body that ends early) are retried by obstore with exponential
backoff; a body is resumed where it ended. obstore's threads do not survive a fork: a process that has used this module
must spawn its workers.
"""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from manifests.errors import UserError
from manifests.publish import naming, temporary_path
from manifests.storage.clouds import cloud_of
from manifests.storage.errors import AccessRefused, Conflict, CutAnswer, storage_errors
from manifests.storage.listing import MAX_ATTEMPTS, Listing, info_of, quoted_etag
from manifests.storage.listing import ObjectInfo as ObjectInfo
from manifests.storage.mirrors import is_remote as is_remote
from manifests.storage.stores import open_store, scheme_of

if TYPE_CHECKING:
    from manifests.storage.s3_requests import OpenUpload

_PART_BYTES = 8 * 2**20  # of a multipart upload
_STREAM_BYTES = 4 * 2**20
_GAP_BYTES = 256 * 2**10  # ranges with smaller gaps are one request

_T = TypeVar("_T")


def open_objects(address: str) -> "Objects":
    """Return the objects below `address`; no request is sent yet.

    Raises:
        UserError: the scheme is unknown, the address names no bucket or host, or required settings are missing.
    """
    return Objects(address)


class Objects:
    """The objects below an address. Keys are relative to it. Safe to use from several threads.

    All methods raise FileNotFoundError for an object that does not exist, UserError for a bucket that does not exist,
    AccessRefused (a UserError and a PermissionError), and OSError when retries have not helped. The file name of an
    OSError is the address of the object.

    Attributes:
        address: the address, without a slash at its end.
        num_requests, num_bytes: requests, without retries, and bytes of content sent and received.
    """

    def __init__(self, address: str) -> None:
        self.scheme = scheme_of(address)
        self.address = address.rstrip("/")
        self.num_requests = 0
        self.num_bytes = 0
        self._count_lock = threading.Lock()
        self._store = open_store(self.address, scheme=self.scheme)
        self._listing = Listing(self.address, self._store, scheme=self.scheme, errors=self._errors)

    def __reduce__(self) -> tuple[type["Objects"], tuple[str]]:
        return Objects, (self.address,)

    @property
    def is_writable(self) -> bool:
        """False for a web server, which is only read."""
        return self.scheme not in ("http", "https")

    def address_of(self, key: str) -> str:
        """Return the address of the object `key`."""
        return f"{self.address}/{key}" if key else self.address

    def read(self, key: str) -> bytes:
        """Return the content of an object."""
        import obstore

        with self._errors(key):
            content = bytes(obstore.get(self._store, key).bytes())
        self._count(1, len(content))
        return content

    def read_range(self, key: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of an object from `offset`; an OSError if it has fewer."""
        return self.read_ranges(key, [(offset, size)])[0]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ranges (offset, size) of an object, requested in parallel; neighbouring ranges in one request."""
        import obstore

        wanted = [(offset, size) for offset, size in ranges if size]
        if not wanted:
            return [b""] * len(ranges)
        with self._errors(key, num_bytes=sum(size for _, size in wanted)):
            found = obstore.get_ranges(
                self._store,
                key,
                starts=[offset for offset, _ in wanted],
                lengths=[size for _, size in wanted],
                coalesce=_GAP_BYTES,
            )
        contents = iter(map(bytes, found))
        result = [next(contents) if size else b"" for _, size in ranges]
        for (offset, size), content in zip(ranges, result, strict=True):
            if len(content) != size:
                reason = f"the object ends before byte {offset + size}"
                raise OSError(errno.EIO, reason, self.address_of(key))
        self._count(_num_requests(wanted), sum(map(len, result)))
        return result

    def info(self, key: str) -> ObjectInfo:
        """Return size, version and time of an object."""
        import obstore

        with self._errors(key):
            found = obstore.head(self._store, key)
        self._count(1, 0)
        return info_of({**found, "path": key})

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix`, in no particular order, but for those in `odd_names`.

        Args:
            recursive: also yield the objects in folders below it.

        Raises:
            UserError: a web server cannot be listed.
        """
        if not self.is_writable:
            raise UserError(f"{self.address} cannot be listed", hint="give an address with s3://, gs:// or az://")
        for page in self._listing.pages(prefix, recursive=recursive):
            self._count(1, 0)
            yield from page

    @property
    def odd_names(self) -> set[str]:
        """Keys that listings have met and that cannot be asked for: with `//`, `/../`, `/./`, or unprintable."""
        return self._listing.odd_names

    def open_uploads(self) -> Iterator["OpenUpload"]:
        """Yield the multipart uploads below the address that are not complete; none but in S3 (`s3_requests`)."""
        from manifests.storage.s3_requests import S3Requests

        if self.scheme == "s3":
            yield from S3Requests(self.address, self._store).open_uploads()

    def abort(self, upload: "OpenUpload") -> None:
        """Give up a multipart upload."""
        from manifests.storage.s3_requests import S3Requests

        S3Requests(self.address, self._store).abort(upload)

    def fetch(self, key: str, path: Path) -> None:
        """Copy a whole object to `path`, which appears only when it is complete."""
        import obstore

        temporary = temporary_path(path)
        num_bytes = 0
        try:
            with naming(path), temporary.open("wb") as file:
                with self._errors(key):
                    answer = obstore.get(self._store, key)
                    blocks = iter(answer.stream(min_chunk_size=_STREAM_BYTES))
                while True:
                    with self._errors(key, num_bytes=_STREAM_BYTES):
                        block = next(blocks, None)
                    if block is None:
                        break
                    num_bytes += file.write(block)
            if num_bytes != answer.meta["size"]:
                reason = f"received {num_bytes} of {answer.meta['size']} bytes"
                raise OSError(errno.EIO, reason, self.address_of(key))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._count(1, num_bytes)

    def write(self, key: str, content: bytes | Path, *, only_new: bool = False, replaces: str | None = None) -> str:
        """Write a whole object and return its etag; readers see the old object or the new one.

        A conditional write whose answer was lost is repeated, and then finds its own object: a conflict with an object
        of the same content is therefore no conflict.

        Args:
            content: bytes, or the path of a file.
            only_new: write only if the object does not exist.
            replaces: write only if the object still has this etag.

        Raises:
            Conflict: the condition does not hold.
        """
        if not self.is_writable:
            raise UserError(
                f"{self.address} is read-only: objects can be written to s3://, gs:// and az://",
                hint="give an address of a bucket",
            )
        num_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        if not only_new and replaces is None:
            etag = self._put(key, content, mode="overwrite", num_bytes=num_bytes)
        else:
            mode = "create" if only_new else self._precondition(key, replaces or "")
            etag = self._put_if(key, content if isinstance(content, bytes) else content.read_bytes(), mode=mode)
        return etag

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket, without sending its content through this machine."""
        import obstore

        self._uncut(source, lambda: obstore.copy(self._store, source, target))
        self._count(1, 0)

    def delete(self, *keys: str) -> None:
        """Delete objects; those that do not exist are not an error."""
        import obstore

        if not self.is_writable:
            raise UserError(f"{self.address} is read-only", hint="give an address of a bucket")
        if not keys:
            return
        self._count(-(-len(keys) // cloud_of(self.address).num_deleted), 0)
        try:
            self._uncut(keys[0], lambda: obstore.delete(self._store, [*keys]))
        except FileNotFoundError:  # of one of them, by Azure and Google; nobody says whether the others are gone
            for key in keys if len(keys) > 1 else ():
                self.delete(key)

    def _precondition(self, key: str, etag: str) -> Any:
        """Return obstore's condition that an object still has an etag; Google compares generations instead."""
        import obstore

        if self.scheme != "gs":
            return {"e_tag": etag}
        found: Any = {"e_tag": None}
        with suppress(FileNotFoundError), self._errors(key):
            found = obstore.head(self._store, key)
        self._count(1, 0)
        if quoted_etag(found["e_tag"]) != etag:
            raise Conflict(errno.EEXIST, "another writer was faster", self.address_of(key))
        return {"e_tag": etag, "version": found["version"]}

    def _put_if(self, key: str, content: bytes, *, mode: Any) -> str:
        for attempt in range(MAX_ATTEMPTS):
            try:
                return self._put(key, content, mode=mode, num_bytes=len(content))
            except Conflict:
                if etag := self._etag_of_same(key, content):
                    return etag
                raise
            except (AccessRefused, FileNotFoundError):
                raise
            except OSError:  # a write that may have taken effect
                if etag := self._etag_of_same(key, content):
                    return etag
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    def _etag_of_same(self, key: str, content: bytes) -> str | None:
        """Return the etag of an object if it has this content."""
        import obstore

        with self._errors(key):
            try:
                answer = obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            found, etag = bytes(answer.bytes()), answer.meta["e_tag"]
        self._count(1, len(found))
        return quoted_etag(etag) if found == content else None

    def _put(self, key: str, content: bytes | Path, *, mode: Any, num_bytes: int) -> str:
        import obstore

        with self._errors(key, num_bytes=num_bytes):
            written = obstore.put(self._store, key, content, mode=mode, chunk_size=_PART_BYTES, max_concurrency=4)
        num_parts = -(-num_bytes // _PART_BYTES)
        self._count(1 if num_parts <= 1 or mode != "overwrite" else num_parts + 2, num_bytes)
        return quoted_etag(written["e_tag"])

    def _uncut(self, key: str, request: Callable[[], _T]) -> _T:
        """Return the answer of a request that can be repeated; repeat it if the body of the answer ends early."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                with self._errors(key):
                    return request()
            except CutAnswer:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    def _count(self, num_requests: int, num_bytes: int) -> None:
        with self._count_lock:
            self.num_requests += num_requests
            self.num_bytes += num_bytes

    def _errors(self, key: str, *, num_bytes: int = 0) -> AbstractContextManager[None]:
        return storage_errors(self.address, self.address_of(key), num_bytes=num_bytes)


def _num_requests(ranges: Sequence[tuple[int, int]]) -> int:
    """Return how many requests obstore makes of some ranges."""
    count, end = 0, None
    for offset, size in sorted(ranges):
        if end is None or offset - end > _GAP_BYTES:
            count, end = count + 1, offset + size
        else:
            end = max(end, offset + size)
    return count
