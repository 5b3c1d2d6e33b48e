"""Commit records: a shard exists only once its commit record has been written.

Each record is a small JSON file with a checksum of its content. It contains neither times nor host names. Where the
commit table is current, the records are read from the table (clipmill.shards.commit_table).
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import make_folder, publish_bytes, read_checked_json, record_sha256
from clipmill.shards.format import (
    COMMIT_TABLE_FILE,
    COMMITS_FOLDER,
    CONTENTS_FILE,
    FORMAT_VERSION,
    commit_name,
    folder_of,
    in_folder,
    shard_id_of,
)
from clipmill.shards.opening import DamagedCommit

if TYPE_CHECKING:
    from clipmill.shards.commit_table import CommitTable  # only readers of all commits load it

_COMMIT_FILE = re.compile(r"(\d{6,})\.json")
_MISSING = f"the commit record is missing, although {CONTENTS_FILE} lists it"


@dataclass(frozen=True)
class ShardFiles:
    """A shard's files, as paths in the variant's folder. Its commit guarantees the tar and the index, not Energon's."""

    tar: str
    tar_bytes: int
    tar_sha256: str
    index: str
    index_bytes: int
    index_sha256: str
    num_samples: int

    @property
    def energon_index(self) -> str:
        return f"{self.tar}.idx"

    @property
    def size_bytes(self) -> int:
        """Size of tar and index."""
        return self.tar_bytes + self.index_bytes


@dataclass(frozen=True)
class Failure:
    """A part of a shard that could not be produced."""

    video_id: str
    key: str | None  # first chunk of the failed part; None when the video failed completely
    code: str
    message: str


@dataclass(frozen=True)
class Commit:
    """A finished shard, produced by the plan with `plan_fingerprint`; `files` is None if every sample failed."""

    column: str
    shard_id: int
    split: str
    plan_fingerprint: str
    files: ShardFiles | None
    failures: tuple[Failure, ...]

    @property
    def size_bytes(self) -> int:
        """Size of tar and index; 0 without files."""
        return 0 if self.files is None else self.files.size_bytes


@dataclass(frozen=True)
class Records:
    """All commit records of a variant, and the source from which each was read.

    Attributes:
        commits: Intact commits in ascending order of shard ID.
        damaged: Errors for the damaged and missing records.
        folders: Modification time in ns of each folder of commits, taken before its records were read.
        table: Commit table of the variant; None if the table is missing or unusable.
        from_table: Names of the folders whose records were read from the table.
    """

    commits: dict[int, Commit]
    damaged: tuple[DamagedCommit, ...] = ()
    folders: Mapping[str, int] = field(default_factory=dict)
    table: "CommitTable | None" = None
    from_table: frozenset[str] = frozenset()

    @property
    def is_table_current(self) -> bool:
        """True if the table holds exactly these commits, and all of them were read from it."""
        if self.table is None or self.damaged or self.from_table != self.folders.keys():
            return False
        return len(self.commits) == self.table.rows.num_rows

    def seconds(self) -> dict[int, float]:
        """Return the seconds of video in each shard by shard ID, for shards whose duration is in the table."""
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

    def rows(self, *, seconds: Mapping[int, float]) -> pa.Table:
        """Return these commits as a table (commit_table.SCHEMA) in one chunk; for `seconds`, see `seconds()`."""
        from clipmill.shards.commit_table import SCHEMA

        files = [commit.files for commit in self.commits.values()]
        columns: dict[str, list[Any]] = {
            "shard_id": list(self.commits),
            "failures": [
                json.dumps([asdict(failure) for failure in commit.failures]) if commit.failures else None
                for commit in self.commits.values()
            ],
            "seconds": [seconds.get(shard_id) for shard_id in self.commits],
        }
        for name in ("column", "split", "plan_fingerprint"):
            columns[name] = [getattr(commit, name) for commit in self.commits.values()]
        for name in _FILE_FIELDS:
            columns[name] = [None if file is None else getattr(file, name) for file in files]
        return pa.table(columns, schema=SCHEMA)


_FILE_FIELDS = tuple(file_field.name for file_field in fields(ShardFiles))


def commit_path(variant_dir: Path, shard_id: int) -> Path:
    """Return the path of the commit record of `shard_id`."""
    return variant_dir / COMMITS_FOLDER / in_folder(shard_id, commit_name(shard_id))


def write_commit(variant_dir: Path, commit: Commit) -> None:
    """Publish `commit`, which makes its shard visible to readers. The variant's folder must exist."""
    path = commit_path(variant_dir, commit.shard_id)
    make_folder(variant_dir / COMMITS_FOLDER)
    make_folder(path.parent)
    publish_bytes(path, commit_bytes(commit))


