"""Read the manifest of a data folder: find the current files of the tables, and verify their checksums.

clipmill.manifests.schema defines the tables, and clipmill.manifests.write writes them. A write replaces one dataset and
keeps all others. Its result depends only on the new rows and on the last complete manifest, because files of an
interrupted write are never read. New tables are staged next to the old tables, and become valid when manifest.json is
published. Each table contains the fingerprint of the manifest that it belongs to.
"""

import errno
import hashlib
import re
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import read_checked_json, remove, rename, require_regular
from clipmill.manifests.schema import CAPTIONS, MANIFEST_FILE, MANIFEST_FORMAT, REJECTED, VIDEOS
from clipmill.manifests.storage.mirrors import mirror_of

if TYPE_CHECKING:
    from clipmill.manifests.storage.urls import Location


MANIFEST_FOLDER = "manifest"
_T = TypeVar("_T")
_DICTIONARY_COLUMNS = ["video_id", "source"]


def manifest_dir(data_dir: Path) -> Path:
    """Return the manifest folder of a data folder."""
    return data_dir / MANIFEST_FOLDER


def has_manifest(data_dir: Path) -> bool:
    """Return True if a data folder has a manifest."""
    return (manifest_dir(data_dir) / MANIFEST_FILE).exists()


def read_videos(data_dir: Path, *, columns: Sequence[str] = VIDEOS.names) -> pa.Table:
    """Read the table of videos (schema.VIDEOS).

    Args:
        columns: Names of the columns to read.

    Raises:
        UserError: The manifest is missing or damaged, or has too many videos.
    """
    videos = _read(data_dir, VIDEOS_FILE, VIDEOS, columns=columns)
    check_table_size(manifest_dir(data_dir) / VIDEOS_FILE, num_rows=len(videos), videos=videos)
    return videos


def read_captions(data_dir: Path) -> pa.Table:
    """Read the table of captions, with the columns of schema.CAPTIONS and any optional columns and labels.

    The chunks of a dictionary-encoded column share one dictionary.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    return _read(data_dir, CAPTIONS_FILE, CAPTIONS, dictionary_columns=_DICTIONARY_COLUMNS)


def open_captions(data_dir: Path, *, dictionary_columns: Sequence[str] = ()) -> pq.ParquetFile:
    """Open the table of captions to read it by row group. The caller must close the file.

    The open table stays the same if a new manifest is written later.

    Args:
        dictionary_columns: Columns to read with dictionary encoding.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    return read_consistently(
        data_dir, lambda manifest: _open(data_dir, CAPTIONS_FILE, CAPTIONS, manifest, dictionary_columns)
    )


def open_videos(data_dir: Path) -> pq.ParquetFile:
    """Open the table of videos to read it by row group, like `open_captions`. The caller must close the file."""
    return read_consistently(data_dir, lambda manifest: _open(data_dir, VIDEOS_FILE, VIDEOS, manifest))


def captions_path(data_dir: Path) -> Path:
    """Verify the captions file and return its path, which is valid until the next write of the manifest.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    return read_consistently(
        data_dir, lambda manifest: table_path(manifest_dir(data_dir), CAPTIONS_FILE, manifest=manifest)
    )


def read_rejected_rows(data_dir: Path) -> pa.Table:
    """Read the table of rejected rows (schema.REJECTED).

    Raises:
        UserError: The manifest is missing or damaged.
    """
    return _read(data_dir, REJECTED_FILE, REJECTED)


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """Read the content of manifest.json.

    Raises:
        UserError: The manifest is missing or damaged, or has a different format version.
    """
    path = manifest_dir(data_dir) / MANIFEST_FILE
    try:
        content = read_checked_json(path)
    except FileNotFoundError as error:
        raise UserError(
            f"no manifest in {data_dir}",
            hint=f"create one with prep manifest folder VIDEOS --data {shlex.quote(str(data_dir))}",
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}", hint="check its permissions") from error
    except ValueError as error:
        raise DamagedManifest(path, str(error)) from error
    if "format" not in content:
        raise DamagedManifest(path, "it is not a manifest")
    if content["format"] != MANIFEST_FORMAT:
        raise UserError(
            f"{path} has format {content['format']}, but this version of clipmill reads format {MANIFEST_FORMAT}",
            hint="use the version of clipmill that wrote the data",
        )
    if not isinstance(content.get("fingerprint"), str):
        raise DamagedManifest(path, "its fingerprint is missing")
    return content


def num_captions_of(data_dir: Path) -> int:
    """Return the number of captions from datasets, not counting captions from further sources."""
    return sum(int(entry.get("num_captions", 0)) for entry in read_manifest(data_dir).get("datasets", {}).values())


def known_files(data_dir: Path, dataset: str) -> dict[str, str]:
    """Return the file names of the videos in `dataset` by source ID; empty if the manifest cannot be read."""
    try:
        videos = read_videos(data_dir)
    except UserError:
        return {}  # the next write deals with a missing or damaged manifest
    videos = videos.filter(pc.equal(videos["dataset"], dataset))
    names = (path.rpartition("/")[2] for path in videos["path"].to_pylist())
    return dict(zip(videos["source_id"].to_pylist(), names, strict=True))


def _read(
    data_dir: Path,
    name: str,
    schema: pa.Schema,
    *,
    dictionary_columns: Sequence[str] = (),
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Read a table or some of its columns, without the schema metadata."""

    def read(manifest: dict[str, Any]) -> pa.Table:
        with _open(data_dir, name, schema, manifest, dictionary_columns) as file:
            table = file.read(columns=columns)  # one chunk per row group; `read_table` would return several
        return table if columns is None else table.select(columns)

    return read_consistently(data_dir, read).replace_schema_metadata().unify_dictionaries()


