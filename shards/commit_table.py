"""All commits of a variant, read from one table, `<variant>/commits.arrow`, instead of from thousands of records.

The table is an Arrow IPC file with one batch, and one row per intact commit, in ascending order of shard ID (columns:
SCHEMA). It is derived from the commit records, and its bytes depend only on them. `clipmill.shards.lists.finish_run`
writes the table before contents.json, which records the table's SHA-256.

Readers trust the table if its bytes have the recorded SHA-256. A date between 2001 and 2004 is computed from this
SHA-256, and the process that writes the table sets the modification time of each folder of commits to this date. The
table replaces the records in the folders that have this date. Adding, replacing or removing a record changes the time
of its folder, and readers then read the JSON files in this folder. No clock is involved. A copy that preserves times
(`cp -a`, `rsync -a`) keeps the dates, so readers use the table of the copy. In a copy with new times (`cp -r`), readers
open each record until the next run has set the dates.

If a record is damaged in place, for example by a failing disk, the time of its folder does not change, so readers use
the table, which is correct. `prep verify` reads every record, and changes the time of each folder with a damaged
record. Plans and `prep status` also read the records that are newer than the table (clipmill.shards.verify).

contents.json lists the committed shards, with checksums of the variant's other small files. Readers compare the records
with this list to detect a missing record.

Training opens few shards at a time. With tens of thousands of shards, a `Commit` object per shard in every rank would
take more memory than everything else that is needed to open a variant. `TableCommits` therefore keeps the table, and
creates `Commit` objects on demand.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, ItemsView, Iterator, Mapping, ValuesView
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.mapped_files import map_arrow_file
from clipmill.manifests.publish import publish_checked_json, read_checked_json
from clipmill.shards.commits import Commit, Failure, ShardFiles, commit_path, read_commit
from clipmill.shards.format import (
    COMMIT_TABLE_FILE,
    COMMITS_FOLDER,
    CONTENTS_FILE,
    FORMAT_VERSION,
    SHARDS_PER_FOLDER,
    folder_of,
    folders_in,
)
from clipmill.shards.opening import DamagedCommit, DamagedContents, open_regular


@dataclass(frozen=True)
class Contents:
    """The committed shards and file checksums that contents.json records.

    Attributes:
        shard_ids: IDs of the committed shards.
        files: SHA-256 (hex) of recipe.json, of each shard list, and of the table of commits, by file name.
    """

    shard_ids: frozenset[int]
    files: Mapping[str, str]


def read_contents(variant_dir: Path) -> Contents | None:
    """Read contents.json of a variant; return None if it does not exist, because the first run has not finished.

    Raises:
        DamagedContents: The file is damaged.
        UserError: The file is intact, but has a different version of the format.
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


def read_contents_or_empty(variant_dir: Path) -> Contents:
    """Read contents.json of a variant; return empty contents if the file is missing or damaged."""
    try:
        contents = read_contents(variant_dir)
    except DamagedContents:
        contents = None
    return contents if contents is not None else Contents(frozenset(), {})


def write_contents(variant_dir: Path, contents: Contents) -> None:
    """Publish `contents` as contents.json, unless the file is already up to date."""
    try:
        if read_contents(variant_dir) == contents:
            return
    except DamagedContents:
        pass  # replace the file, because all of its content can be derived from other files
    record = {
        "clipmill_format": FORMAT_VERSION,
        "shard_ids": sorted(contents.shard_ids),
        "files": dict(contents.files),
    }
    publish_checked_json(variant_dir / CONTENTS_FILE, record)


def file_sha256(content: bytes) -> str:
    """Return the SHA-256 (hex) of a file's content, as `Contents.files` records it."""
    return hashlib.sha256(content).hexdigest()


_FORMAT_KEY = b"clipmill_format"  # metadata of the schema
_COMMIT_FILE = re.compile(r"(\d{6,})\.json")
_MISSING = f"the commit record is missing, although {CONTENTS_FILE} lists the shard"
_FILE_FIELDS = tuple(file_field.name for file_field in fields(ShardFiles))
# Dates of folders are even numbers of seconds, because some file systems and archives store times in steps of 2 s.
_FIRST_DATE_S = 1_000_000_000
_NUM_DATES = 50_000_000

