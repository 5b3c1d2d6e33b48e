"""Read the committed shards of a variant and the members of its samples, and look up samples by key."""

import os
import shlex
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.mapped_files import OPEN_MAPS
from clipmill.manifests.publish import parse_json, read_record
from clipmill.shards.columns import VIDEO, command_for, how_to_make
from clipmill.shards.commit_table import file_sha256, open_commits, read_contents
from clipmill.shards.commits import Commit, ShardFiles
from clipmill.shards.dataset import current_variant, list_variants, no_shards_error, variant_dir
from clipmill.shards.format import CONTENTS_FILE, RECIPE_FILE
from clipmill.shards.index import extensions_of, open_index, open_index_content
from clipmill.shards.opening import DamagedContents, DamagedIndex, open_lock, open_regular, scan
from clipmill.shards.packets import PacketTables
from clipmill.shards.tars import LocalTars, TarBytes, TarFiles

# Maximum number of open shards per variant. Each takes 2.5 kB; the shard that was opened first is dropped first.
MAX_KEPT_SHARDS = 4096
_RECIPE_HINT = "run the command that created the variant again, with the same settings, to rewrite the file"


class CommittedShard:
    """A committed shard. The class is thread-safe.

    The index is mapped on demand, and may be unmapped when the process has mapped too many files (OPEN_MAPS).
    """

    def __init__(
        self, directory: Path, *, commit: Commit, files: ShardFiles, tars: TarBytes, verified_indexes: dict[int, int]
    ) -> None:
        self.commit = commit
        self.shard_id = commit.shard_id
        self.split = commit.split
        self.num_samples = files.num_samples
        self._directory, self._files = directory, files
        self.tar_bytes, self.tar_sha256 = files.tar_bytes, files.tar_sha256
        self._tars = tars
        # Each shard has its own lock. Up to Python 3.11, `cached_property` has one lock per class, so a shard whose
        # files do not respond would block all others. Therefore, properties that open files are not cached in this way.
        self._lock = threading.Lock()
        self._index: pa.Table | None = None
        self._packet_tables: PacketTables | None = None
        # Identity of each verified index file, by shard ID. The variant owns the dict, which outlives this object.
        self._verified_indexes = verified_indexes

    @cached_property
    def tar_path(self) -> Path:
        """Path of the tar."""
        return self._directory / self._files.tar

    @property
    def tar_name(self) -> str:
        """Name of the tar in messages: its path or URL."""
        return self._tars.name(self.tar_path)

    @cached_property
    def index_path(self) -> Path:
        """Path of the index."""
        return self._directory / self._files.index

    @property
    def index(self) -> pa.Table:
        """Index of the shard (clipmill.shards.format), verified against the commit and mapped on first use.

        Raises:
            DamagedIndex: The file differs from the commit, or is not an index of this format.
            OSError: The file cannot be read.
        """
        index = self._index
        if index is None:
            with open_lock(self._lock, self.index_path):
                index = self._index
                if index is None:
                    self.require_committed_index()
                    index = self._index = open_index(self.index_path)
        OPEN_MAPS.note_use(self)
        return index

    def close(self) -> bool:
        """Drop the index. It is unmapped once nothing uses it, and mapped again on demand. Return True."""
        self._index = self._packet_tables = None
        OPEN_MAPS.note_close(self)
        return True

    @property
    def packet_tables(self) -> PacketTables:
        """Packet tables of a `video` shard, from the verified index.

        Raises:
            DamagedIndex, OSError: See `index`.
            ValueError, KeyError: The index lacks valid packet tables.
        """
        tables = self._packet_tables
        if tables is not None:
            OPEN_MAPS.note_use(self)
            return tables
        with open_lock(self._lock, self.index_path):
            tables = self._packet_tables
            if tables is None:
                self.require_committed_index()  # before mapping: this may replace a damaged copy of a remote index
                tables = self._packet_tables = PacketTables(*open_index_content(self.index_path))
        OPEN_MAPS.note_use(self)
        return tables

    def require_committed_index(self) -> None:
        """Verify the index against its commit. The complete file is read, but only once unless the file changes.

        Raises:
            DamagedIndex: The index differs from the commit.
            OSError: The index cannot be read.
        """
        if (known := self._verified_indexes.get(self.shard_id)) is not None and known == _identity(self.index_path):
            return
        sha256 = self._files.index_sha256
        self._tars.provide(self.index_path, size_bytes=self._files.index_bytes, sha256=sha256)
        identity = _identity(self.index_path)
        if scan(self.index_path).sha256 != sha256:
            raise DamagedIndex(self.index_path, "its content differs from the commit")
        self._verified_indexes[self.shard_id] = identity

    @property
    def extensions(self) -> tuple[str, ...]:
        """Extensions of every sample's members, in member order."""
        return extensions_of(self.index)

    def member_range(self, row: int, extension: str) -> tuple[int, int]:
        """Return (offset, size) in bytes of a member's payload in the tar."""
        offset = self.index.column(f"{extension}_offset")[row].as_py()
        return offset, self.index.column(f"{extension}_size")[row].as_py()

    def read(self, row: int, extension: str) -> bytes:
        """Read the payload of a member. Its checksum is not verified (see clipmill.shards.verify)."""
        return self.read_range(*self.member_range(row, extension))

    def read_range(self, offset: int, size: int) -> bytes:
        """Read `size` bytes of the tar, starting at `offset`.

        Raises:
            DamagedTar: The tar is too short.
            OSError: The tar cannot be read.
        """
        return self._tars.read(self.tar_path, offset, size)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges (offset, size) of the tar; raises the same errors as `read_range`."""
        return self._tars.read_ranges(self.tar_path, ranges)

    @property
    def gap_bytes(self) -> int:
        """Largest gap between two ranges, in bytes, that is cheaper to read than to skip."""
        return self._tars.gap_bytes


def _identity(path: Path) -> int:
    with os.fdopen(open_regular(path), "rb") as file:  # if the data folder is in a bucket, this fetches the file
        status = os.fstat(file.fileno())
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def open_shard(variant_directory: Path, commit: Commit) -> CommittedShard:
    """Open the local shard of a commit.

    Raises:
        ValueError: The commit has no files.
    """
    if commit.files is None:
        raise ValueError(f"shard {commit.shard_id} has no files")
    return CommittedShard(variant_directory, commit=commit, files=commit.files, tars=LocalTars(), verified_indexes={})


class Variant:
    """A snapshot of a variant, with the commits that existed when it was opened.

    Args:
        directory: Folder of the variant.
        tars: Access to the bytes of tars; None if the tars are in the folder of the variant.

    Attributes:
        leave_mark: Function that marks the folder of a variant as in use when the variant is opened, and returns an
            object that keeps the mark (`clipmill.shards.marks`); None if variants are opened without marks.
        mark_user: Object that keeps the mark; None without a mark.
        commits: Intact commits.
        damaged: Errors for damaged and missing commit records, whose shards cannot be read.
        contents_damage: Error if contents.json is damaged.
    """

    leave_mark: ClassVar[Callable[[Path], object | None] | None] = None

    def __init__(self, directory: Path, *, tars: TarBytes | None = None) -> None:
        self.directory = directory
        self.mark_user: object | None = None
        self.commits, self.damaged = open_commits(directory)
        self.contents_damage: DamagedContents | None = None
        self._file_sha256: Mapping[str, str] = {}
        try:
            contents = read_contents(directory)
            self._file_sha256 = {} if contents is None else contents.files
        except DamagedContents as error:
            self.contents_damage = error
        self._tars = tars or LocalTars()
        self._open_shards: dict[int, CommittedShard] = {}
        self._verified_indexes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._lookup: tuple[list[CommittedShard], KeyLookup] | None = None

    @classmethod
    def open(
        cls, data_dir: Path, *, column: str = VIDEO, variant: str | None = None, tars: TarBytes | None = None
    ) -> "Variant":
        """Open a variant of a column.

        Args:
            variant: Name of the variant; None for the current variant.

        Raises:
            UserError: The variant does not exist, or has a different version of the format.
        """
        name = variant or current_variant(data_dir, column)
        if name is None:
            raise no_shards_error(data_dir, column)
        hint = f"run {how_to_make(column, data_dir, name)}"
        directory = variant_dir(data_dir, column, name)
        if not directory.is_dir():
            names = ", ".join(list_variants(data_dir, column))
            raise UserError(
                f"{data_dir} has no variant {name!r} of {column}",
                hint=f"use one of the available variants ({names}), or {hint}" if names else hint,
            )
        mark_user = None if cls.leave_mark is None else cls.leave_mark(directory)  # before the commits are read
        opened_variant = cls(directory, tars=tars)
        opened_variant.mark_user = mark_user
        return opened_variant

    def require_complete(self) -> "Variant":
        """Return self if the variant is complete: it has commits, and no commit is damaged or missing.

        Raises:
            UserError: The variant has no commits, or a commit or contents.json is damaged or missing.
        """
        if not self.commits and not self.damaged:
            folder = self.directory.parent
            hint = f"run {how_to_make(folder.name, folder.parent, self.directory.name)}"
            raise UserError(f"{self.directory} has no committed shards", hint=hint)
        if self.damaged:
            num_more = len(self.damaged) - 1
            others = f"; and {count_noun(num_more, 'more damaged commit record')}" if num_more else ""
            raise UserError(f"{self.damaged[0]}{others}", hint=self._repair_hint())
        if self.contents_damage is not None:
            raise UserError(str(self.contents_damage), hint=self._repair_hint())
        return self

    def _repair_hint(self) -> str:
        data_dir, column = self.directory.parent.parent, self.directory.parent.name
        verify = f"prep verify --column {column} --data {shlex.quote(str(data_dir))}"
        command = command_for(column, self.directory.name)
        settings = f"with the settings of {self.directory.name}"
        return f"run `prep {command}` {settings} to repair it; `{verify}` prints the command"

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Settings that produced the variant. They are read on first use.

        Raises:
            UserError: recipe.json is missing or damaged.
        """
        path = self.directory / RECIPE_FILE
        try:
            content = read_record(path)
            recipe = parse_json(content)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", hint=_RECIPE_HINT) from error
        expected_sha256 = self._file_sha256.get(RECIPE_FILE)
        if expected_sha256 is not None and expected_sha256 != file_sha256(content):
            raise UserError(f"{path} is damaged: its checksum does not match {CONTENTS_FILE}", hint=_RECIPE_HINT)
        if not isinstance(recipe, dict):
            raise UserError(f"{path} is not a valid recipe", hint=_RECIPE_HINT)
        return recipe

    def shards(self, split: str | None = None) -> list[CommittedShard]:
        """Return the committed shards in ascending order of ID.

        Args:
            split: Split of the shards; None for all splits.
        """
        commits = (commit for commit in self.commits.values() if commit.files is not None)
        return [self._open_shard(commit) for commit in commits if split is None or commit.split == split]

    def shard(self, shard_id: int) -> CommittedShard:
        """Return a committed shard.

        Raises:
            KeyError: No committed shard has this ID.
        """
        shard = self._open_shards.get(shard_id)
        if shard is None:
            shard = self._open_shard(self.commits[shard_id])
        while len(self._open_shards) > MAX_KEPT_SHARDS:
            with suppress(StopIteration, RuntimeError):  # another thread changed the dict at the same time
                self._open_shards.pop(next(iter(self._open_shards)), None)
        return shard

    def _open_shard(self, commit: Commit) -> CommittedShard:
        shard = self._open_shards.get(commit.shard_id)
        if shard is None:
            if commit.files is None:
                raise KeyError(commit.shard_id)
            shard = CommittedShard(
                self.directory,
                commit=commit,
                files=commit.files,
                tars=self._tars,
                verified_indexes=self._verified_indexes,
            )
        # Threads that open a shard at the same time get the same object.
        return self._open_shards.setdefault(commit.shard_id, shard)

    @cached_property
    def tar_files(self) -> TarFiles:
        """The tars of the committed shards, in ascending order of shard ID."""
        rows = self.commits.rows_with_files().combine_chunks()
        shard_ids, sizes, num_samples = (rows[name].to_numpy() for name in ("shard_id", "tar_bytes", "num_samples"))
        names = rows["tar"].chunk(0) if len(rows) else pa.array([], pa.string())
        return TarFiles(self.directory, shard_ids, names, sizes, int(num_samples.sum()))

    @property
    def num_shards(self) -> int:
        """Number of committed shards."""
        return len(self.tar_files)

    @property
    def num_samples(self) -> int:
        """Number of samples in the committed shards."""
        return self.tar_files.num_samples

    def find(self, key: str) -> tuple[CommittedShard, int]:
        """Return the shard of a sample, and the sample's row in the index. The first call reads the keys of all shards.

        Raises:
            KeyError: No committed shard contains the key.
        """
        with self._lock:
            if self._lookup is None:
                shards = self.shards()
                self._lookup = shards, KeyLookup([shard.index for shard in shards])
        shard_index, row = self._lookup[1].find(key)
        return self._lookup[0][shard_index], row

    def iterate(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the samples in order, as the dicts that WebDataset yields: `__key__`, and each payload by extension."""
        for shard in self.shards(split):
            for row, key in enumerate(shard.index.column("key")):
                members = {extension: shard.read(row, extension) for extension in shard.extensions}
                yield {"__key__": key.as_py(), **members}


class KeyLookup:
    """Lookup table for keys in the indexes of many shards.

    The sorted keys are in one Arrow array, which avoids a Python object per key.
    """

    def __init__(self, indexes: Sequence[pa.Table]) -> None:
        keys = pa.chunked_array([index.column("key").chunk(0) for index in indexes], type=pa.string())
        order = pc.sort_indices(keys)
        self._keys = keys.cast(pa.large_string()).combine_chunks().take(order)
        self._positions = order.to_numpy()
        self._first_rows = [0]
        for index in indexes:
            self._first_rows.append(self._first_rows[-1] + index.num_rows)

    def find(self, key: str) -> tuple[int, int]:
        """Return the position in `indexes` of the index that contains `key`, and the row in that index.

        Raises:
            KeyError: No index contains `key`.
        """
        rank = bisect_left(self._keys, key, key=lambda scalar: str(scalar.as_py()))
        if rank == len(self._keys) or self._keys[rank].as_py() != key:
            raise KeyError(key)
        position = int(self._positions[rank])
        table_index = bisect_right(self._first_rows, position) - 1
        return table_index, position - self._first_rows[table_index]
