"""Open and fingerprint sources, which are local files or remote objects, and convert errors to `SourceFailure`."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO

from clipmill.manifests.storage.mirrors import is_remote
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.timeline.model import TimelineError

if TYPE_CHECKING:
    from clipmill.manifests.storage.urls import Location
    from clipmill.prep.sources.remote import RemoteFile

    SourceBytes = BinaryIO | RemoteFile

STAT_LIMIT_S = 60.0  # timeout for a check or a fingerprint of one file
_FINGERPRINT_BYTES = 1 << 20
# Errors caused by the machine, not by the file. The next probe may succeed.
_MACHINE_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENODEV}
    | {errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
)


@dataclass(frozen=True)
class SourceFacts:
    """Properties of a source that the plan and the encoder need.

    Attributes:
        fingerprint: SHA-256 (hex) over the size and the first and last MiB.
        size_bytes: Size of the file.
        end_s: End of the last video frame in seconds from the container's start, as shown by players.
        fps: Frame rate in frames per second; the average if it varies.
        width: Display width in pixels, after rotation and with square pixels.
        height: Display height in pixels, after rotation and with square pixels.
        codec: Name of the codec in libav.
        key_gap_s: Longest time between two key frames in seconds; 0 if every seek lands on a key frame.
        num_audio: Number of audio streams.
        timeline: Timeline and shape of the video (`clipmill.shards.timeline.model.Timeline.to_json`).
        notes: Unusual properties of the video, one per line.
    """

    fingerprint: str
    size_bytes: int
    end_s: float
    fps: float
    width: int
    height: int
    codec: str
    key_gap_s: float
    num_audio: int = 0
    timeline: str = ""
    notes: str = ""


@dataclass(frozen=True)
class OpenSource:
    """A source that is open for reading.

    Attributes:
        size_bytes: Size of the source when it was opened.
        file: Content of the source.
        libav_input: Argument for libav: the `file:` URL of a local file, or a Python file object for a remote object.
    """

    size_bytes: int
    file: "SourceBytes"
    libav_input: "str | RemoteFile"


@contextmanager
def open_source(location: "Location", *, on_read: Callable[[], None] = lambda: None) -> Iterator[OpenSource]:
    """Open a source: a local path, or the URL of an object. Objects are read in ranges.

    Args:
        on_read: Function to call as a heartbeat, after each range that is read from an object.

    Raises:
        SourceFailure: source_missing, source_unreadable, access_refused, storage_refused, disk_full or io_error.
    """
    path = os.fspath(location)
    if is_remote(path):
        from clipmill.prep.sources.remote import RemoteFile

        file = RemoteFile(path, on_read=on_read)
        try:
            yield OpenSource(file.size_bytes, file, file)
        except SourceFailure:
            if file.failure is not None:  # libav mistook the failed read for the end of the file, or for damage
                raise file.failure from None
            raise
        if file.failure is not None:
            raise file.failure
        return
    try:
        state = os.stat(path)  # noqa: PTH116 - a location is not always a Path
        if not stat.S_ISREG(state.st_mode):  # opening a named pipe would block until something writes to it
            raise SourceFailure(FailureCode.SOURCE_UNREADABLE, "not a regular file")
        local_file = open(path, "rb")  # noqa: PTH123, SIM115 - closed below
    except (OSError, ValueError) as error:
        raise access_failure(error) from None
    with local_file:
        yield OpenSource(state.st_size, local_file, f"file:{path}")


def source_fingerprint(location: "Location") -> str:
    """Return the SHA-256 (hex) over a source's size and its first and last MiB.

    The fingerprint is cheap to compute even for hours of video, and does not depend on the source's name or storage.

    Raises:
        SourceFailure: See `open_source`.
    """
    with open_source(location) as source:
        return fingerprint_of(source)


def fingerprint_of(source: OpenSource) -> str:
    """Return the `source_fingerprint` of an open source."""
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
    """Return the failure for an error from looking up, opening or reading a source."""
    if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceFailure(FailureCode.SOURCE_MISSING, "no such file", is_lasting=False)
    code = FailureCode.IO_ERROR if error.errno == errno.EIO else FailureCode.SOURCE_UNREADABLE
    return SourceFailure(code, error.strerror or str(error), is_lasting=False)


def current_fingerprint(location: "Location") -> str:
    """Return `source_fingerprint`, with a timeout of `STAT_LIMIT_S`.

    Raises:
        SourceFailure: timeout, or any failure that `source_fingerprint` raises.
    """
    results: SimpleQueue[str | SourceFailure] = SimpleQueue()

    def read() -> None:
        try:
            results.put(source_fingerprint(location))
        except SourceFailure as failure:
            results.put(failure)

    Thread(target=read, daemon=True).start()
    try:
        result = results.get(timeout=STAT_LIMIT_S)
    except Empty:
        message = f"opening or reading timed out after {STAT_LIMIT_S:.0f} s"
        raise SourceFailure(FailureCode.TIMEOUT, message, is_lasting=False) from None
    if isinstance(result, SourceFailure):
        raise result
    return result


@contextmanager
def as_failure(code: FailureCode, what: str) -> Iterator[None]:
    """Convert an error from reading or decoding a video inside the block into a SourceFailure.

    Args:
        code: Code of the failure, unless the error has its own code.
        what: Description of the error, used as the start of the message.
    """
    import av.error

    try:
        yield
    except TimelineError as error:
        raise SourceFailure(FailureCode(error.code), str(error)) from None
    except MemoryError:
        message = f"{what}: memory limit exceeded"
        raise SourceFailure(FailureCode.OUT_OF_MEMORY, message, is_lasting=False) from None
    except (av.error.FFmpegError, OSError) as error:
        is_lasting = error.errno not in _MACHINE_ERRORS
        message = f"{what}: {error.strerror or error}"
        raise SourceFailure(code, message, is_lasting=is_lasting) from None
    except (ValueError, ArithmeticError) as error:  # PyAV cannot represent a time or size
        raise SourceFailure(code, f"{what}: {type(error).__name__}: {error}") from None
