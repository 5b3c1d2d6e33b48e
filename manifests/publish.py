"""Write files atomically: a reader sees either the old file or the complete new file.

Every durable file is first written under a temporary name in its final folder, then flushed to disk and renamed. The
temporary name has the form `.tmp-<12 hex digits>-<name>`, so it shows which file was being written when a process was
killed. The next process that holds the lock for that file removes the temporary file.

If the data folder is in a bucket, a file is uploaded before it appears in the local folder, and deleted from the bucket
before the local file is removed (`clipmill.manifests.storage.mirrors`).

JSON records can be published with a checksum, which is verified when a record is read.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import not_a_file_error
from clipmill.manifests.storage.mirrors import mirror_of

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{12}}-(.+)", re.DOTALL)


@contextmanager
def publish_atomically(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path and renames the file written there to `path`.

    If the block fails, the temporary file is removed.
    """
    temporary = temporary_path(path)
    try:
        with tag_errors(path):
            yield temporary
            sync(temporary)
            replace(temporary, path)
    except OSError as error:
        if error.filename == os.fspath(temporary):  # the temporary name would mean nothing to the user
            error.filename = os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def replace(temporary: Path, path: Path) -> None:
    """Rename a temporary file, which must be complete and flushed to disk, to `path`."""
    if path.is_dir():
        raise not_a_file_error(path)
    if (mirror := mirror_of(path)) is not None:
        mirror.upload(temporary, path)
    temporary.replace(path)
    sync(path.parent)


def rename(source: Path, target: Path) -> Path:
    """Rename a file or folder, and return `target`. Both paths must have the same parent folder."""
    mirror = mirror_of(source)
    if mirror is not None:
        mirror.move(source, target)
    new_path = source.rename(target)
    sync(target.parent)
    return new_path


def remove(*paths: Path) -> None:
    """Remove files of one data folder or run, ignoring missing files. For a bucket, this sends only a few requests.

    Raises:
        OSError: A file cannot be removed. Other files may remain as well.
    """
    if paths and (mirror := mirror_of(paths[0])) is not None:
        mirror.remove(*paths)
    for path in paths:
        path.unlink(missing_ok=True)


def publish_bytes(path: Path, content: bytes) -> None:
    """Write `content` to the file `path` atomically."""
    with publish_atomically(path) as temporary:
        temporary.write_bytes(content)


def publish_json(path: Path, value: Any) -> None:
    """Write `value` to the file `path` atomically as JSON with sorted keys; equal values give identical bytes."""
    publish_bytes(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


@contextmanager
def tag_errors(path: Path) -> Iterator[None]:
    """Context manager that adds `path` to an OSError without a path, such as an error from a read, write or flush."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_record(path: Path) -> bytes:
    """Read a small regular file. Other files are rejected, because reading from a pipe could block forever.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with tag_errors(path), open(path, "rb", opener=_open_regular) as file:
        return file.read()


def require_regular(file: Path | int, *, path: Path) -> None:
    """Raise an error if a file is not a regular file.

    Args:
        file: Path or descriptor of the file.
        path: Path to report in the error.

    Raises:
        OSError: The file is a folder, a pipe, a socket or a device.
    """
    mode = os.stat(file).st_mode  # noqa: PTH116 - os.stat also accepts a descriptor
    if stat.S_ISDIR(mode):
        raise not_a_file_error(path)
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
    """Return a unique temporary path in the folder of `path`."""
    return path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}"


def target_of(name: str) -> str | None:
    """Return the final name for the temporary name of a file, or None if `name` is not a temporary name."""
    match = _TEMPORARY.fullmatch(name)
    # Temporary names may be nested: the temporary file of a cached copy is itself downloaded to a temporary file.
    return (target_of(match[1]) or match[1]) if match else None


def remove_temporaries(folder: Path, *, matches: Callable[[str], bool] = lambda target: True) -> None:
    """Remove temporary files from `folder`. The caller must hold the lock that the writers of these files use.

    Args:
        matches: Function that takes the final name of a file, and returns True to remove its temporary files.

    Raises:
        OSError: A file cannot be removed.
    """
    for path in temporaries_in(folder, matches=matches):
        remove(path)


def temporaries_in(folder: Path, *, matches: Callable[[str], bool] = lambda target: True) -> list[Path]:
    """Return the sorted paths of the temporary files in `folder`; [] if the folder does not exist.

    Args:
        matches: Function that takes the final name of a file, and returns True to select its temporary files.
    """
    try:
        with os.scandir(folder) as entries:
            candidates = [entry for entry in entries if entry.name.startswith(TEMPORARY_PREFIX)]
            return sorted(
                Path(entry.path)
                for entry in candidates
                if (target := target_of(entry.name)) is not None
                and matches(target)
                and entry.is_file(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk.

    Raises:
        OSError: The flush failed. The error contains the path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with tag_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder if it is missing, and flush its entry in the parent folder to disk. The parent must exist."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        sync(path.parent)


CHECKSUM_KEY = "sha256"  # key of the checksum in a record; the checksum covers all other keys


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: The text is not valid JSON or UTF-8, or is nested too deeply for the parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def record_sha256(record: dict[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON form of `record`.

    The hash depends neither on whitespace nor on the order of the keys.
    """
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def publish_checked_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record` and its checksum to the file `path` atomically, as JSON."""
    publish_json(path, {**record, CHECKSUM_KEY: record_sha256(record)})


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read a JSON record, verify its checksum, and return the record without the checksum.

    Raises:
        OSError: The file cannot be read. The error contains the path.
        ValueError: `path` is a folder, the file does not contain a JSON object, or the checksum is missing or wrong.
    """
    try:
        record = parse_json(read_record(path))
    except IsADirectoryError as error:
        raise ValueError(error.strerror) from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    checksum = record.pop(CHECKSUM_KEY, None)
    if checksum is None:
        raise ValueError("it has no checksum")
    if checksum != record_sha256(record):
        raise ValueError("its checksum does not match its content")
    return record
