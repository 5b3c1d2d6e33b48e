"""Reading and writing the manifest of a data folder; clipmill.manifests.schema defines its tables.

A write replaces one dataset and keeps the others. The result depends only on the given rows and the last complete
manifest: remains of an interrupted write are never read. Publishing manifest.json makes the new tables valid
(clipmill.manifests.table_files); each table carries the fingerprint of the whole manifest.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.checked_json import read_checked_json
from clipmill.manifests.errors import UserError
from clipmill.manifests.schema import CAPTIONS, MANIFEST_FILE, MANIFEST_FORMAT, REJECTED, VIDEOS
from clipmill.manifests.table_files import (
    CAPTIONS_FILE,
    FINGERPRINT_KEY,
    REJECTED_FILE,
    REPAIR_HINT,
    VIDEOS_FILE,
    DamagedManifest,
    require_numbers,
    table_path,
)

MANIFEST_FOLDER = "manifest"
_T = TypeVar("_T")
_CODED = ["video_id", "source"]


def manifest_dir(data_dir: Path) -> Path:
    """Return the manifest folder of a data folder."""
    return data_dir / MANIFEST_FOLDER


def has_manifest(data_dir: Path) -> bool:
    """Return True if a data folder has a manifest."""
    return (manifest_dir(data_dir) / MANIFEST_FILE).exists()


def read_videos(data_dir: Path, *, columns: Sequence[str] = VIDEOS.names) -> pa.Table:
    """Read the videos: columns of schema.VIDEOS.

    Raises:
        UserError: there is no manifest, a write of it was interrupted, or it has too many videos.
    """
    videos = _read(data_dir, VIDEOS_FILE, VIDEOS, columns=columns)
    require_numbers(manifest_dir(data_dir) / VIDEOS_FILE, num_rows=len(videos), videos=videos)
    return videos


def read_captions(data_dir: Path) -> pa.Table:
    """Read the captions: schema.CAPTIONS, schema.LIKELIHOOD if any caption has one, and label_ columns.

    Dictionaries are unified across chunks.

    Raises:
        UserError: see `read_videos`.
    """
    return _read(data_dir, CAPTIONS_FILE, CAPTIONS, coded=_CODED)


def open_captions(data_dir: Path, *, coded: Sequence[str] = ()) -> pq.ParquetFile:
    """Open the captions for reading by row group. The caller closes the file.

    The open table stays unchanged if a new manifest is written meanwhile.

    Args:
        coded: columns to read as dictionaries.

    Raises:
        UserError: see `read_videos`.
    """
    return read_consistently(data_dir, lambda manifest: _open(data_dir, CAPTIONS_FILE, CAPTIONS, manifest, coded))


def open_videos(data_dir: Path) -> pq.ParquetFile:
    """Open the videos, like `open_captions`."""
    return read_consistently(data_dir, lambda manifest: _open(data_dir, VIDEOS_FILE, VIDEOS, manifest))


def captions_path(data_dir: Path) -> Path:
    """Return the path of the captions after verifying the checksum. It stays valid until a manifest is written.

    Raises:
        UserError: see `read_videos`.
    """
    return read_consistently(
        data_dir, lambda manifest: table_path(manifest_dir(data_dir), CAPTIONS_FILE, manifest=manifest)
    )


def read_rejected_rows(data_dir: Path) -> pa.Table:
    """Read the rejected rows, schema.REJECTED.

    Raises:
        UserError: see `read_videos`.
    """
    return _read(data_dir, REJECTED_FILE, REJECTED)


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """Read the content of manifest.json.

    Raises:
        UserError: there is no manifest, or it uses another format.
    """
    path = manifest_dir(data_dir) / MANIFEST_FILE
    try:
        content = read_checked_json(path)
    except FileNotFoundError as error:
        raise UserError(
            f"no manifest in {data_dir}",
            hint=f"create one: prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}", hint="check its permissions") from error
    except ValueError as error:
        raise DamagedManifest(path, str(error)) from error
    if "format" not in content:
        raise DamagedManifest(path, "not a manifest")
    if content["format"] != MANIFEST_FORMAT:
        raise UserError(
            f"{path} has format {content['format']}, but this version of clipmill reads format {MANIFEST_FORMAT}",
            hint="use the version of clipmill that wrote it",
        )
    if not isinstance(content.get("fingerprint"), str):
        raise DamagedManifest(path, "the fingerprint is missing")
    return content


def num_captions_of(data_dir: Path) -> int:
    """Return the number of captions in the manifest according to its entries, without those of further sources."""
    return sum(int(entry.get("num_captions", 0)) for entry in read_manifest(data_dir).get("datasets", {}).values())


def known_files(data_dir: Path, dataset: str) -> dict[str, str]:
    """Return source_id -> file name, without folders, of the videos of `dataset`; empty if no manifest can be read."""
    try:
        videos = read_videos(data_dir)
    except UserError:
        return {}  # missing or damaged, which the write handles
    videos = videos.filter(pc.equal(videos["dataset"], dataset))
    names = (path.rpartition("/")[2] for path in videos["path"].to_pylist())
    return dict(zip(videos["source_id"].to_pylist(), names, strict=True))


def _read(
    data_dir: Path,
    name: str,
    schema: pa.Schema,
    *,
    coded: Sequence[str] = (),
    columns: Sequence[str] | None = None,
) -> pa.Table:
    def read(manifest: dict[str, Any]) -> pa.Table:
        with _open(data_dir, name, schema, manifest, coded) as file:
            table = file.read(columns=columns)  # one chunk per row group, while `read_table` returns many
        return table if columns is None else table.select(columns)

    return read_consistently(data_dir, read).replace_schema_metadata().unify_dictionaries()


def _open(
    data_dir: Path, name: str, schema: pa.Schema, manifest: Mapping[str, Any], coded: Sequence[str] = ()
) -> pq.ParquetFile:
    path = table_path(manifest_dir(data_dir), name, manifest=manifest)
    file = pq.ParquetFile(path, read_dictionary=list(coded))
    try:
        found = file.schema_arrow
        if (found.metadata or {}).get(FINGERPRINT_KEY, b"").decode("ascii", "replace") != manifest["fingerprint"]:
            raise DamagedManifest(path, f"it does not belong to {MANIFEST_FILE}: a write was interrupted")
        missing = [field.name for field in schema if field.name not in found.names]
        if missing:
            raise DamagedManifest(path, f"column {missing[0]} is missing")
        require_numbers(path, num_rows=file.metadata.num_rows)
    except UserError:
        file.close()
        raise
    return file


def read_consistently(data_dir: Path, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Return `read(content of manifest.json)`, retried in case another manifest was published meanwhile."""
    for is_last in (False, False, True):
        manifest = read_manifest(data_dir)
        try:
            return read(manifest)
        except (UserError, OSError, pa.ArrowException) as error:
            if not is_last:
                continue
            if isinstance(error, UserError):
                raise
            raise UserError(f"the manifest in {data_dir} cannot be read: {error}", hint=REPAIR_HINT) from error
    raise AssertionError("the last attempt returns or raises")
