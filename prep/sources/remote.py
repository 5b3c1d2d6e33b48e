"""Sources in object storage and on web servers: request their sizes and modification times, and read ranges of them.

A source is read through a `RemoteFile`. Its fingerprint, probe and shots are the same as for a local file with the same
content. libav also reads through the `RemoteFile`, and never opens a connection itself. Only the encoder needs a local
copy (`clipmill.prep.video.staging`).
"""

import errno
import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import PurePosixPath

from clipmill.manifests.errors import StorageRefused, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.objects import AccessRefused, ObjectInfo, Objects, open_objects
from clipmill.manifests.storage.stores import AccessDenied
from clipmill.manifests.storage.urls import is_web, mask_secrets, split_url
from clipmill.prep.core.failures import REFUSALS, FailureCode, SourceFailure, refusal_code

_MIB = 1 << 20
_FIRST_BYTES = 256 << 10  # size of the first read at a new position; doubles with each read that continues there
_MAX_BYTES = 8 * _MIB  # maximum size of a read
_CACHE_BYTES = 24 * _MIB  # maximum total size of the blocks that a file caches
_SMALL_BYTES = 2 * _MIB  # maximum size of a file that is read in one request
_NUM_REQUESTS = 32  # number of parallel requests for the size and modification time of single objects
# A listing ends after _MAX_LISTED_PER_KEY objects for each requested key, but never before _MIN_LISTED objects.
_MAX_LISTED_PER_KEY = 10
_MIN_LISTED = 2000
_MAX_FAILED = 64  # after this many consecutive requests without a response, no further requests are sent
_NS = 1_000_000_000

_State = tuple[int, int] | SourceFailure  # result of `object_state`, or the reason why it is unknown


def objects_of(url: str) -> tuple[Objects, str]:
    """Return (bucket or web host of a URL, key of the object). Each bucket or host is opened once per process.

    Raises:
        UserError: The URL is not supported.
    """
    root, key = split_url(url)
    return _open_bucket(root, os.getpid()), key


@lru_cache(maxsize=64)
def _open_bucket(root: str, _process: int) -> Objects:
    return open_objects(root)


@contextmanager
def as_source_failure() -> Iterator[None]:
    """Convert errors from object storage to temporary failures of a source.

    Raises:
        SourceFailure: source_missing, source_unreadable, access_refused, storage_refused, disk_full or io_error.
    """
    try:
        yield
    except FileNotFoundError:
        raise SourceFailure(FailureCode.SOURCE_MISSING, "no such object", is_lasting=False) from None
    except StorageRefused as error:
        message = mask_secrets(str(error).rpartition(": ")[2])
        raise SourceFailure(refusal_code(error), message, is_lasting=False) from None
    except UserError as error:
        raise SourceFailure(FailureCode.SOURCE_MISSING, mask_secrets(str(error)), is_lasting=False) from None
    except OSError as error:
        message = mask_secrets(error.strerror or str(error))
        if "Range request not supported" in message:
            message = "the web server does not support range requests"
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, message, is_lasting=False) from None
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = FailureCode.DISK_FULL if is_full else FailureCode.IO_ERROR
        raise SourceFailure(code, message, is_lasting=False) from None


def object_state(info: ObjectInfo) -> tuple[int, int]:
    """Return (size in bytes, time of the last write in ns). If the content changes, so does at least one of the values.

    Object storage reports the time in whole seconds. The nanoseconds are a digest of the ETag, so that an object that
    is replaced twice within a second counts as changed.
    """
    digest = int.from_bytes(hashlib.sha256(info.etag.strip('"').encode()).digest()[:8], "big") % _NS
    return info.size_bytes, int(info.modified_s) * _NS + digest


def source_state(objects: Objects, key: str) -> tuple[int, int]:
    """Return the `object_state` of a source. For the errors, see `Objects`."""
    try:
        return object_state(objects.info(key))
    except FileNotFoundError:
        objects.read_range(key, 0, 1)  # this error distinguishes a missing bucket from a missing object
        raise