def _open(
    data_dir: Path, name: str, schema: pa.Schema, manifest: Mapping[str, Any], dictionary_columns: Sequence[str] = ()
) -> pq.ParquetFile:
    """Open a table, and verify that it belongs to the manifest and has all columns of the schema."""
    path = table_path(manifest_dir(data_dir), name, manifest=manifest)
    file = pq.ParquetFile(path, read_dictionary=list(dictionary_columns))
    try:
        file_schema = file.schema_arrow
        fingerprint = (file_schema.metadata or {}).get(FINGERPRINT_KEY, b"").decode("ascii", "replace")
        if fingerprint != manifest["fingerprint"]:
            raise DamagedManifest(path, f"it does not belong to {MANIFEST_FILE}, because a write was interrupted")
        missing_columns = [field.name for field in schema if field.name not in file_schema.names]
        if missing_columns:
            raise DamagedManifest(path, f"column {missing_columns[0]} is missing")
        check_table_size(path, num_rows=file.metadata.num_rows)
    except UserError:
        file.close()
        raise
    return file


def read_consistently(data_dir: Path, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Call `read` with the content of manifest.json.

    Failed reads are retried, because another process may publish a new manifest in the meantime.
    """
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


VIDEOS_FILE = "videos.parquet"
CAPTIONS_FILE = "captions.parquet"
REJECTED_FILE = "rejected.parquet"
REJECTED_LIST = "rejected.csv"  # human-readable copy of the rejected rows; no code reads it
TABLE_FILES = (CAPTIONS_FILE, REJECTED_FILE, VIDEOS_FILE)
SPANS_FILE, TEXTS_FILE = "caption_spans.arrow", "caption_texts.arrow"
MAPPED_FILES = (SPANS_FILE, TEXTS_FILE)  # files derived from the tables (clipmill.manifests.caption_spans)
FINGERPRINT_KEY = b"clipmill_manifest"  # schema metadata of a table: fingerprint of the write that created it
_STAGED = re.compile(r"(captions|rejected|videos)-[0-9a-f]{16}\.parquet|caption_(spans|texts)-[0-9a-f]{16}\.arrow")
_TOO_LARGE = "split the videos across several data folders, and pass all of them to `train`: --shards A --shards B"
# Maximum number of rows in a table, and of bytes in a text column: row indices and offsets are signed 32-bit integers.
MAX_ROWS = MAX_TEXT_BYTES = 2**31 - 1
REPAIR_HINT = "run the dataset's `prep manifest` command again; it rewrites the tables, or reports why it cannot"


class DamagedManifest(UserError):
    """A file of the manifest is damaged or missing."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path} is damaged: {fault}", hint=REPAIR_HINT)
        self.path = path


def is_table_file(name: str) -> bool:
    """Return True if a file with this name belongs to a table, staged or published."""
    return name in (*TABLE_FILES, *MAPPED_FILES) or _STAGED.fullmatch(name) is not None


