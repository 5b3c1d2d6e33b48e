"""The commits of a variant as rows of a table. `Commit` objects are created on demand.

The table is commits.arrow (clipmill.shards.commit_table). If commits.arrow is not current, the table is built from the
records. Training opens few shards at a time. With tens of thousands of shards, a `Commit` object per shard in every
rank would take more memory than everything else that is needed to open a variant.
"""

import hashlib
import json
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.shards.commit_table import commit_folders, date_of, listed_contents, open_commit_table
from clipmill.shards.commits import Commit, commits_in, read_commits
from clipmill.shards.format import COMMIT_TABLE_FILE, SHARDS_PER_FOLDER, folder_of
from clipmill.shards.opening import DamagedCommit


class TableCommits(Mapping[int, Commit]):
    """Commits in ascending order of shard ID, in the rows of a table (clipmill.shards.commit_table.SCHEMA)."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self._shard_ids: NDArray[np.int64] = rows["shard_id"].to_numpy()
        self._all: dict[int, Commit] | None = None

    def __getitem__(self, shard_id: int) -> Commit:
        row = int(np.searchsorted(self._shard_ids, shard_id))
        if row == len(self._shard_ids) or self._shard_ids[row] != shard_id:
            raise KeyError(shard_id)
        return commits_in(self.rows.slice(row, 1))[shard_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._shard_ids.tolist())

    def __len__(self) -> int:
        return len(self._shard_ids)

    def items(self) -> ItemsView[int, Commit]:
        return self._all_commits().items()

    def values(self) -> ValuesView[Commit]:
        return self._all_commits().values()

    def _all_commits(self) -> dict[int, Commit]:
        if self._all is None:
            self._all = commits_in(self.rows)
        return self._all

    def folders(self) -> set[str]:
        """Return the names of the folders that hold the records of these commits."""
        first_ids = np.unique(self._shard_ids // SHARDS_PER_FOLDER * SHARDS_PER_FOLDER)
        return {folder_of(first_id) for first_id in first_ids.tolist()}

    def with_files(self) -> pa.Table:
        """Return the rows of the commits that have files, without creating `Commit` objects."""
        return self.rows.filter(pc.is_valid(self.rows["tar"]))

    @cached_property
    def digest(self) -> bytes:
        """Digest (hex) of everything that a merged table depends on: shard IDs, index checksums, keys of failures."""
        digest = hashlib.sha256()
        columns = (self.rows[name].to_pylist() for name in ("shard_id", "index_sha256", "failures"))
        for shard_id, index_sha256, failures in zip(*columns, strict=True):
            failed_keys = [failure["key"] for failure in json.loads(failures)] if failures else []
            digest.update(f"{shard_id} {index_sha256} {failed_keys}\n".encode())
        return digest.hexdigest().encode()

    def index_sha256(self) -> dict[int, str]:
        """Return the SHA-256 (hex) of the index of each shard with files, by shard ID."""
        rows = self.with_files()
        return dict(zip(rows["shard_id"].to_pylist(), rows["index_sha256"].to_pylist(), strict=True))

    def seconds(self) -> dict[int, float]:
        """Return the seconds of video in each shard by shard ID, for shards of known duration."""
        rows = self.rows.filter(pc.is_valid(self.rows["seconds"]))
        return dict(zip(rows["shard_id"].to_pylist(), rows["seconds"].to_pylist(), strict=True))

    def by_folder(self) -> "Iterator[tuple[str, TableCommits]]":
        """Yield each folder's name (`folder_of`) and the commits of its shards, in order."""
        begin = 0
        for folder, shard_ids in groupby(self, key=folder_of):
            count = sum(1 for _ in shard_ids)
            yield folder, TableCommits(self.rows.slice(begin, count))
            begin += count


def open_commits(variant_dir: Path) -> tuple[TableCommits, tuple[DamagedCommit, ...]]:
    """Open the commits of a variant from its table, or otherwise from its records; also return the damaged records.

    Raises:
        UserError: contents.json or a record uses another version of the format.
    """
    commits = open_table_commits(variant_dir)
    if commits is not None:
        return commits, ()
    records = read_commits(variant_dir)
    return TableCommits(records.rows(seconds=records.seconds())), records.damaged


def open_table_commits(variant_dir: Path) -> TableCommits | None:
    """Open the commits of a variant from its table; None unless it matches contents.json and no record has changed.

    Raises:
        UserError: contents.json uses another version of the format.
    """
    contents = listed_contents(variant_dir)
    table = open_commit_table(variant_dir, sha256=contents.files.get(COMMIT_TABLE_FILE))
    if table is None:
        return None
    try:
        folders = commit_folders(variant_dir)
    except FileNotFoundError:
        return None
    commits = TableCommits(table.rows)
    is_current = set(folders.values()) == {date_of(table.sha256)}
    if not is_current or not folders.keys() >= commits.folders():
        return None
    return commits if contents.shard_ids == frozenset(commits) else None


def committed_tars(variant_dir: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yield shard ID, split, and the SHA-256 of the tar (None if every sample failed) of each commit of a variant."""
    commits, _ = open_commits(variant_dir)
    yield from zip(*(commits.rows[name].to_pylist() for name in ("shard_id", "split", "tar_sha256")), strict=True)
