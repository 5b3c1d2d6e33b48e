"""Mount table of this process: the local folders that mirror folders in buckets.

`clipmill.manifests.publish` and `clipmill.shards.opening` call this module for each durable file that they write,
remove or open. The module does not access buckets, and imports no other module of this package. Therefore, it costs
little if all folders are local.

A mirror is mounted by the process that opens a URL, and by each of its workers, on any machine, before the worker's
first task (`mounting.py`, `Mirror.access`).
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Protocol

from clipmill.manifests.errors import UserError, not_a_file_error

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
_MISTYPED = re.compile(r"(s3|gs|az|abfs|https?)(?::/(?!/)|//)(.*)", re.DOTALL)


class Mirror(Protocol):
    """Local folder whose files represent the objects under a URL; implemented by `working_copy.WorkingCopy`."""

    folder: Path
    url: str

    @property
    def is_empty(self) -> bool:
        """True unless there are visible objects under the URL. The bucket is listed if it has not been listed yet."""

    def upload(self, temporary: Path, path: Path) -> None:
        """Upload the file `temporary` as the object for `path`. The caller renames the file afterwards."""

    def upload_growing(self, path: Path) -> None:
        """Upload a growing file if it exists and has changed since the last call."""

    def move(self, source: Path, target: Path) -> None:
        """Copy the objects of a file or folder to `target`, and delete the old objects. Local files stay in place."""

    def remove(self, *paths: Path) -> None:
        """Delete the objects of files and folders. Local files stay in place."""

    def abort_uploads(self, folder: Path) -> None:
        """Abort the uploads that killed processes left unfinished in a folder, if the server can list uploads."""

    def touch(self, path: Path) -> None:
        """Rewrite an object, so that it is newer than all other objects."""

    def state(self, path: Path) -> tuple[int, int]:
        """Return the size of an object in bytes, and its modification time in nanoseconds since the epoch."""

    def read_range(self, path: Path, offset: int, size: int) -> bytes:
        """Read a range of bytes from an object, without a local copy."""

    def is_only_in_bucket(self, path: Path) -> bool:
        """Return True if the content of a durable file is only in the bucket."""

    def open(self, path: Path) -> int | None:
        """Open a file whose content is only in the bucket, and return a descriptor. Return None for local files.

        A file other than a shard or a part of a checkpoint becomes a local file, so None is returned for it as well.
        """

    def drop_content(self) -> None:
        """Discard the local content of all objects, so that the next reads use the bucket."""

    def local_copy(self, path: Path) -> AbstractContextManager[None]:
        """Context manager that keeps the content of a file on the local disk."""

    def folder_lock(self) -> AbstractContextManager[None]:
        """Context manager that holds the lock of the data folder, and updates the folder's records on entry."""

    def column_lock(
        self,
        name: str,
        *,
        conflicting_locks: re.Pattern[str] | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> AbstractContextManager[None]:
        """Context manager that holds the lock of a column or a run.

        Args:
            name: Key of the lock.
            conflicting_locks: Pattern for the names of other locks, which no other command may hold.
            on_wait: Function that is called once with the name of the holder. If `on_wait` is set, and the holder no
                longer renews the lock, wait until the lock expires.

        Raises:
            LeaseHeld: Another command holds the lock, or a lock whose name matches `conflicting_locks`.
        """

    def lock_names(self) -> list[str]:
        """Return the names of all locks in the last listing of the data folder, both held and released."""

    @property
    def access(self) -> tuple[str, ...]:
        """Strings that a worker needs to mount the same URL, including keys and tokens of the command's locks."""

    def join(self, access: tuple[str, ...]) -> None:
        """Allow this process to write only while the process with the given `access` holds its locks.

        Raises:
            LeaseLost: The other process does not hold the locks in this bucket.
        """

    def publish_token(self, path: Path) -> None:
        """Upload a temporary file, so that workers on other nodes can read it. Other temporary files stay local."""

    def require_locks(self) -> None:
        """Raise LeaseLost if another command may have taken over one of this command's locks."""

    def holder_of(self, name: str) -> str | None:
        """Return the holder of a lock and the time of acquisition as text, or None if the lock is free."""

    def refresh(self, folder: Path) -> None:
        """Update the local files of a folder to match the bucket."""


_mounted: dict[str, Mirror] = {}  # mounted mirrors by local folder


def is_remote(url: str) -> bool:
    """Return True for a URL such as `s3://bucket/folder`, and False for a local path."""
    return _URL.fullmatch(url) is not None


def reject_mistyped_url(text: str) -> None:
    """Raise UserError for a URL that lacks the colon or a slash, and would otherwise be used as a local path."""
    if match := _MISTYPED.fullmatch(text):
        raise UserError(
            f"{text} is not a URL: it lacks a colon or a slash after {match[1]}",
            hint=f"use {match[1]}://{match[2]} for a URL, or ./{text} for a local path",
        )


def mount(mirror: Mirror) -> None:
    """Register a mirror. Until this process ends, files in the folder of the mirror represent objects."""
    _mounted[os.fspath(mirror.folder)] = mirror


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror that a path belongs to, or None if the path is not in a mirror."""
    if not _mounted:
        return None
    text = os.fspath(path)
    for folder, mirror in _mounted.items():
        if text == folder or text.startswith(folder + "/"):
            return mirror
    return None


def refresh(folder: Path) -> None:
    """Update a folder to match the bucket that it mirrors. Do nothing for a folder that does not mirror a bucket."""
    if (mirror := mirror_of(folder)) is not None:
        mirror.refresh(folder)


def require_locks(folder: Path) -> None:
    """Raise LeaseLost if another command may have taken over one of this command's locks in the bucket."""
    if (mirror := mirror_of(folder)) is not None:
        mirror.require_locks()


@contextmanager
def local_copy(path: Path) -> Iterator[None]:
    """Context manager that keeps the content of a file in a bucket on the local disk."""
    mirror = mirror_of(path)
    with nullcontext() if mirror is None else mirror.local_copy(path):
        yield


def is_only_in_bucket(path: Path) -> bool:
    """Return True if the content of a durable file is only in a bucket, so that opening the file fetches the object."""
    mirror = mirror_of(path)
    return mirror is not None and mirror.is_only_in_bucket(path)


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Read a range of bytes from a file in a bucket, without a local copy.

    Raises:
        OSError: The object cannot be read, or ends within the range.
    """
    mirror = mirror_of(path)
    assert mirror is not None
    return mirror.read_range(path, offset, size)


def file_state(path: Path) -> tuple[int, int]:
    """Return the size of a durable file or its object in bytes, and the modification time in nanoseconds.

    Raises:
        FileNotFoundError: The file does not exist.
        IsADirectoryError: The path is a folder.
    """
    if (mirror := mirror_of(path)) is not None:
        return mirror.state(path)
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        raise not_a_file_error(path)
    return state.st_size, state.st_mtime_ns


def set_modified_time(path: Path, *, time_ns: int) -> None:
    """Set the modification time of a file. An object is rewritten instead, so that it becomes the newest object.

    Raises:
        OSError: The file or the bucket is not writable.
    """
    if (mirror := mirror_of(path)) is not None:
        mirror.touch(path)
    else:
        os.utime(path, ns=(time_ns, time_ns))


def show_urls(text: str) -> str:
    """Replace the local folders of mirrors with their URLs in text that is shown to users."""
    for folder, mirror in _mounted.items():
        # A digit that follows belongs to the name of a different folder: host-10 is not host-1.
        text = re.sub(rf"{re.escape(folder)}(?!\d)", mirror.url.replace("\\", r"\\"), text)
    return text


class UrlStream:
    """Text stream that writes to another stream, with URLs in place of the local folders of mirrors."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` with URLs in place of local folders, and return the length of `text`."""
        self._stream.write(show_urls(text) if _mounted else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