def check_table_size(path: Path, *, num_rows: int, videos: pa.Table | None = None) -> None:
    """Reject a table that is too large for 32-bit row indices and offsets.

    Args:
        videos: Content of the table, if it is the table of videos. The text columns of this table are checked as well,
            because each of them is read as one array.

    Raises:
        UserError: The table has too many rows, or a text column has too many bytes.
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
    """Return the path where a write stages the table `name` before renaming the file to its final name.

    Args:
        fingerprint: Fingerprint of the write, as hexadecimal digits.
    """
    path = folder / name
    return path.with_name(f"{path.stem}-{fingerprint[:16]}{path.suffix}")


def file_entry(path: Path) -> dict[str, Any]:
    """Return the size and checksum of a table's file for manifest.json.

    The checksum of a mapped file is CRC-32, which takes a third of the time of SHA-256. Readers compute the
    checksum again, and there may be tens of millions of captions.
    """
    size_bytes = path.stat().st_size
    if path.suffix == ".arrow":
        with map_arrow_file(path) as mapped:
            return {"bytes": size_bytes, "crc32": zlib.crc32(mapped.read_buffer())}
    with path.open("rb") as file:
        return {"bytes": size_bytes, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def promote(folder: Path, *, fingerprint: str) -> None:
    """Rename the staged tables of a write to their final names, and remove staged tables of interrupted writes."""
    for name in (*TABLE_FILES, *MAPPED_FILES):
        rename(staged_path(folder, name, fingerprint=fingerprint), folder / name)
    for path in folder.iterdir():
        if _STAGED.fullmatch(path.name):
            remove(path)


def table_path(folder: Path, name: str, *, manifest: Mapping[str, Any], checks_content: bool = True) -> Path:
    """Verify the size and the checksum of the table `name`, and return the path of its file.

    Args:
        folder: Folder of the manifest.
        manifest: Content of manifest.json.
        checks_content: True to verify the checksum as well as the size.

    Raises:
        DamagedManifest: The file is missing, or does not match its entry in `manifest`.
        OSError: The file cannot be read.
    """
    # The staged name is checked first, because a file is renamed from the staged name to the final name, never back.
    staged = staged_path(folder, name, fingerprint=manifest["fingerprint"])
    path = staged if staged.exists() else folder / name
    recorded_entry = manifest.get("tables", {}).get(name)
    if recorded_entry is None:
        raise DamagedManifest(folder / "manifest.json", f"it has no checksum for {name}")
    try:
        require_regular(path, path=path)
        size_bytes = path.stat().st_size
        if size_bytes != recorded_entry["bytes"]:
            raise DamagedManifest(
                path, f"it has {size_bytes} bytes, but manifest.json records {recorded_entry['bytes']}"
            )
        if checks_content and file_entry(path) != recorded_entry:
            raise DamagedManifest(path, "its checksum does not match manifest.json")
    except FileNotFoundError as error:
        raise DamagedManifest(path, "the file is missing") from error
    return path


def check_data_dir(data_dir: Path, *, videos: "Location | None" = None) -> None:
    """Reject a path that must not be used as a data folder.

    Raises:
        UserError: The path is a file, is inside the source code of clipmill, or is the folder with the videos.
    """
    if (mirror := mirror_of(data_dir)) is not None:
        if isinstance(videos, str) and videos.rstrip("/") == mirror.url.rstrip("/"):
            raise _same_folder_error(videos)
        mirror.is_empty  # noqa: B018 - lists the bucket, so that a storage error is reported before any work begins
        return
    resolved = resolve_folder(data_dir)
    if resolved.exists() and not resolved.is_dir():
        raise UserError(f"the data folder {data_dir} is a file", hint="pass a folder with --data")
    # A folder such as `<tree>/data` is accepted, but `<tree>/shards` is a package of clipmill.
    packages = [folder for folder in (resolved, *resolved.parents) if (folder / "__init__.py").exists()]
    if _is_source_tree(resolved) or any(_is_source_tree(folder.parent) for folder in packages):
        raise UserError(
            f"the data folder {data_dir} is inside the source code of clipmill",
            hint="use a different folder, with --data or $CLIPMILL_DATA",
        )
    if isinstance(videos, Path) and resolved == resolve_folder(videos):
        raise _same_folder_error(data_dir)


def location_of(data_dir: Path) -> "Location":
    """Return the URL of a data folder in a bucket, or the path of a local data folder."""
    mirror = mirror_of(data_dir)
    return data_dir if mirror is None else mirror.url


def _same_folder_error(folder: "Location") -> UserError:
    return UserError(
        f"{folder} is both the data folder and the folder of the videos",
        hint="use a separate data folder, with --data",
    )


def resolve_folder(folder: Path) -> Path:
    """Resolve the symbolic links in the path of a folder, which need not exist.

    Raises:
        UserError: The path is not accessible because of a loop of links, a very long name, or missing permissions.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()  # unlike `exists`, this reports a loop of symbolic links
        return folder.resolve()
    except OSError as error:
        reason = "its symbolic links form a loop" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise UserError(
            f"cannot access {folder}: {reason}", hint="use a different folder, or fix its links and permissions"
        ) from error


def _is_source_tree(folder: Path) -> bool:
    return folder == Path(__file__).resolve().parents[1] or (folder / "manifests" / "schema.py").exists()
