"""Function that fills a bucket from a local folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipmill.manifests.storage.objects import Objects, open_objects


def upload(folder: Path, address: str) -> Objects:
    """Upload all files of a folder and return the objects at the URL."""
    objects = open_objects(address)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: objects.write(path.relative_to(folder).as_posix(), path), paths))
    return objects
