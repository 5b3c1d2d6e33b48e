"""Mount table of the local folders that mirror a folder in a bucket, like the kernel's table of mounted file systems.

`clipmill.manifests.publish` and `clipmill.shards.opening` call this module for every durable file that they write,
remove or open. This module does not access buckets. If no data folder or run is in a bucket, no other module of this
package is imported.

A mirror is mounted only by the process that opens a URL, and by each worker process, on this or another machine, before
its first task (`mounting.py`, `Mirror.access`).
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Protocol

from clipmill.manifests.errors import UserError, folder_in_place

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
_MISTYPED = re.compile(r"(s3|gs|az|abfs|https?)(?::/(?!/)|//)(.*)", re.DOTALL)


class Mirror(Protocol):
    """A local folder whose files represent the objects under a URL; see `working_copy.WorkingCopy`."""

    folder: Path
    address: str

    @property
    def is_empty(self) -> bool:
        """True if there are no objects under the URL. Lists the bucket unless this command has already done so."""

    def upload(self, temporary: Path, path: Path) -> None:
        """Upload `temporary` as the object of `path`, then replace `path` with it."""

    def upload_growing(self, path: Path) -> None:
        """Upload a growing file, if it exists and has changed since the last call."""

    def move(self, source: Path, target: Path) -> None:
        """Copy the objects of the file or folder `source` to `target`, then delete them; local files do not change."""

    def remove(self, *paths: Path) -> None:
        """Delete the objects of files and of folders."""

    def abort_uploads(self, folder: Path) -> None:
        """Abort unfinished uploads of killed processes to a folder, as far as they can be listed."""

    def touch(self, path: Path) -> None:
        """Rewrite an object, so that it is newer than all other objects."""

    def state(self, path: Path) -> tuple[int, int]:
        """Return the size in bytes and the modification time in nanoseconds of an object."""

    def read_range(self, path: Path, offset: int, size: int) -> bytes:
        """Read a range of an object, without a local copy."""

    def is_away(self, path: Path) -> bool:
        """Return True if the content of a durable file is only in the bucket."""

    def open(self, path: Path) -> int | None:
        """Return a file descriptor if the content is only in the bucket; None if the local file is complete."""

    def drop_content(self) -> None:
        """Discard the local content of all objects, so that later reads use the bucket."""

    def local_copy(self, path: Path) -> AbstractContextManager[None]:
        """Context manager that keeps the content of a file on local disk."""

    def folder_lock(self) -> AbstractContextManager[None]:
        """Context manager that holds the lock of the data folder and refreshes its records first."""

    def column_lock(
        self,
        name: str,
        *,
        unless: re.Pattern[str] | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> AbstractContextManager[None]:
        """Context manager that holds the lock of a column, or of a run; the lock is the object `name`.

        It raises LeaseHeld if another command holds that lock, or a lock whose name matches `unless`. With `on_wait`,
        which is called with the name of the holder, it waits until a lock that its holder does not renew has expired.
        """

    def lock_names(self) -> list[str]:
        """Return the names of all locks in the last listing."""

    @property
    def access(self) -> tuple[str, ...]:
        """Arguments that a worker needs to mount the same URL, including the locks that protect its writes."""

    def join(self, access: tuple[str, ...]) -> None:
        """Write only while another process, with the given `access`, holds its locks. The locks are checked now.

        Raises:
            LeaseLost: That process does not hold the locks in this bucket.
        """

    def publish_token(self, path: Path) -> None:
        """Upload a temporary file as an object, for workers on other nodes. Other temporary files have no object."""

    def require_locks(self) -> None:
        """Raise LeaseLost if another command may have taken over one of this command's locks."""

    def holder_of(self, name: str) -> str | None:
        """Return the name of the holder of a column's lock and the time it was acquired; None if the lock is free."""

    def refresh(self, folder: Path) -> None:
        """Update the local files of a folder to match the bucket."""


_mounted: dict[str, Mirror] = {}  # mounted mirrors by local folder


def is_remote(address: str) -> bool:
    """Return True for a URL (`s3://bucket/folder`), False for a local path."""
    return _ADDRESS.fullmatch(address) is not None


def require_not_mistyped(text: str) -> None:
    """Raise a UserError for a URL without its colon or a slash, which would be interpreted as a local path."""
    if match := _MISTYPED.fullmatch(text):
        raise UserError(
            f"{text} is not a URL: it lacks a colon or a slash after {match[1]}",
            hint=f"use {match[1]}://{match[2]} for a URL, or ./{text} for a local path",
        )


def mount(mirror: Mirror) -> None:
    """Register a mirror, so that files below its folder represent its objects until this process ends."""
    _mounted[os.fspath(mirror.folder)] = mirror


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror that a path belongs to, or None."""
    if not _mounted:
        return None
    text = os.fspath(path)
    for folder, mirror in _mounted.items():
        if text == folder or text.startswith(folder + "/"):
            return mirror
    return None


def refresh(folder: Path) -> None:
    """Update a local folder to match the bucket that it mirrors; do nothing for other folders."""
    if (mirror := mirror_of(folder)) is not None:
        mirror.refresh(folder)


def require_locks(folder: Path) -> None:
    """Raise LeaseLost if another command may have taken over one of this command's locks in a bucket."""
    if (mirror := mirror_of(folder)) is not None:
        mirror.require_locks()


@contextmanager
def local_copy(path: Path) -> Iterator[None]:
    """Context manager that keeps the content of a file in a bucket on the local disk."""
    mirror = mirror_of(path)
    with nullcontext() if mirror is None else mirror.local_copy(path):
        yield


def is_away(path: Path) -> bool:
    """Return True if the content of a durable file is only in a bucket, so that opening it fetches the object."""
    mirror = mirror_of(path)
    return mirror is not None and mirror.is_away(path)


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Read a byte range of a file in a bucket without making a local copy.

    Raises:
        OSError: The object cannot be read, or ends before the range does.
    """
    mirror = mirror_of(path)
    assert mirror is not None
    return mirror.read_range(path, offset, size)


def file_state(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the modification time in nanoseconds of a durable file or its object.

    Raises:
        FileNotFoundError: The file does not exist.
        IsADirectoryError: The path is a folder.
    """
    if (mirror := mirror_of(path)) is not None:
        return mirror.state(path)
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        raise folder_in_place(path)
    return state.st_size, state.st_mtime_ns


def set_modified_time(path: Path, *, time_ns: int) -> None:
    """Set the modification time of a file. An object is rewritten instead, which makes it the newest object.

    Raises:
        OSError: The file or the bucket is not writable.
    """
    if (mirror := mirror_of(path)) is not None:
        mirror.touch(path)
    else:
        os.utime(path, ns=(time_ns, time_ns))


def show_addresses(text: str) -> str:
    """Replace the local folders of mirrors with their URLs in human-readable text."""
    for folder, mirror in _mounted.items():
        # A digit that follows would belong to the name of a different folder, such as host-10 for host-1.
        text = re.sub(rf"{re.escape(folder)}(?!\d)", mirror.address.replace("\\", r"\\"), text)
    return text


class AddressStream:
    """Text stream that shows URLs instead of the local folders that mirror them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, with URLs instead of local folders, and return its length."""
        self._stream.write(show_addresses(text) if _mounted else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
