"""The files of the manifest's tables: finding the ones that count, comparing checksums, and making new ones count.

A write stages its tables beside those that count, as `captions-<16 digits of the write's mark>.parquet`. Then it
publishes manifest.json, which holds the mark, and size and SHA-256 of each table: from here on the staged files
count. At last they take the plain names, `captions.parquet`. A write that is killed before manifest.json has changed
nothing; after it, readers find a table under its staged name until the next write.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.publish import require_regular, sync

VIDEOS_FILE = "videos.parquet"
CAPTIONS_FILE = "captions.parquet"
REJECTED_FILE = "rejected.parquet"
TABLE_FILES = (CAPTIONS_FILE, REJECTED_FILE, VIDEOS_FILE)
FINGERPRINT_KEY = b"clipmill_manifest"  # in the metadata of each table: the mark of the write that made it
_STAGED = re.compile(r"(captions|rejected|videos)-[0-9a-f]{16}\.parquet")
REPAIR_HINT = "run the `prep manifest` command of the data set again: it writes the tables anew, or says why it cannot"


class DamagedManifest(UserError):
    """A file of the manifest is damaged or missing."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}", hint=REPAIR_HINT)
        self.path = path


def staged_path(folder: Path, name: str, *, mark: str) -> Path:
    """Where the table `name` of the write with fingerprint `mark` lies until it takes its plain name."""
    path = folder / name
    return path.with_name(f"{path.stem}-{mark[:16]}{path.suffix}")


def describe(path: Path) -> dict[str, Any]:
    """What manifest.json says of a table's file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def place(folder: Path, *, mark: str) -> None:
    """Gives the staged tables of the write `mark` their plain names, and removes what killed writes staged."""
    for name in TABLE_FILES:
        staged_path(folder, name, mark=mark).replace(folder / name)
    for path in folder.iterdir():
        if _STAGED.fullmatch(path.name):
            path.unlink()
    sync(folder)


def table_path(folder: Path, name: str, *, manifest: Mapping[str, Any]) -> Path:
    """The file of the table `name` that counts, after its size and checksum were compared with manifest.json's.

    Tables of older versions have no checksum.

    Args:
        manifest: content of manifest.json.

    Raises:
        DamagedManifest: the file is missing, or not the one that `manifest` speaks of.
        OSError: it cannot be read.
    """
    # The staged name first: a file goes from there to the plain name, never back.
    staged = staged_path(folder, name, mark=manifest["fingerprint"])
    path = staged if staged.exists() else folder / name
    recorded = manifest.get("tables", {}).get(name)
    try:
        require_regular(path, path=path)
        size_bytes = path.stat().st_size
        if recorded is not None and size_bytes != recorded["bytes"]:
            raise DamagedManifest(path, f"it has {size_bytes} bytes, manifest.json says {recorded['bytes']}")
        if recorded is not None and describe(path)["sha256"] != recorded["sha256"]:
            raise DamagedManifest(path, "its checksum does not match manifest.json")
    except FileNotFoundError as error:
        raise DamagedManifest(path, "the file is missing") from error
    return path
