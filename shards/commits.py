"""Commit records: a shard exists only once it has one.

Each is a small JSON file with its own checksum, and records neither times nor hosts.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from manifests.checked_json import record_sha256
from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import publish_bytes, read_record
from shards.contents import listed_shard_ids
from shards.damage import DamagedCommit
from shards.format import COMMITS_FOLDER, CONTENTS_FILE, FORMAT_VERSION, commit_name, shard_id_of

_COMMIT_FILE = re.compile(r"(\d{6,})\.json")
_MISSING = f"the commit record is missing, although {CONTENTS_FILE} lists it"


@dataclass(frozen=True)
class ShardFiles:
    """The two files that a commit guarantees, by file name in the variant's folder, and then Energon's index."""

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


@dataclass(frozen=True)
class Failure:
    """A part of the shard that could not be produced."""

    video_id: str
    key: str | None  # first chunk of the failed part; None when the whole video failed
    code: str
    message: str


@dataclass(frozen=True)
class Commit:
    """One shard of one column, produced by the plan with `plan_fingerprint`; `files` is None if every sample failed."""

    column: str
    shard_id: int
    split: str
    plan_fingerprint: str
    files: ShardFiles | None
    failures: tuple[Failure, ...]


class Commits(NamedTuple):
    """All commit records of a variant."""

    commits: dict[int, Commit]  # by shard id, ascending
    damaged: tuple[DamagedCommit, ...]


def commit_path(variant_dir: Path, shard_id: int) -> Path:
    """Return the path of the commit record of `shard_id`."""
    return variant_dir / COMMITS_FOLDER / commit_name(shard_id)


def write_commit(variant_dir: Path, commit: Commit) -> None:
    """Publish `commit`, which makes the shard visible to readers. The variant's folder must exist."""
    path = commit_path(variant_dir, commit.shard_id)
    path.parent.mkdir(exist_ok=True)
    record = {"clipmill_format": FORMAT_VERSION, **asdict(commit), "failures": [asdict(f) for f in commit.failures]}
    # ASCII escapes, because a message may quote a path that is not valid UTF-8.
    text = json.dumps({**record, "sha256": record_sha256(record)}, indent=1, sort_keys=True, ensure_ascii=True)
    publish_bytes(path, f"{text}\n".encode())


def read_commit(path: Path) -> Commit:
    """Read one commit record.

    Raises:
        DamagedCommit: the file is damaged, or is not a commit written by clipmill.
        UserError: the record is intact, but uses another version of the format.
        FileNotFoundError: the file does not exist.
    """
    try:
        record = parse_json(read_record(path))
        checksum = record.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCommit(path, f"not a commit record ({error})") from error
    if checksum != record_sha256(record):
        raise DamagedCommit(path, "its checksum does not match its content")
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
            if Path(name).name != name or shard_id_of(name) != commit.shard_id:
                raise DamagedCommit(path, f"{name!r} is not a file of shard {commit.shard_id}")
    return commit


def read_commits(variant_dir: Path) -> Commits:
    """Read every commit record of a variant. Files whose names are not commit names are ignored.

    A record that is listed in the variant's contents.json but missing is reported as damaged.

    Raises:
        UserError: a record is intact, but uses another version of the format.
    """
    listed = listed_shard_ids(variant_dir)
    found = _records(variant_dir)
    known = found.commits.keys() | {damaged.shard_id for damaged in found.damaged}
    # A run that finishes meanwhile removes unwanted shards from contents.json before it deletes their records.
    if listed - known and (missing := sorted((listed & listed_shard_ids(variant_dir)) - known)):
        gone = (DamagedCommit(commit_path(variant_dir, shard_id), _MISSING) for shard_id in missing)
        return Commits(found.commits, tuple(sorted((*found.damaged, *gone), key=lambda damaged: damaged.shard_id)))
    return found


def read_commits_of(variant_dir: Path, shard_ids: Iterable[int]) -> dict[int, Commit]:
    """Return the intact commit records of some shards, by shard id.

    Raises:
        UserError: a record is intact, but uses another version of the format.
    """
    commits = {}
    for shard_id in sorted(shard_ids):
        with suppress(FileNotFoundError, DamagedCommit):
            commits[shard_id] = read_commit(commit_path(variant_dir, shard_id))
    return commits


def _records(variant_dir: Path) -> Commits:
    """Read the records in the folder, without comparing them with contents.json."""
    commits: dict[int, Commit] = {}
    damaged = []
    try:
        paths = sorted((variant_dir / COMMITS_FOLDER).iterdir(), key=lambda path: (len(path.name), path.name))
    except FileNotFoundError:
        return Commits({}, ())
    for path in paths:
        if not _COMMIT_FILE.fullmatch(path.name):
            continue
        try:
            commit = read_commit(path)
        except DamagedCommit as error:
            damaged.append(error)
        else:
            commits[commit.shard_id] = commit
    return Commits(commits, tuple(damaged))
