"""The contents of a variant (`contents.json`): its committed shards, and checksums of its other small files.

A missing commit record cannot be noticed from the remaining ones; readers compare the records with this list instead.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.checked_json import publish_checked_json, read_checked_json
from clipmill.manifests.errors import UserError
from clipmill.shards.damage import DamagedContents
from clipmill.shards.format import CONTENTS_FILE, FORMAT_VERSION


@dataclass(frozen=True)
class Contents:
    """The state of a variant at the end of its last completed run.

    Attributes:
        shard_ids: IDs of the committed shards.
        files: SHA-256 (hex) of recipe.json, of each shard list, and of the table of commits, by file name.
    """

    shard_ids: frozenset[int]
    files: Mapping[str, str]


def read_contents(variant_dir: Path) -> Contents | None:
    """Read the contents of a variant; None during its first run.

    Raises:
        DamagedContents: the file is damaged.
        UserError: the file is intact, but uses another version of the format.
        OSError: the file cannot be read.
    """
    path = variant_dir / CONTENTS_FILE
    try:
        record = read_checked_json(path)
        version, shard_ids, files = (record[name] for name in ("clipmill_format", "shard_ids", "files"))
        contents = Contents(frozenset(map(int, shard_ids)), {str(name): str(files[name]) for name in files})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedContents(path, f"not a valid {CONTENTS_FILE} ({error})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version!r}, but this version of clipmill reads format {FORMAT_VERSION}",
            hint="use the version of clipmill that wrote the data",
        )
    return contents


def listed_contents(variant_dir: Path) -> Contents:
    """Read the contents of a variant; they list nothing if they are unknown."""
    try:
        contents = read_contents(variant_dir)
    except DamagedContents:
        contents = None
    return contents if contents is not None else Contents(frozenset(), {})


def write_contents(variant_dir: Path, contents: Contents) -> None:
    """Publish `contents`, unless contents.json already holds them."""
    try:
        if read_contents(variant_dir) == contents:
            return
    except DamagedContents:
        pass  # replaced below, because it is derived from the files on disk
    record = {
        "clipmill_format": FORMAT_VERSION,
        "shard_ids": sorted(contents.shard_ids),
        "files": dict(contents.files),
    }
    publish_checked_json(variant_dir / CONTENTS_FILE, record)


def file_sha256(content: bytes) -> str:
    """Return the checksum that `Contents.files` records for a file with this content."""
    return hashlib.sha256(content).hexdigest()
