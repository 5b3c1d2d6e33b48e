"""The table files of the manifest: locating valid tables, verifying checksums, and publishing new ones.

A write stages its tables beside the valid ones, as `captions-<16 digits of the write's fingerprint>.parquet`. Then it
publishes manifest.json, which holds the fingerprint, and size and checksum of each table: from now on the staged files
are the valid ones. Finally they are renamed to their plain names, such as `captions.parquet`. A write killed before it
publishes manifest.json has changed nothing; after that, readers use the staged names until the next write.
"""

import hashlib
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import remove, rename, require_regular

VIDEOS_FILE = "videos.parquet"
CAPTIONS_FILE = "captions.parquet"
REJECTED_FILE = "rejected.parquet"
REJECTED_LIST = "rejected.csv"  # the same rows for people; nothing reads it
TABLE_FILES = (CAPTIONS_FILE, REJECTED_FILE, VIDEOS_FILE)
SPANS_FILE, TEXTS_FILE = "caption_spans.arrow", "caption_texts.arrow"
MAPPED_FILES = (SPANS_FILE, TEXTS_FILE)  # derived from the tables (clipmill.manifests.caption_spans)
FINGERPRINT_KEY = b"clipmill_manifest"  # in the metadata of each table: the fingerprint of the write that created it
_STAGED = re.compile(r"(captions|rejected|videos)-[0-9a-f]{16}\.parquet|caption_(spans|texts)-[0-9a-f]{16}\.arrow")
_TOO_LARGE = "divide the videos among several data folders, which `train` takes together: --shards A --shards B"
MAX_ROWS = MAX_TEXT_BYTES = 2**31 - 1  # of a table, of the texts of a column: row numbers and offsets have 32 bits
REPAIR_HINT = (
    "run the `prep manifest` command of the dataset again; it rewrites the tables, or reports why that is impossible"
)


class DamagedManifest(UserError):
    """A file of the manifest is damaged or missing."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}", hint=REPAIR_HINT)
        self.path = path


def is_table_file(name: str) -> bool:
    """Return True for the name of a table file, staged or not."""
    return name in (*TABLE_FILES, *MAPPED_FILES) or _STAGED.fullmatch(name) is not None


def require_numbers(path: Path, *, num_rows: int, videos: pa.Table | None = None) -> None:
    """Refuse a table that is too large for row numbers and offsets of 32 bits.

    Args:
        videos: its columns, if it is the table of videos, whose columns are also used as a whole.

    Raises:
        UserError: it has too many rows, or too long texts.
    """
    if num_rows > MAX_ROWS:
        raise UserError(f"{path} would have {num_rows:,} rows, but at most {MAX_ROWS:,} are supported", hint=_TOO_LARGE)
    if videos is None:
        return
    for name in videos.column_names:
        if pa.types.is_string(videos[name].type):
            size = pc.sum(pc.binary_length(videos[name]).cast(pa.int64())).as_py() or 0
            if size > MAX_TEXT_BYTES:
                message = f"the column {name} of {path} has {size:,} bytes for {num_rows:,} videos"
                raise UserError(f"{message}, but at most {MAX_TEXT_BYTES:,} are supported", hint=_TOO_LARGE)


def staged_path(folder: Path, name: str, *, fingerprint: str) -> Path:
    """Return the path of table `name` of the write `fingerprint` before it is renamed to its plain name."""
    path = folder / name
    return path.with_name(f"{path.stem}-{fingerprint[:16]}{path.suffix}")


def describe(path: Path) -> dict[str, Any]:
    """Return the entry of a table's file in manifest.json.

    Mapped files have a CRC-32, a third of the cost of SHA-256: opening tens of millions of captions computes it.
    """
    size_bytes = path.stat().st_size
    if path.suffix == ".arrow":
        with map_arrow_file(path) as mapped:
            return {"bytes": size_bytes, "crc32": zlib.crc32(mapped.read_buffer())}
    with path.open("rb") as file:
        return {"bytes": size_bytes, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def promote(folder: Path, *, fingerprint: str) -> None:
    """Rename the staged tables of a write to their plain names, and remove those of killed writes."""
    for name in (*TABLE_FILES, *MAPPED_FILES):
        rename(staged_path(folder, name, fingerprint=fingerprint), folder / name)
    for path in folder.iterdir():
        if _STAGED.fullmatch(path.name):
            remove(path)


def table_path(folder: Path, name: str, *, manifest: Mapping[str, Any], has_checksum: bool = True) -> Path:
    """Return the path of the valid table `name`, after verifying its size and checksum against manifest.json.

    Args:
        manifest: content of manifest.json.
        has_checksum: False to verify the size alone.

    Raises:
        DamagedManifest: the file is missing, or not the one described by `manifest`.
        OSError: the file cannot be read.
    """
    # Check the staged name first: a file is renamed from it to the plain name, never back.
    staged = staged_path(folder, name, fingerprint=manifest["fingerprint"])
    path = staged if staged.exists() else folder / name
    recorded = manifest.get("tables", {}).get(name)
    if recorded is None:
        raise DamagedManifest(folder / "manifest.json", f"it has no checksum of {name}")
    try:
        require_regular(path, path=path)
        size_bytes = path.stat().st_size
        if size_bytes != recorded["bytes"]:
            raise DamagedManifest(path, f"it has {size_bytes} bytes, but {recorded['bytes']} in manifest.json")
        if has_checksum and describe(path) != recorded:
            raise DamagedManifest(path, "its checksum does not match manifest.json")
    except FileNotFoundError as error:
        raise DamagedManifest(path, "the file is missing") from error
    return path