SCHEMA = pa.schema(
    [
        pa.field("shard_id", pa.int64(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("plan_fingerprint", pa.string(), nullable=False),
        # The fields of ShardFiles; null if every sample failed.
        pa.field("tar", pa.string()),
        pa.field("tar_bytes", pa.int64()),
        pa.field("tar_sha256", pa.string()),
        pa.field("index", pa.string()),
        pa.field("index_bytes", pa.int64()),
        pa.field("index_sha256", pa.string()),
        pa.field("num_samples", pa.int64()),
        pa.field("failures", pa.string()),  # JSON in ASCII, as in the record; null if there are no failures
        # Duration of the video in the shard in seconds; 0 if samples have no duration, null if unknown.
        pa.field("seconds", pa.float64()),
    ],
    metadata={_FORMAT_KEY: str(FORMAT_VERSION).encode()},
)


@dataclass(frozen=True)
class CommitTable:
    """The memory-mapped commit table of a variant, whose bytes match the checksum in contents.json."""

    rows: pa.Table
    sha256: str  # SHA-256 of the file (hex)


def table_modified_ns(variant_dir: Path) -> int | None:
    """Return the modification time of a variant's table in ns; None if there is no table."""
    try:
        return (variant_dir / COMMIT_TABLE_FILE).stat().st_mtime_ns
    except OSError:
        return None


def table_bytes(rows: pa.Table) -> bytes:
    """Serialize rows with schema SCHEMA, in ascending order of shard ID, as the content of commits.arrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def open_commit_table(variant_dir: Path, *, sha256: str | None) -> CommitTable | None:
    """Map the commit table of a variant and verify its bytes; return None if it is missing or does not match.

    Args:
        sha256: SHA-256 of the table in contents.json (hex); None if contents.json does not list the table.
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
    is_readable = rows.schema.equals(SCHEMA, check_metadata=True)  # False if a different version wrote the table
    return CommitTable(rows, sha256) if is_readable else None


def commit_folders(variant_dir: Path) -> dict[str, int]:
    """Return the modification time of each folder of commits in ns, by name. The name of `commits/` itself is "".

    Raises:
        FileNotFoundError: The variant has no commits.
    """
    root = variant_dir / COMMITS_FOLDER
    times = {"": root.stat().st_mtime_ns}
    for folder in folders_in(root):
        with suppress(FileNotFoundError):  # the folder was removed after it was listed
            times[folder.name] = folder.stat().st_mtime_ns
    return times


def confirm_folders(
    variant_dir: Path, *, sha256: str, folders: Mapping[str, int], omitted_folders: Collection[str] = ()
) -> None:
    """Set the table's date on folders of commits, so that the table replaces their records.

    The folders may be empty, as in the local copy of a remote variant, which contains the table but no records.

    Args:
        sha256: SHA-256 of the table (hex). The table and contents.json must already be published.
        folders: Modification time of each folder in ns, by name, taken before its records were read. A folder that has
            changed since then is omitted.
        omitted_folders: Names of other folders to omit.
    """
    date_ns = table_date_ns(sha256)
    for name, modified_ns in folders.items():
        folder = variant_dir / COMMITS_FOLDER / name
        # If the date cannot be set, readers use the records.
        with suppress(OSError):
            if name not in omitted_folders and modified_ns != date_ns and folder.stat().st_mtime_ns == modified_ns:
                os.utime(folder, ns=(date_ns, date_ns))


def table_date_ns(sha256: str) -> int:
    """Return the date (in ns) that marks the folders whose records are replaced by the table with this SHA-256."""
    return (_FIRST_DATE_S + 2 * (int(sha256[:16], 16) % _NUM_DATES)) * 1_000_000_000


def distrust_folder(record: Path) -> None:
    """Change the date of a damaged record's folder, so that readers use the records in the folder, not the table.

    Raises:
        OSError: The folder belongs to another user, or the disk is read-only.
    """
    os.utime(record.parent)


@dataclass(frozen=True)
class CommitRecords:
    """All commit records of a variant, read from the table or from the JSON files.

    Attributes:
        commits: Intact commits by shard ID, in ascending order.
        damaged: Errors for the damaged and missing records.
        folders: Modification time of each folder of commits in ns, by name, taken before its records were read.
        table: Commit table of the variant; None if the table is missing or unusable.
        table_folders: Names of the folders whose records were read from the table.
    """

    commits: dict[int, Commit]
    damaged: tuple[DamagedCommit, ...] = ()
    folders: Mapping[str, int] = field(default_factory=dict)
    table: CommitTable | None = None
    table_folders: frozenset[str] = frozenset()

    @property
    def is_table_current(self) -> bool:
        """True if all commits were read from the table, and the table contains no other commits."""
        if self.table is None or self.damaged or self.table_folders != self.folders.keys():
            return False
        return len(self.commits) == self.table.rows.num_rows

    def shard_seconds(self) -> dict[int, float]:
        """Return the duration of each shard's video in seconds, by shard ID. Unknown durations are omitted."""
        if self.table is None:
            return {}
        rows = self.table.rows.filter(pc.is_valid(self.table.rows["seconds"]))
        columns = (rows[name].to_pylist() for name in ("shard_id", "index_sha256", "seconds"))
        known_seconds = {}
        for shard_id, index_sha256, seconds in zip(*columns, strict=True):
            commit = self.commits.get(shard_id)
            # A shard that was rebuilt after the table was written has a different index.
            if commit is not None and commit.files is not None and commit.files.index_sha256 == index_sha256:
                known_seconds[shard_id] = seconds
        return known_seconds

    def to_table(self, *, shard_seconds: Mapping[int, float]) -> pa.Table:
        """Return these commits as a table with schema SCHEMA and one Arrow chunk per column.

        Args:
            shard_seconds: Duration of each shard's video in seconds, by shard ID, if known.
        """
        files = [commit.files for commit in self.commits.values()]
        columns: dict[str, list[Any]] = {
            "shard_id": list(self.commits),
            "failures": [
                json.dumps([asdict(failure) for failure in commit.failures]) if commit.failures else None
                for commit in self.commits.values()
            ],
            "seconds": [shard_seconds.get(shard_id) for shard_id in self.commits],
        }
        for name in ("column", "split", "plan_fingerprint"):
            columns[name] = [getattr(commit, name) for commit in self.commits.values()]
        for name in _FILE_FIELDS:
            columns[name] = [None if file is None else getattr(file, name) for file in files]
        return pa.table(columns, schema=SCHEMA)


def read_commits(variant_dir: Path) -> CommitRecords:
    """Read all commit records of a variant. Files with other names are ignored.

    A record is reported as damaged if contents.json lists its shard but the record is missing.

    Raises:
        UserError: A record or contents.json is intact, but has a different version of the format.
    """
    contents = read_contents_or_empty(variant_dir)
    records = _read_records(variant_dir, table_sha256=contents.files.get(COMMIT_TABLE_FILE))
    read_ids = records.commits.keys() | {error.shard_id for error in records.damaged}
    missing_ids = contents.shard_ids - read_ids
    if missing_ids:
        # Read contents.json again: a run that is finishing removes unwanted shards from it before it deletes their
        # records.
        missing_ids &= read_contents_or_empty(variant_dir).shard_ids
        missing_errors = (DamagedCommit(commit_path(variant_dir, shard_id), _MISSING) for shard_id in missing_ids)
        damaged = sorted((*records.damaged, *missing_errors), key=lambda error: error.shard_id)
        return replace(records, damaged=tuple(damaged))
    return records


def _read_records(variant_dir: Path, *, table_sha256: str | None) -> CommitRecords:
    """Read the records from the table where it is valid, and from the JSON files otherwise."""
    try:
        folders = commit_folders(variant_dir)
    except FileNotFoundError:
        return CommitRecords({})
    table = open_commit_table(variant_dir, sha256=table_sha256)
    table_folders = frozenset(
        name for name in folders if table is not None and folders[name] == table_date_ns(table.sha256)
    )
    records: dict[int, Commit | DamagedCommit] = {}
    if table is not None and table_folders:
        table_commits = commits_from_rows(table.rows)
        records |= {
            shard_id: commit for shard_id, commit in table_commits.items() if folder_of(shard_id) in table_folders
        }
    for name in folders.keys() - table_folders:
        records |= _read_folder(variant_dir / COMMITS_FOLDER, name)
    commits = {shard_id: record for shard_id, record in sorted(records.items()) if isinstance(record, Commit)}
    damaged = tuple(record for _, record in sorted(records.items()) if isinstance(record, DamagedCommit))
    return CommitRecords(commits, damaged, folders, table, table_folders)


def _read_folder(root: Path, folder_name: str) -> dict[int, Commit | DamagedCommit]:
    """Read the JSON files in a folder of commits, by shard ID."""
    folder = root / folder_name
    records: dict[int, Commit | DamagedCommit] = {}
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except FileNotFoundError:  # the folder was removed after it was listed
        return records
    for name in names:
        match = _COMMIT_FILE.fullmatch(name)
        if match is None or folder_of(int(match[1])) != folder_name:
            continue
        try:
            records[int(match[1])] = read_commit(folder / name)
        except DamagedCommit as error:
            records[int(match[1])] = error
    return records


def commits_from_rows(rows: pa.Table) -> dict[int, Commit]:
    """Return the commits in rows of a table with schema SCHEMA, by shard ID."""
    names = ("column", "shard_id", "split", "plan_fingerprint", "failures")
    columns = zip(*(rows[name].to_pylist() for name in names), strict=True)
    files = zip(*(rows[name].to_pylist() for name in _FILE_FIELDS), strict=True)
    commits = {}
    for (column, shard_id, split, fingerprint, failures_json), values in zip(columns, files, strict=True):
        failures = (
            tuple(Failure(**failure) for failure in json.loads(failures_json)) if failures_json is not None else ()
        )
        shard_files = None if values[0] is None else ShardFiles(*values)
        commits[shard_id] = Commit(column, shard_id, split, fingerprint, shard_files, failures)
    return commits


class TableCommits(Mapping[int, Commit]):
    """Mapping from shard ID to commit, in ascending order, based on the rows of a table with schema SCHEMA."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self._shard_ids: NDArray[np.int64] = rows["shard_id"].to_numpy()
        self._cached_commits: dict[int, Commit] | None = None

    def __getitem__(self, shard_id: int) -> Commit:
        row = int(np.searchsorted(self._shard_ids, shard_id))
        if row == len(self._shard_ids) or self._shard_ids[row] != shard_id:
            raise KeyError(shard_id)
        return commits_from_rows(self.rows.slice(row, 1))[shard_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._shard_ids.tolist())

    def __len__(self) -> int:
        return len(self._shard_ids)

    def items(self) -> ItemsView[int, Commit]:
        return self._all_commits().items()

    def values(self) -> ValuesView[Commit]:
        return self._all_commits().values()

    def _all_commits(self) -> dict[int, Commit]:
        if self._cached_commits is None:
            self._cached_commits = commits_from_rows(self.rows)
        return self._cached_commits

    def folders(self) -> set[str]:
        """Return the names of the folders that contain these commits (`folder_of`)."""
        first_ids = np.unique(self._shard_ids // SHARDS_PER_FOLDER * SHARDS_PER_FOLDER)
        return {folder_of(first_id) for first_id in first_ids.tolist()}

    def rows_with_files(self) -> pa.Table:
        """Return the rows of the commits that have files, without creating `Commit` objects."""
        return self.rows.filter(pc.is_valid(self.rows["tar"]))

    @cached_property
    def digest(self) -> bytes:
        """Digest (hex) of everything that a merged table depends on: shard IDs, index checksums and failed keys."""
        digest = hashlib.sha256()
        columns = (self.rows[name].to_pylist() for name in ("shard_id", "index_sha256", "failures"))
        for shard_id, index_sha256, failures in zip(*columns, strict=True):
            failed_keys = [failure["key"] for failure in json.loads(failures)] if failures else []
            digest.update(f"{shard_id} {index_sha256} {failed_keys}\n".encode())
        return digest.hexdigest().encode()

    def index_checksums(self) -> dict[int, str]:
        """Return the SHA-256 (hex) of the index of each shard with files, by shard ID."""
        rows = self.rows_with_files()
        return dict(zip(rows["shard_id"].to_pylist(), rows["index_sha256"].to_pylist(), strict=True))

    def shard_seconds(self) -> dict[int, float]:
        """Return the duration of each shard's video in seconds, by shard ID. Unknown durations are omitted."""
        rows = self.rows.filter(pc.is_valid(self.rows["seconds"]))
        return dict(zip(rows["shard_id"].to_pylist(), rows["seconds"].to_pylist(), strict=True))

    def split_by_folder(self) -> "Iterator[tuple[str, TableCommits]]":
        """Yield (name of the folder, commits of its shards) for each folder of shards, in order."""
        start = 0
        for folder, shard_ids in groupby(self, key=folder_of):
            count = sum(1 for _ in shard_ids)
            yield folder, TableCommits(self.rows.slice(start, count))
            start += count


def open_commits(variant_dir: Path) -> tuple[TableCommits, tuple[DamagedCommit, ...]]:
    """Open the commits of a variant from its table, or from its records if the table is not current.

    Returns:
        The intact commits, and errors for damaged and missing records.

    Raises:
        UserError: contents.json or a record has a different version of the format.
    """
    commits = open_table_commits(variant_dir)
    if commits is not None:
        return commits, ()
    records = read_commits(variant_dir)
    return TableCommits(records.to_table(shard_seconds=records.shard_seconds())), records.damaged


def open_table_commits(variant_dir: Path) -> TableCommits | None:
    """Open the commits of a variant from its table; return None if the table is not current.

    Raises:
        UserError: contents.json has a different version of the format.
    """
    contents = read_contents_or_empty(variant_dir)
    table = open_commit_table(variant_dir, sha256=contents.files.get(COMMIT_TABLE_FILE))
    if table is None:
        return None
    try:
        folders = commit_folders(variant_dir)
    except FileNotFoundError:
        return None
    commits = TableCommits(table.rows)
    is_current = set(folders.values()) == {table_date_ns(table.sha256)}
    if not is_current or not folders.keys() >= commits.folders():
        return None
    return commits if contents.shard_ids == frozenset(commits) else None


def committed_tars(variant_dir: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yield (shard ID, split, SHA-256 of the tar or None) for each commit. None means that every sample failed."""
    commits, _ = open_commits(variant_dir)
    yield from zip(*(commits.rows[name].to_pylist() for name in ("shard_id", "split", "tar_sha256")), strict=True)
