"""Objects below an address such as `s3://bucket/folder`: the only interface to obstore (its errors: `errors.py`).

Credentials and endpoint come from the variables that the tools of each provider use (`clouds.py`).

Reading requests that fail in passing (5xx, 429, no answer, a body that ends early) are repeated by obstore for 90 s
with exponential backoff; a body is resumed where it ended. Those that change objects are in `changes.py`. obstore's
threads do not survive a fork: a process that has used this module must spawn its workers.
"""

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import naming, temporary_path
from clipmill.manifests.storage.changes import Changes, Guard, allow_always
from clipmill.manifests.storage.errors import AccessRefused as AccessRefused
from clipmill.manifests.storage.errors import Conflict, Unanswered, storage_errors
from clipmill.manifests.storage.listing import Listing, info_of
from clipmill.manifests.storage.listing import ObjectInfo as ObjectInfo
from clipmill.manifests.storage.stores import open_store, scheme_of

if TYPE_CHECKING:
    from clipmill.manifests.storage.s3_requests import OpenUpload

_STREAM_BYTES = 4 * 2**20
_GAP_BYTES = 256 * 2**10  # ranges with smaller gaps are one request


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
        self._followed = set[str]()  # keys whose redirects were checked
        self._store = open_store(self.address, scheme=self.scheme)
        self._changes = Changes(
            self.address, scheme=self.scheme, is_writable=self.is_writable, read=self.read_version, count=self._count
        )
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
        return self.read_version(key)[0]

    def read_version(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return the content of an object, and its size, version and time."""
        import obstore

        self._check_redirects(key)
        with self._errors(key):
            answer = obstore.get(self._store, key)
            content = bytes(answer.bytes())
        self._count(1, len(content))
        return content, info_of({**answer.meta, "path": key})

    def read_range(self, key: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of an object from `offset`; an OSError if it has fewer."""
        return self.read_ranges(key, [(offset, size)])[0]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ranges (offset, size) of an object, requested in parallel; neighbouring ranges in one request."""
        import obstore

        wanted = [(offset, size) for offset, size in ranges if size]
        if not wanted:
            return [b""] * len(ranges)
        self._check_redirects(key)
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

        self._check_redirects(key)
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
        from clipmill.manifests.storage.s3_requests import S3Requests

        if self.scheme == "s3":
            yield from S3Requests(self.address, self._store).open_uploads()

    def abort(self, upload: "OpenUpload") -> None:
        """Give up a multipart upload."""
        from clipmill.manifests.storage.s3_requests import S3Requests

        S3Requests(self.address, self._store).abort(upload)

    def fetch(self, key: str, path: Path) -> None:
        """Copy a whole object to `path`, which appears only when it is complete."""
        import obstore

        self._check_redirects(key)
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

    def write(
        self,
        key: str,
        content: bytes | Path,
        *,
        only_new: bool = False,
        replaces: str | None = None,
        guard: Guard = allow_always,
    ) -> str:
        """Write a whole object and return its etag; readers see the old object or the new one.

        A conditional write whose answer was lost is repeated, and then finds its own object: a conflict with an object
        of the same content is therefore no conflict.

        Args:
            content: bytes, or the path of a file.
            only_new: write only if the object does not exist.
            replaces: write only if the object still has this etag.
            guard: see `changes`.

        Raises:
            Conflict: the condition does not hold.
        """
        if not only_new and replaces is None:
            return self._changes.put(key, content, guard=guard)
        content = content if isinstance(content, bytes) else content.read_bytes()
        return self._changes.put_if(key, content, replaces=None if only_new else replaces, guard=guard)

    def replace(self, key: str, content: bytes, *, seen: ObjectInfo | None, old: Path, guard: Guard) -> str:
        """Write a record in place of the one that this process has seen, and return its etag.

        Args:
            seen: that record; None if there was none.
            old: local file with its content.

        Raises:
            Conflict: another process has written or removed it.
        """
        replaces = None if seen is None else seen.etag
        try:
            return self.write(key, content, only_new=seen is None, replaces=replaces, guard=guard)
        except Conflict as refused:
            guard()  # which says who has taken over a lock
            with suppress(FileNotFoundError):
                found, info = self.read_version(key)
                if seen is not None and found == old.read_bytes():
                    # Some servers name another etag in their answer to a write.
                    return self.write(key, content, replaces=info.etag, guard=guard)
            refused.strerror = "another command has written it meanwhile"
            raise

    def copy(self, source: str, target: str, *, guard: Guard = allow_always) -> None:
        """Copy an object within the bucket, without sending its content through this machine."""
        self._changes.copy(source, target, guard=guard)

    def delete(self, *keys: str, guard: Guard = allow_always) -> None:
        """Delete objects; those that do not exist are not an error."""
        self._changes.delete(keys, guard=guard)

    def _check_redirects(self, key: str) -> None:
        """Raise an OSError if a web server redirects to a host that may not be asked: obstore follows silently."""
        if self.is_writable or key in self._followed:
            return
        from clipmill.manifests.storage.web_hosts import redirect_problem

        problem = redirect_problem(self.address_of(quote(key)))
        if problem is not None:
            raise Unanswered(errno.EIO, problem, self.address_of(key))
        self._followed.add(key)

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
