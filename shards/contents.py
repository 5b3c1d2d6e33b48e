"""What a variant holds (`contents.json`): the shards that are committed, and checksums of its other small files.

A missing commit record leaves no trace among the others; this list is what readers compare the records with.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manifests.checked_json import publish_checked_json, read_checked_json
from manifests.errors import UserError
from shards.damage import DamagedContents
from shards.format import CONTENTS_FILE, FORMAT_VERSION


@dataclass(frozen=True)
class Contents:
    """What the last run that came to its end left in a variant.

    Attributes:
        shard_ids: of the committed shards.
        files: SHA-256 (hex) of recipe.json and of each list of shards, by file name.
    """

    shard_ids: frozenset[int]
    files: Mapping[str, str]


def read_contents(variant_dir: Path) -> Contents | None:
    """The contents of a variant, or None where no run has written them: in its first run, or by an older version.

    Raises:
        DamagedContents: the file is damaged.
        UserError: it is whole, but of another version of the format.
        OSError: it cannot be read.
    """
    path = variant_dir / CONTENTS_FILE
    try:
        record = read_checked_json(path)
        version, shard_ids, files = (record[name] for name in ("clipmill_format", "shard_ids", "files"))
        contents = Contents(frozenset(map(int, shard_ids)), {str(name): str(files[name]) for name in files})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedContents(path, f"not a list of contents ({error})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version!r}, this program reads format {FORMAT_VERSION}",
            hint="use the version of clipmill that made the data",
        )
    return contents


def listed_shard_ids(variant_dir: Path) -> frozenset[int]:
    """Shards that must have a commit; none where the contents are not known."""
    try:
        contents = read_contents(variant_dir)
    except DamagedContents:
        return frozenset()
    return contents.shard_ids if contents is not None else frozenset()


def write_contents(variant_dir: Path, contents: Contents) -> None:
    """Publishes `contents`, unless they are recorded already."""
    try:
        if read_contents(variant_dir) == contents:
            return
    except DamagedContents:
        pass  # replaced below: it is derived from what is there
    record = {
        "clipmill_format": FORMAT_VERSION,
        "shard_ids": sorted(contents.shard_ids),
        "files": dict(contents.files),
    }
    publish_checked_json(variant_dir / CONTENTS_FILE, record)


def file_sha256(content: bytes) -> str:
    """The checksum that `Contents.files` holds of a file with this content."""
    return hashlib.sha256(content).hexdigest()
