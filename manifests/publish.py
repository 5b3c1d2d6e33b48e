"""Publishing files: a reader sees the old file or the whole new one, never a part.

Every durable file of the project is made under a temporary name in its own folder, flushed to the disk,
and renamed. Temporary names begin with `.tmp-`, so that whatever a killed process leaves is easy to know.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` when the block ends well, removes it otherwise."""
    temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}-{path.name}"
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish_bytes(path: Path, content: bytes) -> None:
    """Publishes `content` as the file `path`."""
    with published(path) as temporary:
        temporary.write_bytes(content)


def publish_json(path: Path, value: Any) -> None:
    """Publishes `value` as JSON with sorted keys, so that equal values are equal bytes."""
    publish_bytes(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def sync(path: Path) -> None:
    """Flushes a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