def commit_bytes(commit: Commit) -> bytes:
    """Return the content of the record of `commit`."""
    record = {"clipmill_format": FORMAT_VERSION, **asdict(commit), "failures": [asdict(f) for f in commit.failures]}
    # ASCII escapes, because a message may quote a path that is not valid UTF-8.
    text = json.dumps({**record, "sha256": record_sha256(record)}, indent=1, sort_keys=True, ensure_ascii=True)
    return f"{text}\n".encode()


def read_commit(path: Path) -> Commit:
    """Read one commit record.

    Raises:
        DamagedCommit: The file is damaged, or is not a commit written by clipmill.
        UserError: The record is intact, but uses another version of the format.
        FileNotFoundError: The file does not exist.
    """
    try:
        record = read_checked_json(path)
    except ValueError as error:
        raise DamagedCommit(path, f"not a commit record ({error})") from error
    if (version := record.pop("clipmill_format", None)) != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version!r}, but this version of clipmill reads format {FORMAT_VERSION}",
            hint="use the version of clipmill that wrote the data",
        )
    try:
        files = record["files"]
        commit = Commit(
            **{
                **record,
                "files": None if files is None else ShardFiles(**files),
                "failures": tuple(Failure(**failure) for failure in record["failures"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise DamagedCommit(path, f"not a commit record ({error})") from error
    if commit_name(commit.shard_id) != path.name:
        raise DamagedCommit(path, f"it is the commit record of shard {commit.shard_id}")
    if commit.files is not None:
        for name in (commit.files.tar, commit.files.index):
            base = Path(name).name
            if shard_id_of(base) != commit.shard_id or name != in_folder(commit.shard_id, base):
                raise DamagedCommit(path, f"{name!r} is not a file of shard {commit.shard_id}")
    return commit


def read_commits(variant_dir: Path) -> Records:
    """Read every commit record of a variant. Files whose names are not commit names are ignored.

    If a record is listed in the variant's contents.json but missing, it is reported as damaged.

    Raises:
        UserError: A record is intact, but uses another version of the format.
    """
    from clipmill.shards.commit_table import listed_contents

    contents = listed_contents(variant_dir)
    records = _read_records(variant_dir, table_sha256=contents.files.get(COMMIT_TABLE_FILE))
    known = records.commits.keys() | {damaged.shard_id for damaged in records.damaged}
    missing = contents.shard_ids - known
    if missing:
        # A run that finishes at this time removes unwanted shards from contents.json before it deletes their records.
        missing &= listed_contents(variant_dir).shard_ids
        lost = (DamagedCommit(commit_path(variant_dir, shard_id), _MISSING) for shard_id in missing)
        damaged = sorted((*records.damaged, *lost), key=lambda damaged: damaged.shard_id)
        return replace(records, damaged=tuple(damaged))
    return records


def read_commits_of(variant_dir: Path, shard_ids: Iterable[int]) -> dict[int, Commit]:
    """Return the intact commit records of some shards, by shard id.

    Raises:
        UserError: A record is intact, but uses another version of the format.
    """
    commits = {}
    for shard_id in sorted(shard_ids):
        with suppress(FileNotFoundError, DamagedCommit):
            commits[shard_id] = read_commit(commit_path(variant_dir, shard_id))
    return commits


def _read_records(variant_dir: Path, *, table_sha256: str | None) -> Records:
    """Read the records, preferably from the table, without comparing them with contents.json."""
    from clipmill.shards.commit_table import commit_folders, date_of, open_commit_table

    try:
        folders = commit_folders(variant_dir)
    except FileNotFoundError:
        return Records({})
    table = open_commit_table(variant_dir, sha256=table_sha256)
    from_table = frozenset(name for name in folders if table is not None and folders[name] == date_of(table.sha256))
    records: dict[int, Commit | DamagedCommit] = {}
    if table is not None and from_table:
        table_commits = commits_in(table.rows)
        records |= {shard_id: commit for shard_id, commit in table_commits.items() if folder_of(shard_id) in from_table}
    for name in folders.keys() - from_table:
        records |= _read_folder(variant_dir / COMMITS_FOLDER, name)
    commits = {shard_id: record for shard_id, record in sorted(records.items()) if isinstance(record, Commit)}
    damaged = tuple(record for _, record in sorted(records.items()) if isinstance(record, DamagedCommit))
    return Records(commits, damaged, folders, table, from_table)


def _read_folder(root: Path, folder_name: str) -> dict[int, Commit | DamagedCommit]:
    """Read the records of the shards that belong in one folder, by shard ID."""
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


def commits_in(rows: pa.Table) -> dict[int, Commit]:
    """Return the commits in rows of a table, by shard ID."""
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
