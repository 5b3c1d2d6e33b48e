"""Requests that change objects: written, copied and deleted.

The right to change an object may end while the request is under way: the lock that a command holds in the bucket is a
lease (`leases.py`), and a network that drops packets can hold a request back for minutes. So

- each attempt of a request asks its guard first, which raises an error if the right has ended, or may end within
  `stores.WRITE_LIMIT_S`. An attempt has ended by then. obstore repeats nothing for longer than that;
- a record is written under the condition that it is the one that the writer has seen (`put_if`), so that a request that
  the network delivers late is refused once another process has replaced the record.

An attempt that fails in passing (5xx, 429, no answer) is repeated for `RETRY_S`.
"""

import errno
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.storage.clouds import cloud_of
from clipmill.manifests.storage.errors import Conflict, NoAnswer, storage_errors
from clipmill.manifests.storage.listing import ObjectInfo, quoted_etag
from clipmill.manifests.storage.stores import RETRY_S, open_store
from clipmill.manifests.storage.waiting import watch_request

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
_NUM_BATCHES = 20  # of deletions that obstore sends at once

PART_BYTES = 8 * 2**20  # larger objects are uploaded in parts of this size
Guard = Callable[[], object]  # raises an error if objects must not be changed any more
_T = TypeVar("_T")


def allow_always() -> None:
    """Guard of objects that belong to no lock."""


class Changes:
    """The changing requests of `Objects`, whose methods say what they do and raise. Thread-safe.

    Args:
        is_writable: False for a web server, to which no request is sent.
        read: return content and version of an object.
        count: called with the number of requests that have been made, and of bytes sent.
    """

    def __init__(
        self,
        address: str,
        *,
        scheme: str,
        is_writable: bool,
        read: Callable[[str], tuple[bytes, ObjectInfo]],
        count: Callable[[int, int], object],
    ) -> None:
        self._address, self._scheme, self._read, self._count = address, scheme, read, count
        self._store: Any = open_store(address, scheme=scheme, is_written=True) if is_writable else None

    def put(self, key: str, content: bytes | Path, *, guard: Guard, mode: Any = "overwrite") -> str:
        """Write an object and return its etag."""
        num_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        num_parts = 1 if mode != "overwrite" else -(-num_bytes // PART_BYTES)
        written = self._repeat(key, lambda: self._put_once(key, content, mode=mode), guard, num_bytes=num_bytes)
        self._count(1 if num_parts <= 1 else num_parts + 2, num_bytes)
        return quoted_etag(written["e_tag"])

    def put_if(self, key: str, content: bytes, *, replaces: str | None, guard: Guard) -> str:
        """Write an object that does not exist (None), or that has the etag `replaces`; return the new etag.

        Raises:
            Conflict: another writer was faster. If that was an earlier attempt of this one, it has succeeded.
        """
        try:
            mode: Any = "create"
            if replaces is not None:
                mode = self._repeat(key, lambda: self._precondition(key, replaces), guard)
            return self.put(key, content, guard=guard, mode=mode)
        except FileNotFoundError:
            raise self._conflict(key) from None
        except (Conflict, NoAnswer):
            if etag := self._etag_of_same(key, content):
                return etag
            raise

    def copy(self, source: str, target: str, *, guard: Guard) -> None:
        """Copy an object."""
        import obstore

        self._repeat(source, lambda: obstore.copy(self._store, source, target), guard)
        self._count(1, 0)

    def delete(self, keys: Sequence[str], *, guard: Guard) -> None:
        """Delete objects."""
        import obstore

        per_request = cloud_of(self._address).num_deleted
        self._count(-(-len(keys) // per_request), 0)
        num_at_once = per_request * _NUM_BATCHES
        for begin in range(0, len(keys), num_at_once):
            some = list(keys[begin : begin + num_at_once])
            try:
                self._repeat(some[0], partial(obstore.delete, self._store, some), guard)
            except FileNotFoundError:  # one is missing (Azure, Google); whether the others are gone is unknown
                for key in some if len(some) > 1 else ():
                    self.delete([key], guard=guard)

    def _put_once(self, key: str, content: bytes | Path, *, mode: Any) -> Any:
        import obstore

        return obstore.put(self._store, key, content, mode=mode, chunk_size=PART_BYTES, max_concurrency=4)

    def _precondition(self, key: str, etag: str) -> Any:
        """Return obstore's condition that an object still has an etag; Google compares generations instead."""
        import obstore

        if self._scheme != "gs":
            return {"e_tag": etag}
        found = obstore.head(self._store, key)
        self._count(1, 0)
        if quoted_etag(found["e_tag"]) != etag:
            raise self._conflict(key)
        return {"e_tag": etag, "version": found["version"]}

    def _etag_of_same(self, key: str, content: bytes) -> str | None:
        """Return the etag of an object if it has this content."""
        try:
            found, info = self._read(key)
        except FileNotFoundError:
            return None
        return info.etag if found == content else None

    def _repeat(self, key: str, request: Callable[[], _T], guard: Guard, *, num_bytes: int = 0) -> _T:
        """Return the answer of a request; repeat it while it fails in passing, and the guard allows it."""
        if self._store is None:
            raise UserError(
                f"{self._address} is read-only: objects can be written to s3://, gs:// and az://",
                hint="give an address of a bucket",
            )
        end_s, pause_s = time.monotonic() + RETRY_S, _FIRST_PAUSE_S
        with watch_request(self._address, num_bytes=num_bytes):
            while True:
                guard()
                try:
                    with storage_errors(self._address, f"{self._address}/{key}", num_bytes=num_bytes):
                        return request()
                except NoAnswer:
                    if time.monotonic() > end_s:
                        raise
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _conflict(self, key: str) -> Conflict:
        return Conflict(errno.EEXIST, "another writer was faster", f"{self._address}/{key}")
