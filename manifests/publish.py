"""Publishing files: a reader sees the old file or the whole new one, never a part.

Every durable file of the project is made under a temporary name in its own folder, flushed to the disk,
and renamed. A temporary name is `.tmp-<12 hex>-<name>`: what a killed process leaves tells what it was to become, and
is removed by the next one that holds the lock under which that file is written.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{12}}-(.+)", re.DOTALL)


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` when the block ends well, removes it otherwise."""
    temporary = temporary_path(path)
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    except OSError as error:
        if error.filename == os.fspath(temporary):  # which tells nobody anything
            error.filename = os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def publish_bytes(path: Path, content: bytes) -> None:
    """Publishes `content` as the file `path`."""
    with published(path) as temporary:
        temporary.write_bytes(content)


def publish_json(path: Path, value: Any) -> None:
    """Publishes `value` as JSON with sorted keys, so that equal values are equal bytes."""
    publish_bytes(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError of the block the name of `path` if it has none: reading, writing and flushing know no names."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_record(path: Path) -> bytes:
    """The content of a small file.

    Raises:
        OSError: it cannot be read, or is no regular file: to read a pipe may mean to wait for ever.
    """
    with naming(path), open(path, "rb", opener=_open_regular) as file:
        return file.read()


def require_regular(file: Path | int, *, path: Path) -> None:
    """Raises an OSError where a file or descriptor is a folder, a pipe, a socket or a device; `path` is its name."""
    mode = os.stat(file).st_mode  # noqa: PTH116 - of a descriptor too
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def _open_regular(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    try:
        require_regular(descriptor, path=Path(name))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def temporary_path(path: Path) -> Path:
    """A new temporary name beside `path`."""
    return path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}"


def target_of(name: str) -> str | None:
    """The name that a file with the temporary name `name` was to get; None where it is no temporary name."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


def remove_temporaries(folder: Path, *, of: Callable[[str], bool] = lambda target: True) -> None:
    """Removes the temporary files in `folder`; call it only under the lock that their writers hold.

    Args:
        of: says for the name that a file was to get whether it was one of those writers'.

    Raises:
        OSError: a file cannot be removed.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        target = target_of(path.name)
        if target is not None and of(target) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Waits until no other process holds `folder`, and holds it; the kernel lets go when this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flushes a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