def remote_states(urls: list[str]) -> Iterator[tuple[int, _State]]:
    """Yield the row of each URL and its `object_state` or failure, in any order.

    The common folder of the sources in a bucket is listed, with a thousand objects per request. Each source that is not
    in the listing, and each source on a web server, takes a separate request.

    Raises:
        UserError: A bucket does not exist or refuses the credentials, or a server refuses all sources.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for row, url in enumerate(urls):
        root, key = split_url(url)
        groups.setdefault(root, {}).setdefault(key, []).append(row)
    for root, rows in groups.items():
        objects = _open_bucket(root, os.getpid())
        states: dict[str, _State] = {}
        if not is_web(root):
            states.update(_list_states(objects, set(rows)))
        unlisted_keys = [key for key in rows if key not in states]
        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            states.update(zip(unlisted_keys, pool.map(_StateReader(objects), unlisted_keys), strict=True))
        failures = [state for state in states.values() if isinstance(state, SourceFailure)]
        refusals = [failure for failure in failures if failure.code in REFUSALS]
        if len(refusals) == len(states) and (len(states) > 1 or len(groups) == 1):
            raise StorageRefused(
                f"{mask_secrets(root)}: {refusals[0].message} for all {count_noun(len(states), 'source')}",
                hint="check the credentials and their permissions, and run the same command again",
            )
        for key, state in states.items():
            yield from ((row, state) for row in rows[key])


def _list_states(objects: Objects, keys: set[str]) -> Iterator[tuple[str, _State]]:
    """Yield (key, state) for the `keys` in a listing of their common folder; nothing if listing is not allowed.

    If the server does not respond, every key gets the same failure.

    Raises:
        UserError: The bucket does not exist, or refuses the credentials.
    """
    if len(keys) == 1:
        return
    folder = os.path.commonpath([key.rpartition("/")[0] for key in keys])
    max_objects = max(_MIN_LISTED, _MAX_LISTED_PER_KEY * len(keys))
    try:
        for info in islice(objects.list(folder), max_objects):
            if info.key in keys:
                yield info.key, object_state(info)
    except AccessDenied:
        return
    except AccessRefused:
        raise
    except OSError as error:
        failure = SourceFailure(FailureCode.IO_ERROR, mask_secrets(error.strerror or str(error)), is_lasting=False)
        yield from ((key, failure) for key in keys)


class _StateReader:
    """Callable that requests the `object_state` of an object.

    After many consecutive requests without a response, no further requests are sent, because each of a million objects
    would take many seconds to time out.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._num_failed = 0  # number of consecutive requests without a response
        self._last_failure: SourceFailure | None = None

    def __call__(self, key: str) -> _State:
        if self._last_failure is not None and self._num_failed >= _MAX_FAILED:
            return self._last_failure
        try:
            with as_source_failure():
                state = object_state(self._objects.info(key))
        except SourceFailure as failure:
            is_broken = failure.code == FailureCode.IO_ERROR
            self._num_failed, self._last_failure = (self._num_failed + 1, failure) if is_broken else (0, None)
            return failure
        self._num_failed = 0
        return state


class RemoteFile(io.RawIOBase):
    """Seekable, read-only file over an object. Recently read blocks are cached.

    A read at a new position requests 256 KiB. If reading continues there, the request size doubles up to 8 MiB.
    Therefore neither reading the index at the end of a long video nor demuxing the complete video takes many requests.

    Attributes:
        name: File name, from which libav guesses raw formats.
        size_bytes: Size of the object when it was opened.
        failure: Failure of a read; None if all reads succeeded. libav may mistake this failure for the end of the file.

    Raises:
        SourceFailure: See `as_source_failure`; also raised by `read`.
    """

    def __init__(self, url: str, *, on_read: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        with as_source_failure():
            self._objects, self._key = objects_of(url)
            self.size_bytes, self.modified_ns = source_state(self._objects, self._key)
        self.name = PurePosixPath(self._key).name
        self.failure: SourceFailure | None = None
        self._on_read = on_read
        self._position = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # offset -> content, the most recently used block last
        self._next_offset, self._next_bytes = -1, _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size_bytes}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes from the current position; fewer only at the end of the object."""
        end = self.size_bytes if size < 0 else min(self._position + size, self.size_bytes)
        parts = []
        while self._position < end:
            if self.failure is not None:
                raise self.failure
            begin, content = self._block(end)
            parts.append(content[self._position - begin : end - begin])
            self._position += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, end: int) -> tuple[int, bytes]:
        """Return the offset and the content of the block that contains the current position.

        A block that is not cached is read at least up to `end`, unless this exceeds the maximum size of a read.
        """
        offset = self._position
        for begin, content in self._blocks.items():
            if begin <= offset < begin + len(content):
                self._blocks.move_to_end(begin)
                return begin, content
        if self.size_bytes <= _SMALL_BYTES:
            offset, num_bytes = 0, self.size_bytes
        else:
            num_bytes = min(2 * self._next_bytes, _MAX_BYTES) if offset == self._next_offset else _FIRST_BYTES
            self._next_bytes = num_bytes
            # A read ends where a cached block begins, so that no byte is fetched twice.
            next_block = min((begin for begin in self._blocks if begin > offset), default=self.size_bytes)
            num_bytes = min(max(num_bytes, min(end - offset, _MAX_BYTES)), next_block - offset)
        try:
            with as_source_failure():
                content = self._objects.read_range(self._key, offset, num_bytes)
        except SourceFailure as failure:
            self.failure = failure
            raise
        self._on_read()
        self._next_offset = offset + num_bytes
        self._blocks[offset] = content
        while sum(map(len, self._blocks.values())) > _CACHE_BYTES:
            self._blocks.popitem(last=False)
        return offset, content
