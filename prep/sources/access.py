"""Access to a source, a local file or an object: opening it, its fingerprint, and the failure if it is inaccessible."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.urls import Place
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.sources.remote import RemoteFile

_FINGERPRINT_BYTES = 1 << 20
SourceBytes = BinaryIO | RemoteFile


@dataclass(frozen=True)
class OpenSource:
    """A source that is open for reading.

    Attributes:
        size_bytes: its size when it was opened.
        file: its content.
        for_libav: what libav opens: the path of a local file, or an object as a Python file.
    """

    size_bytes: int
    file: SourceBytes
    for_libav: str | RemoteFile


@contextmanager
def open_source(place: Place, *, on_read: Callable[[], None] = lambda: None) -> Iterator[OpenSource]:
    """Open a source: a local path, or the URL of an object, which is read by ranges.

    Args:
        on_read: called for every range of an object that is read, as a heartbeat.

    Raises:
        SourceFailure: source_missing, source_unreadable, access_refused or io_error.
    """
    path = os.fspath(place)
    if is_remote(path):
        file = RemoteFile(path, on_read=on_read)
        try:
            yield OpenSource(file.size_bytes, file, file)
        except SourceFailure:
            if file.failure is not None:  # libav took it for the end of the file, or for damage
                raise file.failure from None
            raise
        if file.failure is not None:
            raise file.failure
        return
    try:
        state = os.stat(path)  # noqa: PTH116 - not every place is a Path
        if not stat.S_ISREG(state.st_mode):  # opening a named pipe would block until something writes to it
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "not a regular file")
        local = open(path, "rb")  # noqa: PTH123, SIM115 - closed below
    except (OSError, ValueError) as error:
        raise access_failure(error) from None
    with local:
        yield OpenSource(state.st_size, local, f"file:{path}")


def source_fingerprint(place: Place) -> str:
    """Return the SHA-256 (hex) over a source's size and its first and last MiB.

    This is cheap even for hours of video, and independent of the source's name and storage.

    Raises:
        SourceFailure: source_missing, source_unreadable or io_error.
    """
    with open_source(place) as source:
        return fingerprint_of(source)


def fingerprint_of(source: OpenSource) -> str:
    """Return `source_fingerprint` of a source that is open."""
    file, size_bytes = source.file, source.size_bytes
    digest = hashlib.sha256(str(size_bytes).encode())
    try:
        file.seek(0)
        digest.update(file.read(_FINGERPRINT_BYTES) or b"")
        if size_bytes > _FINGERPRINT_BYTES:
            file.seek(max(_FINGERPRINT_BYTES, size_bytes - _FINGERPRINT_BYTES))
            digest.update(file.read(_FINGERPRINT_BYTES) or b"")
    except (OSError, ValueError) as error:
        raise access_failure(error) from None
    return digest.hexdigest()


def access_failure(error: OSError | ValueError) -> SourceFailure:
    """Return the failure for an error raised while looking up or opening a source."""
    if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceFailure(FailureCode.SOURCE_MISSING, "no such file", is_lasting=False)
    code = FailureCode.IO_ERROR if error.errno == errno.EIO else FailureCode.SOURCE_UNREADABLE
    return SourceFailure(code, error.strerror or str(error), is_lasting=False)
