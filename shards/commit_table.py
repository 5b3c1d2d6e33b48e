"""All commits of a variant in one table, `<variant>/commits.arrow`, so that readers open one file instead of thousands.

The table is an Arrow IPC file with one batch, and one row per intact commit, in ascending order of shard ID (columns:
SCHEMA). It is derived from the commit records; a shard exists only if it has a record.
`clipmill.shards.lists.finish_run` writes the table before contents.json, which records its SHA-256. The table's bytes
depend only on the commits.

Readers trust the table if its bytes have the recorded SHA-256. It then replaces the records of each folder of commits
whose modification time matches the table: a date between 2001 and 2004, computed from the table's SHA-256. The process
that writes the table sets this date on the folders. Adding, replacing or removing a record changes the date, and
readers then read the JSON files of that folder. No clock is involved. A copy that preserves times (`cp -a`, `rsync -a`)
keeps the dates, so readers use its table. In a copy with new times (`cp -r`), readers open each record, until the next
run has confirmed the table.

A record that is damaged in place, for example by a failing disk, does not change its folder's date, so readers use the
table, which is correct. `prep verify` reads every record, and changes the date of each folder with a damaged record.
Plans and status also read the records that are newer than the table (clipmill.shards.verify).

contents.json lists the committed shards, with checksums of the variant's other small files. The existing records do not
show that a record is missing, so readers compare them with this list.
"""

import hashlib
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import publish_checked_json, read_checked_json
from clipmill.shards.format import COMMIT_TABLE_FILE, COMMITS_FOLDER, CONTENTS_FILE, FORMAT_VERSION, folders_in
from clipmill.shards.opening import DamagedContents, open_regular


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
    """Read contents.json of a variant; return None during the variant's first run.

    Raises:
        DamagedContents: The file is damaged.
        UserError: The file is intact, but uses another version of the format.
        OSError: The file cannot be read.
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
    """Read contents.json of a variant; return empty contents if the file is missing or damaged."""
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


_FORMAT_KEY = b"clipmill_format"
# Dates of folders, in even seconds, because some file systems and archives store times in steps of 2 s.
_FIRST_DATE_S = 1_000_000_000
_NUM_DATES = 50_000_000

SCHEMA = pa.schema(
    [
        pa.field("shard_id", pa.int64(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("plan_fingerprint", pa.string(), nullable=False),
        # The shard's files; null if every sample failed.
        pa.field("tar", pa.string()),
        pa.field("tar_bytes", pa.int64()),
        pa.field("tar_sha256", pa.string()),
        pa.field("index", pa.string()),
        pa.field("index_bytes", pa.int64()),
        pa.field("index_sha256", pa.string()),
        pa.field("num_samples", pa.int64()),
        pa.field("failures", pa.string()),  # JSON in ASCII, as in the record; null if there are none
        pa.field("seconds", pa.float64()),  # of video in the shard, 0 if samples have no duration; null if unknown
    ],
    metadata={_FORMAT_KEY: str(FORMAT_VERSION).encode()},
)


@dataclass(frozen=True)
class CommitTable:
    """The memory-mapped commit table of a variant. Its bytes match the checksum in contents.json."""

    rows: pa.Table
    sha256: str


def table_written_ns(variant_dir: Path) -> int | None:
    """Return the time at which the table of a variant was written, in ns; None if there is no table."""
    try:
        return (variant_dir / COMMIT_TABLE_FILE).stat().st_mtime_ns
    except OSError:
        return None


def table_bytes(rows: pa.Table) -> bytes:
    """Serialize rows of SCHEMA, in ascending order of shard ID, as the content of the file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def open_commit_table(variant_dir: Path, *, sha256: str | None) -> CommitTable | None:
    """Map the commit table of a variant and verify its bytes; return None if it is missing or does not match.

    Args:
        sha256: Checksum that contents.json records (hex), or None if it records none.
    """
    if sha256 is None:
        return None
    path = variant_dir / COMMIT_TABLE_FILE
    try:
        descriptor = open_regular(path)
        try:
            with map_arrow_file(path) as mapped:
                content = mapped.read_buffer()
                if hashlib.sha256(content).hexdigest() != sha256:
                    return None
                rows = pa.ipc.open_file(content).read_all()
        finally:
            os.close(descriptor)
    except (OSError, ValueError, pa.ArrowException):
        return None
    is_known = rows.schema.equals(SCHEMA, check_metadata=True)  # otherwise a different version wrote the table
    return CommitTable(rows, sha256) if is_known else None


def commit_folders(variant_dir: Path) -> dict[str, int]:
    """Return the modification time of each folder of commits in ns, by name; the name of `commits/` itself is empty.

    Raises:
        FileNotFoundError: The variant has no folder of commits.
    """
    root = variant_dir / COMMITS_FOLDER
    times = {"": root.stat().st_mtime_ns}
    for folder in folders_in(root):
        with suppress(FileNotFoundError):  # the folder was removed after it was listed
            times[folder.name] = folder.stat().st_mtime_ns
    return times


def confirm(variant_dir: Path, *, sha256: str, folders: Mapping[str, int], except_for: Collection[str] = ()) -> None:
    """Declare that the table replaces the records of the given folders of commits.

    In a copy of a variant without its records, such as the local copy of a remote variant, empty folders can be
    confirmed as well.

    Args:
        sha256: SHA-256 of the table (hex). The table must already be published, and its checksum recorded.
        folders: Modification time of each folder in ns by name, taken before its records were read. A folder that has
            changed since then is not confirmed.
        except_for: Folders that are not confirmed.
    """
    date_ns = date_of(sha256)
    for name, seen_ns in folders.items():
        folder = variant_dir / COMMITS_FOLDER / name
        # If the date cannot be set, for lack of permission, readers use the records.
        with suppress(OSError):
            if name not in except_for and seen_ns != date_ns and folder.stat().st_mtime_ns == seen_ns:
                os.utime(folder, ns=(date_ns, date_ns))


def date_of(sha256: str) -> int:
    """Return the modification time, in ns, of the folders whose records the table with this SHA-256 replaces."""
    return (_FIRST_DATE_S + 2 * (int(sha256[:16], 16) % _NUM_DATES)) * 1_000_000_000


def distrust(record: Path) -> None:
    """Change the date of a damaged record's folder, so that readers read all records in it.

    Raises:
        OSError: The folder belongs to another user, or the disk is read-only.
    """
    os.utime(record.parent)
