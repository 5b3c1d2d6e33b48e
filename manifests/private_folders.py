"""Folders below $TMPDIR that only their user can read: local copies of buckets and sources, and scratch space."""

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def private_root(purpose: str) -> Path:
    """Return where this user's folder for a purpose is; it may not exist."""
    # If $TMPDIR is unusable, gettempdir() silently returns another folder.
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"{purpose}-clipmill-{os.geteuid()}"


def open_private(folder: Path) -> int:
    """Make a private folder if it is missing, and return a descriptor of it, which can be locked.

    Raises:
        PermissionError: it is a link or a file, or others have rights in it.
        OSError: it cannot be made.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # another process has removed it since
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _not_private(folder) from None
            raise
        state = os.fstat(descriptor)
        if state.st_uid == os.geteuid() and not state.st_mode & 0o077:
            return descriptor
        os.close(descriptor)
        raise _not_private(folder)


def is_still_at(folder: Path, descriptor: int) -> bool:
    """Return whether an open folder still has this name, or has been removed and perhaps made anew."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _not_private(folder: Path) -> PermissionError:
    message = "not a private folder of this user (mode 0700); remove it, or set TMPDIR to another folder"
    return PermissionError(errno.EPERM, message, os.fspath(folder))
