"""Atomic file writes, so that a reader sees either the old file or the complete new file. JSON records with checksums.

Every durable file of the project is written under a temporary name in the same folder, flushed to disk, and renamed. A
temporary name has the form `.tmp-<12 hex>-<name>`. If a process is killed, the temporary name shows which file was
being written. The next process that holds the lock for that file removes the temporary file.

If a data folder is in a bucket, the object is written before the local file appears, and deleted before the local file
is removed (`clipmill.manifests.storage.mirrors`).
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

from clipmill.manifests.errors import folder_in_place
from clipmill.manifests.storage.mirrors import mirror_of

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{12}}-(.+)", re.DOTALL)


@contextmanager
def publish_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` if the block succeeds, and remove it otherwise."""
    temporary = temporary_path(path)
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            replace(temporary, path)
    except OSError as error:
        if error.filename == os.fspath(temporary):  # a name that the user does not know
            error.filename = os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def replace(temporary: Path, path: Path) -> None:
    """Rename a complete file that has been flushed to disk from its temporary name to `path`."""
    if path.is_dir():
        raise folder_in_place(path)
    if (mirror := mirror_of(path)) is not None:
        mirror.upload(temporary, path)
    temporary.replace(path)
    sync(path.parent)


def rename(source: Path, target: Path) -> Path:
    """Rename a file or folder within its folder; return `target`."""
    mirror = mirror_of(source)
    if mirror is not None:
        mirror.move(source, target)
    new_path = source.rename(target)
    sync(target.parent)
    return new_path


def remove(*paths: Path) -> None:
    """Remove files from a folder and its subfolders, with few requests to a bucket. Files may be missing.

    Raises:
        OSError: A file cannot be removed. Other files may then remain as well.
    """
    if paths and (mirror := mirror_of(paths[0])) is not None:
        mirror.remove(*paths)
    for path in paths:
        path.unlink(missing_ok=True)


def publish_bytes(path: Path, content: bytes) -> None:
    """Publish `content` as the file `path`."""
    with publish_atomically(path) as temporary:
        temporary.write_bytes(content)


def publish_json(path: Path, value: Any) -> None:
    """Publish `value` as JSON with sorted keys, so that equal values yield identical bytes."""
    publish_bytes(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that adds `path` to an OSError without a path, such as the error of a read, write or flush."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_record(path: Path) -> bytes:
    """Read a small file.

    Raises:
        OSError: The file cannot be read, or is not a regular file. (Reading a pipe might block forever.)
    """
    with naming(path), open(path, "rb", opener=_open_regular) as file:
        return file.read()


def require_regular(file: Path | int, *, path: Path) -> None:
    """Raise an OSError with `path` if a file or descriptor is a folder, a pipe, a socket or a device."""
    mode = os.stat(file).st_mode  # noqa: PTH116 - also accepts a descriptor
    if stat.S_ISDIR(mode):
        raise folder_in_place(path)
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
    """Return a new temporary path next to `path`."""
    return path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}"


def target_of(name: str) -> str | None:
    """Return the final name of a temporary file; None if `name` is not a temporary name."""
    match = _TEMPORARY.fullmatch(name)
    # A fetched object is written to a temporary file whose name contains the temporary name of the cached copy.
    return (target_of(match[1]) or match[1]) if match else None


def remove_temporaries(folder: Path, *, of: Callable[[str], bool] = lambda target: True) -> None:
    """Remove temporary files in `folder`. The caller must hold the lock of their writers.

    Args:
        of: Predicate on the final name; only files for which it is true are removed.

    Raises:
        OSError: A file cannot be removed.
    """
    for path in temporaries_in(folder, of=of):
        remove(path)


def temporaries_in(folder: Path, *, of: Callable[[str], bool] = lambda target: True) -> list[Path]:
    """List the temporary files in `folder`, sorted; none if the folder does not exist.

    Args:
        of: Predicate on the final name, as in `remove_temporaries`.
    """
    try:
        with os.scandir(folder) as entries:
            candidates = [entry for entry in entries if entry.name.startswith(TEMPORARY_PREFIX)]
            return sorted(
                Path(entry.path)
                for entry in candidates
                if (target := target_of(entry.name)) is not None and of(target) and entry.is_file(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. An OSError contains the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create the folder `path` if it is missing, and flush its entry to disk. Its parent must exist."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        sync(path.parent)


CHECKSUM_KEY = "sha256"  # key of a checked record's checksum, which covers its other content


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: The text is not JSON, not valid UTF-8, or nested too deeply for the parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def record_sha256(record: dict[str, Any]) -> str:
    """Compute the SHA-256 (hex) of the canonical JSON of `record`. It does not depend on whitespace or key order."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def publish_checked_json(path: Path, record: dict[str, Any]) -> None:
    """Publish `record` with its checksum."""
    publish_json(path, {**record, CHECKSUM_KEY: record_sha256(record)})


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read the record at `path`, verify its checksum, and return the record without the checksum.

    Raises:
        OSError: The file cannot be read; the exception contains the file name.
        ValueError: `path` is a folder, the content is not a JSON object, or its checksum is missing or does not match.
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
