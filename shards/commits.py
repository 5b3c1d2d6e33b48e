"""Commit records, which make shards exist: readers ignore a tar without a commit record.

Each record is a small JSON file with a checksum of its content. It contains neither times nor host names.
clipmill.shards.commit_table reads all records of a variant.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import make_folder, publish_bytes, read_checked_json, record_sha256
from clipmill.shards.format import (
    COMMITS_FOLDER,
    FORMAT_VERSION,
    commit_name,
    shard_id_of,
    shard_path,
)
from clipmill.shards.opening import DamagedCommit


@dataclass(frozen=True)
class ShardFiles:
    """The files of a shard, as paths relative to the variant's folder.

    The commit guarantees the content of the tar and of the Arrow index, but not of Megatron-Energon's index.
    """

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
        """Size of the tar and the Arrow index in bytes."""
        return self.tar_bytes + self.index_bytes


@dataclass(frozen=True)
class Failure:
    """A video, or a part of a video, that could not be processed."""

    video_id: str
    key: str | None  # key of the first chunk in the failed part; None if the complete video failed
    code: str  # failure code of `prep`, such as source_missing
    message: str


@dataclass(frozen=True)
class Commit:
    """A finished shard. `plan_fingerprint` identifies its plan, and `files` is None if every sample failed."""

    column: str
    shard_id: int
    split: str
    plan_fingerprint: str
    files: ShardFiles | None
    failures: tuple[Failure, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the tar and the Arrow index in bytes; 0 if there are no files."""
        return 0 if self.files is None else self.files.size_bytes


def commit_path(variant_dir: Path, shard_id: int) -> Path:
    """Return the path of a shard's commit record."""
    return variant_dir / COMMITS_FOLDER / shard_path(shard_id, commit_name(shard_id))


def write_commit(variant_dir: Path, commit: Commit) -> None:
    """Publish a commit record, so that readers see the shard. The variant's folder must exist."""
    path = commit_path(variant_dir, commit.shard_id)
    make_folder(variant_dir / COMMITS_FOLDER)
    make_folder(path.parent)
    publish_bytes(path, commit_bytes(commit))


def commit_bytes(commit: Commit) -> bytes:
    """Serialize `commit` as the content of its record."""
    record = {"clipmill_format": FORMAT_VERSION, **asdict(commit), "failures": [asdict(f) for f in commit.failures]}
    # ASCII escapes, because a message may quote a path that is not valid UTF-8.
    text = json.dumps({**record, "sha256": record_sha256(record)}, indent=1, sort_keys=True, ensure_ascii=True)
    return f"{text}\n".encode()


def read_commit(path: Path) -> Commit:
    """Read a commit record.

    Raises:
        DamagedCommit: The file is damaged, or was not written by clipmill.
        UserError: The record is intact, but has a different version of the format.
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
            if shard_id_of(base) != commit.shard_id or name != shard_path(commit.shard_id, base):
                raise DamagedCommit(path, f"{name!r} is not a file of shard {commit.shard_id}")
    return commit


def read_commits_by_id(variant_dir: Path, shard_ids: Iterable[int]) -> dict[int, Commit]:
    """Read the commit records of the given shards, by shard ID. Missing and damaged records are omitted.

    Raises:
        UserError: A record is intact, but has a different version of the format.
    """
    commits = {}
    for shard_id in sorted(shard_ids):
        with suppress(FileNotFoundError, DamagedCommit):
            commits[shard_id] = read_commit(commit_path(variant_dir, shard_id))
    return commits
