"""Functions that copy data folders between a bucket and a local disk, and compare them."""

import hashlib
from pathlib import Path

from clipmill.manifests.storage.objects import open_objects


def upload(folder: Path, address: str) -> None:
    """Copy a local folder to a URL; commits come last, as in a run."""
    objects = open_objects(address)
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    for path in sorted(paths, key=lambda path: ("commits" in path.parts, path)):
        objects.write(path.relative_to(folder).as_posix(), path)


def contents_of(address: str) -> dict[str, str]:
    """Return the SHA-256 of every object by its key, without the locks.

    Compare it with `tests.prep.running.contents`.
    """
    objects = open_objects(address)
    return {
        info.key: hashlib.sha256(objects.read(info.key)).hexdigest()
        for info in sorted(objects.list(), key=lambda info: info.key)
        if not info.key.endswith(".lock")
    }
